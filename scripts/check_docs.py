"""Check the Markdown pages: links exist, code parses, options exist, and short pages stay short.

Blocks marked ``python`` are compiled, ``json`` and ``toml`` are parsed, and ``bash`` or ``sh``
blocks are checked by ``bash -n``. Each line of code that calls ``ramify`` is read by the command's
own parser. Nothing is executed, and links to the web are not followed. Not here: what the pages
say.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

from ramify.cli import main as cli
from ramify.cli.parser import UsageError

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CALL = re.compile(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?ramify (.+)$", re.MULTILINE)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
OPERATORS = {"|", "<", ">", ">>", ";", "&&", "||", "&", "2>"}
MAX_LINES = {"AGENTS.md": 79, "CONTRIBUTING.md": 79}


def main() -> int:
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    faults = [fault for name in tracked.stdout.splitlines() for fault in check_page(ROOT / name)]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


def check_page(page: Path) -> list[str]:
    """Return the faults of one page, one line each."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    faults = [
        f"{name}: link to {target}, which does not exist"
        for target in LINK.findall(BLOCK.sub("", text))
        if not re.match(r"[a-z]+:|#", target)
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        source = re.sub(rf"^{block[1]}", "", block[3], flags=re.MULTILINE)
        if error := parse_error(block[2], source):
            faults.append(f"{name}:{line}: {block[2]} block does not parse: {error}")
    code = [block[3] for block in BLOCK.finditer(text)] + INDENTED.findall(BLOCK.sub("", text))
    for call in CALL.findall("\n".join(code)):
        if error := call_error(call):
            faults.append(f"{name}: `ramify {call}`: {error}")
    num_lines = len(text.splitlines())
    if num_lines > MAX_LINES.get(name, num_lines):
        faults.append(f"{name}: {num_lines} lines; keep it to {MAX_LINES[name]}")
    return faults


def parse_error(language: str, code: str) -> str:
    """Return why ``code`` does not parse; empty if it does, or if the language is not checked."""
    try:
        match language:
            case "python" | "py":
                compile(code, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "json":
                json.loads(code)
            case "toml":
                tomllib.loads(code)
            case "bash" | "sh":
                subprocess.run(
                    ["bash", "-n"], input=code, capture_output=True, text=True, check=True
                )
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    except (SyntaxError, ValueError) as error:
        return str(error)
    return ""


def call_error(call: str) -> str:
    """Return why the command line would reject the options of ``call``; empty if it accepts them.
    Positional arguments are not checked."""
    try:
        lexer = shlex.shlex(call, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = [
            word
            for word in takewhile(lambda word: word not in OPERATORS, lexer)
            if word not in ("--help", "-h")
        ]
        name, rest = cli.split(words)
        if name in cli.COMMANDS:
            command = cli.load_subcommand(name)
            command.parse(rest)
        elif name not in ("", "--version", "COMMAND"):
            return f"unknown command '{name}'"
    except (UsageError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
