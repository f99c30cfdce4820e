"""Hostile texts, commands on a real pseudo-terminal, and the control sequences that reached it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ramify.cli.main import COMMANDS
from ramify.engine.rlm import RLM
from ramify.sandbox.base import SandboxSpec
from ramify.store.folder_store import Store
from ramify.testing.scripted_client import ScriptedClient

KNOWN_ATTACKS = (
    "\x1b]52;c;aGFja2Vk\x07",  # the clipboard
    "\x1b]0;a title\x1b\\",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[3;4H\x1b[?1049h",  # clear, move, alternate screen
    "\x1bP+q544e\x1b\\\x1b[6n\x1b[>c",  # questions that the terminal answers as if typed
    "\ue000]52;c;aGFja2Vk\x07\ue000[2J",  # a character that stands for ESC in some programs
    "\x9d0;c1 title\x9c\x9b2J\x90q\x9c",
    "\x9d" * 40 + "\x1bA",
    "\x1b\x00]0;split\x07\x1b\x1b[2J\x1b\x9b2J",
    "safe\r\x1b[Kfaked\x08\x08\x7f\x0e\x0f",
    "\u202egnp.exe\u2066x\u061cy\u200f",
    "half \ud800 \udfff",
    "[bold]markup[/] [link=http://evil.example]x[/link]",
    "\x1b_apc\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\\x1bc\x1b#8\x1b(0",
)
_PIECES = [
    "\x1b",
    "\x9b",
    "\x9d",
    "\x90",
    "\x9c",
    "\x07",
    "\ue000",
    "]",
    "[",
    "P",
    "0",
    ";",
    "52;c;",
]
_PIECES += ["?1049h", "2J", "\\", "\n", "\r", "\x00", "\x7f", "\u202e", "\ud800", "é", "text ", " "]

_ALLOWED = re.compile(rb"\x1b\[[0-9;]*m|[\t\r\n]")
_DRAWING = re.compile(rb"\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K")
"""What a live view may also write. No hostile text contains these."""
_CONTROL = re.compile(
    rb"\x1b.{0,12}|[\x00-\x1f\x7f]|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xaa-\xae]"
    rb"|\xe2\x81[\xa6-\xa9]",
    re.DOTALL,
)


def hostile_texts(count: int, seed: int = 0) -> list[str]:
    """Return known attacks, then random ones."""
    rng = random.Random(seed)
    made = ["".join(rng.choices(_PIECES, k=rng.randint(3, 40))) for _ in range(count)]
    return [*KNOWN_ATTACKS, *made][:count]


def controls(written: bytes, *, is_drawn: bool = False) -> list[bytes]:
    """Return the control sequences in ``written`` that are neither colors nor, with ``is_drawn``,
    those of a live view."""
    rest = _ALLOWED.sub(b"", written)
    return _CONTROL.findall(_DRAWING.sub(b"", rest) if is_drawn else rest)


class Machine(NamedTuple):
    """A folder with its own home for ramify."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def write(self, name: str, content: object) -> str:
        """Write a file, as JSON unless ``content`` is a text, and return its name."""
        text = content if isinstance(content, str) else json.dumps(content)
        (self.folder / name).write_text(text)
        return name

    def on_terminal(self, *arguments: str, **env: str) -> bytes:
        """Run a command with a pseudo-terminal as its stdout and stderr, and return what it wrote
        there."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "ramify", *arguments],
            cwd=self.folder,
            env=self._env() | env,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # Linux raises it once the other end is closed
            while block := os.read(ours, 1 << 16):
                written += block
        os.close(ours)
        process.wait(100)
        return written

    def _env(self) -> dict[str, str]:
        kept = ("PATH", "LANG", "TMPDIR")
        return {name: os.environ[name] for name in kept if name in os.environ} | {
            "HOME": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "RAMIFY_HOME": str(self.store),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "TERM": "xterm-256color",
            "PAGER": "cat",
        }


def store_hostile_run(machine: Machine, texts: Sequence[str]) -> None:
    """Store a run with every text in its prompts, code, output, sub-calls, errors and answer."""
    both = "\n".join(texts)
    code = (
        f"# {both.encode('utf-8', 'replace').decode()!r}\nprint(context)\nraise ValueError(context)"
    )
    asked = f"answers = llm_query_batched({[ascii(text) for text in texts]!r})\n"
    replies = [
        f"{both}\n```repl\n{code}\n```",
        f"```repl\n{asked}rlm_query(context[:200], context='\\n'.join(answers))\n```",
        "```repl\nFINAL(context)\n```",
    ]
    root, sub = ScriptedClient(replies[:2] + replies[2:] * 3), iter(texts * 2)
    rlm = RLM(
        root,
        sub_model=ScriptedClient(lambda messages: next(sub), name="scripted:sub"),
        sandbox=SandboxSpec("process", allow_weaker=True),
        direct=False,
        store=Store(machine.store),
    )
    rlm.completion(both.encode("utf-8", "replace").decode(), both)
    rlm.close()


class Shown(NamedTuple):
    command: str
    written: bytes
    is_drawn: bool = False

    @property
    def controls(self) -> list[bytes]:
        return controls(self.written, is_drawn=self.is_drawn)


_TASK = """
import json
from ramify.tasks.base import Item, DatasetTask, generated
from ramify.tasks.scoring import numeric

