"""Environment of the pages' examples: a folder with the files that they name, and a model that
answers questions about them.

The model is a script behind a real HTTP server; everything between it and the reader's code is
real. Its answers are right, of the type that is asked for, and cite existing files.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message

LOG = (
    "12:00:01 web-3 ERROR disk full\n12:00:02 web-1 WARNING slow\n12:00:07 web-3 ERROR disk full\n"
)
SESSION = """\
import re
source = "context" if isinstance(context, str) else sorted(context)[0]
text = context if isinstance(context, str) else context[source]
"""


def model(messages: tuple[Message, ...]) -> str:
    """Reply to a session with one turn of code and then an answer; answer a plain call at once."""
    asked = messages[-1].content if messages[0].role != "system" else messages[1].content
    if "llm_query" not in messages[0].content:  # a plain call
        return (
            _answer(asked, "'context'")
            .removeprefix("FINAL(")
            .removesuffix(")")
            .strip("'")
            .replace("'", '"')
        )
    if len(messages) == 2:
        return f"```repl\n{SESSION}parts = llm_query_batched([text[:40]] * 4)\nprint(len(text), parts)\n```"
    return f"```repl\n{_answer(asked + messages[-1].content, 'source')}\n```"


def _answer(asked: str, source: str) -> str:
    if '"quote"' in asked:
        citation = f"{{'source': {source}, 'first_line': 1, 'last_line': 1, 'quote': 'disk full'}}"
        return f"FINAL({{'answer': 'web-3', 'citations': [{citation}]}})"
    if '"host"' in asked:
        return "FINAL([{'host': 'web-3', 'count': 2}])"
    if '"additionalProperties"' in asked:
        return "FINAL({'web-3': 2})"
    return "FINAL(lookup('web-3'))" if "lookup(" in asked else "FINAL('web-3')"


def furnish(folder: Path) -> None:
    """Write the files that the pages name."""
    (folder / "logs").mkdir()
    for name in ("server.log", "logs/web.log"):
        (folder / name).write_text(LOG)
    (folder / "server.log.gz").write_bytes(gzip.compress(LOG.encode()))
    (folder / "orders.csv").write_text("order,due,sent\n1,2026-03-01,2026-03-02\n")
    (folder / "tickets.jsonl").write_text(
        '{"id": 1, "subject": "Fire", "text": "web-3 is on fire."}\n'
        '{"id": 2, "subject": "Thanks", "text": "It works again."}\n'
    )
    (folder / "report.txt").write_text("Two errors, both on web-3: the disk was full.\n")
    (folder / "questions.jsonl").write_text('{"q": "Who failed first?", "a": "web-3"}\n' * 3)
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    (folder / "my_task.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    with contextlib.closing(sqlite3.connect(folder / "shop.db")) as database:
        database.executescript(
            "create table orders (id integer, due text); insert into orders values (1, "
            "'2026-03-01')"
        )
    (folder / "recipes").symlink_to(Path(__file__).parents[2] / "recipes")
    (folder / "bin").mkdir()
    for name, options in (("ramify", "-m ramify"), ("python", "")):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
        command.chmod(0o755)


def environment(folder: Path, url: str) -> dict[str, str]:
    """Return the environment of a separate user, for whom the scripted server is OpenAI."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"RAMIFY_|[A-Z]+_API_KEY", name)
    }
    return {
        **kept,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "RAMIFY_HOME": str(folder / "runs"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "sk-of-a-reader",
    }


@contextlib.contextmanager
def scripted(script: object = model) -> Iterator[str]:
    """Yield the base URL of a scripted server in a separate thread, for synchronous clients."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ScriptedServer(script)  # type: ignore[arg-type]
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
        yield server.url
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
