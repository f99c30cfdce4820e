"""Draw the timeline of a cold ``ramify ask`` over 1 MB with three turns: ``docs/cold-start.svg``.

    python scripts/cold_start.py               measure, and draw the picture
    python scripts/cold_start.py --print       print the events instead

The command runs with an audit hook in its process and in its fork server's, which costs about a
tenth of the time. A scripted server answers at once. Of several runs, the one whose time is the
median is drawn. Not here: how events are recorded (see ``audit_events.py``), and figures to compare
(see ``benchmarks/engine.py --only ask_command``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import audit_events

PICTURE = Path(__file__).parents[1] / "docs/cold-start.svg"
RUNS = 7
REPLIES = (
    "```repl\nprint(len(context))\n```",
    "```repl\nnum_lines = context.count(chr(10))\nprint(num_lines)\n```",
    "```repl\nFINAL(num_lines)\n```",
)
_LAUNCHER = """#!{python} -sSP
import sys
sys.path.insert(0, {folder!r})
import audit_events
del sys.path[0]
sys.addaudithook(audit_events.EventRecorder({memory!r}).hook)
at = sys.argv.index("-c")
boot, sys.argv = sys.argv[at + 1], ["-c", *sys.argv[at + 2:]]
exec(boot)
"""
"""Runs instead of Python when the command starts its fork server."""
_COMMAND = """
import sys
sys.path.insert(0, {folder!r})
import audit_events
del sys.path[0]
sys.addaudithook(audit_events.EventRecorder({memory!r}).hook)
sys.executable = {launcher!r}
from ramify.__main__ import main
main()
"""


class Event(NamedTuple):
    at_ms: float
    """Since the command was started."""
    process: int
    """0 is the command, 1 its fork server; the others are forked from that."""
    text: str


class Span(NamedTuple):
    """A part of a process's life."""

    lane: str
    name: str
    start_ms: float
    end_ms: float


