"""Look for phrases that do not read as plain English: `scripts/check_prose.py [PATH…]`, by default
everything.

Reads docstrings, comments and texts in the package, scripts, recipes, examples, benchmarks and
tests, and the Markdown pages. A hit names the file, the line, the phrase and what to write instead.
This is a floor, not a goal: a text without a hit can still be hard to read. Not checked: texts that
a model sees (they are behaviour, see ``tests/engine/test_golden_prompts.py``), and ``docs/log.md``
with its archive, which are records.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RULES = {
    r"\bwhoever\b": "name the person or part",
    r"\bnobody\b": "name the person or part",
    r"\bsomebody\b": "name the person or part",
    r"\b(is|are|was|be|been|were) told\b": "is given, is logged, is notified",
    r"\b(goes|go|going|went|gone) on\b": "continue",
    r"\bfor ever\b": "forever",
    r"\banew\b": "again",
    r"\baloud\b": "leave it out",
    r"\bto the letter\b": "exactly",
    r"\bbesides\b": "also, in addition",
    r"\bof (its|their|his|your|our) own\b": "its own, separate",
    r"\b(comes|come|came) to (?!(a|the) (stop|end)\b)": "is, becomes, amounts to",
    r"\b(stands|stood) (there|here|in|at|for itself|once|still|alone|between|behind|beside|before)\b": "is",
    r"\bis no (?!longer\b|more\b|other\b|such\b|way\b|need\b)[a-z]+\b(?<!thing)": "is not a",
    r"\bprocessor time\b": "CPU time",
    r"\bmade from nothing\b": "from scratch",
    r"\bfrom nothing\b": "from scratch",
    r"\bLeaves? out\b": "Not here: … (see FILE)",
    r"\bWhether nothing\b": "True once …",
    r"\bwhat (is|are) (there|to be|left|not)\b": "name the thing",
    r"\bwhere (there|it|none|nothing|they|that|this|one) (is|are|has|have|was|were|does|do)\b": "if",
    r"\bbut for\b": "except",
    r"\b(the )?likes? of (it|them|which)\b": "name the thing",
    r"\bthat lasts?\b": "say how long",
    r"\b(looked|looks|look) after\b": "watch, manage",
    r"\bcarrie[sd] out\b": "runs, ran",
    r"\bcarry out\b": "run",
    r"\bput (down|up with)\b": "write, accept",
    r"\bknows? (nothing|no) of\b": "does not use",
}
"""Pattern -> what to write instead."""
FOLDERS = ("ramify", "scripts", "recipes", "examples", "benchmarks", "tests")
RECORD = {"docs/log.md", "docs/log-archive.md", "scripts/check_prose.py"}
SEEN_BY_MODELS = {
    "ramify/engine/observation_messages.py",
    "benchmarks/prompts.py",
    "ramify/engine/prompt_text.py",
    "ramify/engine/prompt_scaffold.py",
    "ramify/engine/prelude.py",
    "ramify/engine/retool_protocol.py",
    "ramify/engine/reply_action_parsing.py",
    "ramify/plans/session_module.py",
    "ramify/plans/session_plans.py",
    "ramify/serve/client_function_tools.py",
    "ramify/serve/mcp_server.py",
    "ramify/tasks/scoring/rubric.py",
    "ramify/extras/studies/hindsight_hints.py",
    "ramify/train/signals/judge.py",
}
"""Files whose texts, apart from docstrings and comments, go to a model."""
SHOWN_BY_HELP = {"ramify/engine/prelude.py", "ramify/plans/session_module.py"}
"""Files whose docstrings a model can read, too."""
_ANY = re.compile("|".join(f"(?P<r{n}>{rule})" for n, rule in enumerate(RULES)), re.IGNORECASE)
_ADVICE = list(RULES.values())
_OF = re.compile(r"\s*Of\b(?! course)")


class Hit(NamedTuple):
    path: str
    line: int
    phrase: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.phrase}': {self.advice}"


def hits(name: str, text: str) -> Iterator[Hit]:
    """Everything to rewrite in one file."""
    pieces = _python(name, text) if name.endswith(".py") else _page(text)
    for line, piece, is_docstring in pieces:
        if is_docstring and (start := _OF.match(piece)):
            yield Hit(name, line, start[0].strip(), "begin with what it is")
        for found in _ANY.finditer(piece):
            at = line + piece.count("\n", 0, found.start())
            yield Hit(name, at, found[0], _ADVICE[int((found.lastgroup or "r0")[1:])])


def _python(name: str, text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of docstrings, comments and texts."""
    docstrings = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docstrings.add(id(value))
            if name not in SHOWN_BY_HELP:
                yield node.lineno, value.value, True
    only_ours = name in SEEN_BY_MODELS or name.startswith("tests/")
    for node in ast.walk(tree):
        if only_ours or not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def _page(text: str) -> Iterator[tuple[int, str, bool]]:
    """The prose of a page: what is outside its blocks of code and its prompts."""
    in_code = in_prompts = False
    for line, each in enumerate(text.splitlines(), 1):
        if each.startswith(("<!-- begin situations", "<!-- end situations")):
            in_prompts = "begin" in each
        elif in_prompts:
            continue
        elif each.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield line, re.sub(r"`[^`]*`", "``", each), False


def files(paths: list[str]) -> Iterator[str]:
    listed = subprocess.run(
        ["git", "ls-files", *(paths or [*FOLDERS, "*.md"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if name.endswith((".py", ".md")) and name not in RECORD and (ROOT / name).is_file():
            yield name


def main(paths: list[str]) -> int:
    found = [hit for name in files(paths) for hit in hits(name, (ROOT / name).read_text("utf-8"))]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
