"""Write the situations of `docs/prompts.md`: `scripts/prompts_page.py [--check]`.

Each situation is a question with its run, whose prompt is shown as the chat template of a
well-known model renders it. With `--check` nothing is written, and an outdated page is an error.
The text around the situations is written by hand.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import ramify
from ramify.clients.base import Price
from ramify.engine.prompt_preview import FirstRequestPreview
from ramify.engine.prompt_scaffold import MARKERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/prompts.md"
TEMPLATES = {
    "Qwen3": ("qwen3.jinja", ""),
    "Llama 3": ("llama3.jinja", "<|begin_of_text|>"),
    "Gemma 3": ("gemma3.jinja", "<bos>"),
}
"""Model -> its chat template in tests/data/chat_templates, and its first token."""
LOG = "".join(
    f"2026-03-01T12:{n // 60 % 60:02}:{n % 60:02} web-{n % 7} {'ok' if n % 97 else 'ERROR'}\n"
    for n in range(30_000)
)
WHICH = "Which host failed first, and why?"


class Situation(NamedTuple):
    title: str
    template: str
    context: Any = LOG
    question: str = WHICH
    rlm: Mapping[str, Any] = MappingProxyType({})
    """Options of the RLM, in addition to its model."""
    ask: Mapping[str, Any] = MappingProxyType({})
    """Options of ``RLM.prompt``."""
    window: int = 128_000
    price: Price | None = None


def client(name: str, window: int = 128_000, price: Price | None = None) -> ramify.ScriptedClient:
    return ramify.ScriptedClient([], name=name, window=window, price=price)


def situations(folder: Path) -> list[Situation]:
    """Return the situations; ``folder`` gets the files that some of them need."""
    for name, text in {
        "notes.md": "# Notes\n" * 900,
        "src/main.py": "print('hello')\n" * 2000,
    }.items():
        path = folder / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        database.execute("CREATE TABLE orders (id INTEGER, city TEXT, total REAL)")
        database.executemany(
            "INSERT INTO orders VALUES (?, ?, ?)", [(1, "Lyon", 12.5), (2, "Oslo", 8)]
        )
        database.commit()
    chat = [
        {"role": ("user", "assistant")[n % 2], "content": f"Message {n} of a long talk. " * 30}
        for n in range(60)
    ]
    rows = [
        {"id": n, "city": ("Lyon", "Oslo")[n % 2], "note": "late delivery " * 3} for n in range(900)
    ]
    nano = client("openai:gpt-5-nano", 272_000, Price(0.05, 0.4))
    few = ramify.Limits(max_calls=12, max_turns=6, max_seconds=90)
    always = {"scaffold": ramify.Scaffold(direct_chars=0)}
    alone = ramify.Limits(max_depth=0)

    def city_of(host: str) -> str:
        """The city where a host stands."""
        return {"web-1": "Lyon"}.get(host, "Oslo")

    return [
        Situation("A text, one model, children", "Qwen3"),
        Situation(
            "No context",
            "Llama 3",
            None,
            "How many primes are below 10,000?",
            always,
            {"direct": False},
        ),
        Situation(
            "A list of texts",
            "Gemma 3",
            [f"review {n}: good" for n in range(4000)],
            "How many are positive?",
        ),
        Situation("A dict", "Qwen3", {"2025": LOG[:90_000], "2026": {"total": 3}}, "What changed?"),
        Situation(
            "A folder",
            "Llama 3",
            ramify.load(folder / "project"),
            "What does the program do?",
            always,
        ),
        Situation(
            "Rows, with a type of the answer",
            "Gemma 3",
            rows,
            "How many notes complain?",
            always,
            {"answer_type": int},
        ),
        Situation(
            "A database, no children",
            "Qwen3",
            ramify.load(folder / "shop.db"),
            "Which city spends most?",
            {"limits": alone, **always},
        ),
        Situation("A conversation", "Llama 3", chat, "What was agreed?", always),
        Situation(
            "A child, whose model is smaller", "Gemma 3", rlm={"sub_model": nano}, ask={"depth": 1}
        ),
        Situation(
            "Several models, instructions and an example",
            "Qwen3",
            rlm={
                "sub_model": [nano, client("anthropic:claude-haiku-4-5", 200_000, Price(1, 5))],
                "instructions": "Times are in UTC. Answer in one sentence.",
                "examples": [("Which host failed last?", "web-3, since its disk was full.")],
            },
            window=272_000,
            price=Price(0.25, 2),
        ),
        Situation(
            "A tool, a package, a mount, a small budget",
            "Llama 3",
            rlm={
                "tools": [city_of],
                "sandbox": ramify.JailSpec(
                    packages=("msgspec",), mounts=(("/usr/share", "/usr/share"),)
                ),
                "limits": few,
            },
            window=16_000,
        ),
        Situation(
            "A short text: one direct call, without a session",
            "Gemma 3",
            LOG[:300],
            "How many lines?",
        ),
    ]


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has the chat template of a model, but not its vocabulary."""
    file, begin = TEMPLATES[name]
    found = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token=begin or None
    )
    found.chat_template = (ROOT / "tests/data/chat_templates" / file).read_text("utf-8")
    return found


def preview(situation: Situation) -> FirstRequestPreview:
    model = client(
        "openai:gpt-5-mini" if situation.price else "vllm:Qwen3-8B",
        situation.window,
        situation.price,
    )
    with ramify.RLM(model, **situation.rlm) as rlm:
        if situation.context is None:
            return rlm.prompt(situation.question, **situation.ask)
        return rlm.prompt(situation.context, situation.question, **situation.ask)


def rendered() -> Iterator[str]:
    """Yield the Markdown of each situation."""
    with tempfile.TemporaryDirectory() as folder:
        for number, situation in enumerate(situations(Path(folder)), 1):
            shown = preview(situation)
            text = shown.rendered(tokenizer(situation.template))
            sizes = " and ".join(
                f"{len(message.content):,} ({message.role})" for message in shown.messages
            )
            # Indented, because the prompts contain fences.
            block = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
            yield (
                f"### {number}. {situation.title}\n\n"
                f"Rendered by the template of {situation.template}. "
                f"Characters: {sizes}; about {shown.estimated_tokens:,} tokens.\n\n{block}\n"
            )


def markers() -> str:
    """Return the table of markers."""
    rows = [f"| `{{{{{name}}}}}` | {about} |" for name, about in MARKERS.items()]
    return "\n".join(["| marker | becomes |", "|---|---|", *rows]) + "\n"


def written(page: str) -> str:
    """Return the page with its situations and its markers as they are now."""
    for name, text in (("situations", "\n".join(rendered())), ("markers", markers())):
        page = re.sub(
            rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)",
            lambda found, text=text: f"{found[1]}\n{text}\n{found[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def main() -> int:
    page = PAGE.read_text("utf-8")
    new = written(page)
    if "--check" in sys.argv:
        if new != page:
            print("docs/prompts.md is outdated: run python scripts/prompts_page.py")
        return int(new != page)
    PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