TEXTS = json.load(open("texts.json"))

def make(rng):
    text = rng.choice(TEXTS).encode("utf-8", "replace").decode()
    return Item(f"How many? {text}", text + "x", gold=1, kind=text + "x")

def hostile():
    return DatasetTask("hostile", generated("hostile", make), numeric)
"""


def outputs_on_terminal(machine: Machine, texts: Sequence[str]) -> Iterator[Shown]:
    """Run every command that prints strangers' text on a terminal, and yield what it wrote."""
    store_hostile_run(machine, texts)
    shows: tuple[tuple[str, ...], ...] = (
        ("show", "last", "--full"),
        ("show", "last"),
        ("show", "last", "--tree", "--no-pager"),
        *(("show", "last", "--turn", str(turn)) for turn in (1, 2)),
        *(("show", "last", "--call", call) for call in ("0", "0.0", "0.1")),
        ("show", "last", "--json"),
        ("show", "last", "--events"),
        ("replay", "last", "--allow-weaker"),
        ("replay", "last", "--allow-weaker", "--json"),
        ("runs",),
        ("runs", "--json"),
    )
    both = "\n".join(texts)
    given = both.replace("\0", "").encode("utf-8", "replace").decode()
    for arguments in shows:
        yield Shown(" ".join(arguments), machine.on_terminal(*arguments))
    for arguments in (("runs", "review", "last", "--note", given), ("runs", "review", "last")):
        yield Shown("runs review", machine.on_terminal(*arguments))
    yield from _answers(machine, texts, given)
    for command in (*COMMANDS, ""):
        written = machine.on_terminal(*command.split(), f"--{given}" if command else given)
        yield Shown(f"{command} --TEXT", written, is_drawn=True)
    for command in ("ask", "eval", "mcp"):
        words = [command, "-m", f"openai:{given}", "--max-turns", given[:100]]
        yield Shown(f"{command} -m TEXT", machine.on_terminal(*words, "a"))
    yield Shown("train TEXT.py", machine.on_terminal("train", f"{given[:100]}.py"), is_drawn=True)
    yield Shown("doctor", machine.on_terminal("doctor", RAMIFY_MODEL=given, RAMIFY_HOSTILE=given))


def _answers(machine: Machine, texts: Sequence[str], given: str) -> Iterator[Shown]:
    """Questions and evaluations whose models reply with hostile texts."""
    whole = "\n".join(texts).encode("utf-8", "replace").decode()  # JSON holds no lone surrogates
    machine.write("texts.json", list(texts))
    machine.write("task.py", _TASK)
    machine.write("context.txt", given)
    reply = f"{whole}\n```repl\n# {whole!a}\nprint({whole!a})\n```"
    final = f"```repl\nFINAL({whole!a})\n```"
    model = f"scripted:{machine.write('model.json', [reply, final])}"
    failing = [{"match": "", "reply": {"fail": "refused", "text": whole, "status": 400}}]
    here = ("--sandbox", "process", "--allow-weaker", "--no-direct")
    for options in (
        ("--progress", "live"),
        ("-vv", "--progress", "lines"),
        ("--progress", "json"),
        ("--json", "-q"),
    ):
        command = ("ask", "-m", model, *here, *options, given[:2000], "context.txt")
        yield Shown(f"ask {options}", machine.on_terminal(*command), "live" in options)
    refused = f"scripted:{machine.write('failing.json', failing)}"
    command = ("ask", "-m", refused, "--progress", "lines", "q", "context.txt")
    yield Shown("ask, refused", machine.on_terminal(*command))
    for progress in ("live", "lines", "json"):
        command = ("eval", "task.py:hostile", "-m", model, *here[:3], "--items", "3")
        written = machine.on_terminal(*command, "--progress", progress)
        yield Shown(f"eval {progress}", written, progress == "live")