@contextmanager
def scripted_server(folder: Path) -> Iterator[str]:
    """Give the base URL of a server with the replies of all runs."""
    script = folder / "script.json"
    script.write_text(json.dumps([*REPLIES] * (RUNS + 1)), encoding="utf-8")
    command = [sys.executable, "-m", "ramify.testing", "serve", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(word for word in process.stdout.readline().split() if "://" in word)
        finally:
            process.terminate()


def run(folder: Path, url: str) -> tuple[float, list[Event]]:
    """Run the command once. Returns its time in milliseconds, and its events."""
    memory, launcher, here = folder / "events", folder / "python", str(Path(__file__).parent)
    audit_events.clear(str(memory))
    names = {"folder": here, "memory": str(memory), "launcher": str(launcher)}
    launcher.write_text(_LAUNCHER.format(python=sys.executable, **names), encoding="utf-8")
    launcher.chmod(0o700)
    more = {"RAMIFY_HOME": str(folder / "home"), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAMIFY_")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["--model", "openai:test", "--quiet"]
    command = [sys.executable, "-c", _COMMAND.format(**names)]
    started = time.monotonic_ns()
    subprocess.run(
        [*command, "ask", "How many lines are there?", str(folder / "big.log"), *options],
        env={**env, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )
    total_ms = (time.monotonic_ns() - started) / 1e6
    found = audit_events.read(str(memory))
    return total_ms, [Event((at - started) / 1e6, process, text) for at, process, text in found]


def spans(events: list[Event], total_ms: float) -> list[Span]:
    """Return the parts of the run."""

    def first(process: int, is_wanted: Callable[[str], bool], default: float = total_ms) -> float:
        return next(
            (e.at_ms for e in events if e.process == process and is_wanted(e.text)), default
        )

    def last(process: int, is_wanted: Callable[[str], bool]) -> float:
        return max(e.at_ms for e in events if e.process == process and is_wanted(e.text))

    main, server, session = "ramify ask", "fork server", "session"
    begun = first(0, lambda text: text == "python")
    started = first(0, lambda text: text == "subprocess.Popen")
    read = first(0, lambda text: text.startswith("open ") and text.endswith("big.log"))
    asked = first(0, lambda text: text == "socket.connect")
    booted = first(1, lambda text: text == "python")
    walls = first(1, lambda text: text.startswith("fork "))
    cells = [e for e in events if e.process and e.text == "compile <cell 1>"]
    zygote, live = cells[0].process, cells[-1].process
    warm = cells[0].at_ms
    is_ready = last(zygote, lambda text: text.startswith("compile <cell"))
    opened = first(live, lambda text: text == "forked")
    turns = [first(live, f"compile <cell {number}>".__eq__) for number in (1, 2, 3)]
    return [
        Span(main, "Python", 0, begun),
        Span(main, "first imports", begun, started),
        Span(main, "imports, settings", started, read),
        Span(main, "file, journal, limits", read, asked),
        Span(main, "three turns", asked, turns[2]),
        Span(main, "the journal reaches the disk, processes end", turns[2], total_ms),
        Span(server, "Python", started, booted),
        Span(server, "its modules, and those of cells", booted, walls),
        Span(server, "walls, and an attack on them", walls, warm),
        Span(server, "rehearsal", warm, is_ready),
        Span(server, "waits", is_ready, opened),
        Span(session, "set up", opened, turns[0]),
        Span(session, "cells 1 to 3", turns[0], turns[2]),
    ]


_COLOURS = ("#4c78a8", "#72b7b2", "#54a24b", "#eeca3b", "#f58518", "#b279a2")
_LEFT, _RIGHT, _BAR, _LINE = 96, 24, 22, 15


def picture(parts: list[Span], total_ms: float, width: int = 860) -> str:
    """Return the parts as an SVG picture: one row of bars per process, with a legend below it."""
    scale = (width - _LEFT - _RIGHT) / total_ms
    lines: list[str] = []
    y = 30
    for lane in dict.fromkeys(part.lane for part in parts):
        own = [part for part in parts if part.lane == lane]
        lines.append(f'<text x="8" y="{y + 15}" font-weight="bold">{escape(lane)}</text>')
        for number, part in enumerate(own):
            colour = _COLOURS[number % len(_COLOURS)] if part.name != "waits" else "#d0d0d0"
            x, wide = _LEFT + part.start_ms * scale, (part.end_ms - part.start_ms) * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 1):.1f}" height="{_BAR}" '
                f'fill="{colour}"/>'
            )
            below = y + _BAR + _LINE * (number + 1)
            took = f"{part.start_ms:.0f} to {part.end_ms:.0f} ms: {part.name}"
            lines.append(
                f'<rect x="{_LEFT}" y="{below - 9}" width="9" height="9" fill="{colour}"/>'
            )
            lines.append(f'<text x="{_LEFT + 14}" y="{below}">{escape(took)}</text>')
        y += _BAR + _LINE * len(own) + 18
    title = f"A cold ramify ask over 1 MB, three turns: {total_ms:.0f} ms"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" '
            f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
            f'<rect width="{width}" height="{y}" fill="white"/>',
            f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
            *lines,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the timeline of a cold question.")
    parser.add_argument("--print", action="store_true", help="print the events; draw nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, scripted_server(Path(name)) as url:
        folder = Path(name)
        (folder / "big.log").write_text("a line of a log with forty characters.\n" * 26_000)
        run(folder, url)  # compiles all modules
        runs = sorted(run(folder, url) for _ in range(RUNS))
    total_ms, events = runs[RUNS // 2]
    if options.print:
        for event in events:
            print(f"{event.at_ms:8.2f} ms  {event.process:2}  {event.text}")
    else:
        PICTURE.write_text(picture(spans(events, total_ms), total_ms), encoding="utf-8")
        print(f"{total_ms:.0f} ms; drawn in {PICTURE}")


if __name__ == "__main__":
    main()
