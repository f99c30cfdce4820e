"""``ramify train``: carry out a recipe, with a live view of its curves.

Leaves out what a recipe may say (``train/config.py``) and everything that training is (``build.py``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ramify.cli.curves import Curves, line
from ramify.cli.exits import Exit
from ramify.cli.notes import Notes, write
from ramify.cli.parser import Command, Option, UsageError
from ramify.cli.text import clean
from ramify.train.metrics import Measured, read

EVERY = 50
"""Steps between lines of a stage that is not sampled, where there is no live view."""


def train(
    words: list[str],
    out: str | None = None,
    resume: str | None = None,
    plain: bool | None = None,
    quiet: bool | None = None,
) -> int:
    from ramify.build import recipe, stored, train  # everything heavy comes with it

    recipes = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(recipes) > 1 or (not recipes and resume is None):
        raise UsageError("give one recipe, or --resume DIR")
    run = recipe(recipes[0], overrides) if recipes else stored(str(resume), overrides)
    folder = Path(out or _folder(resume) or f"runs/{run.name}")
    notes = Notes(bool(quiet))
    notes.take_warnings()
    with _watching(run.name, folder, notes, bool(plain) or bool(quiet), resume is not None) as listener:
        try:
            train(run, folder, resume=resume, listener=listener, say=notes.say)
        except KeyboardInterrupt:
            write(f"stopped; go on with: ramify train --resume {folder}")
            return Exit.STOPPED
    print(f"{folder}/policy holds the trained policy: ramify ask --model local:{folder}/policy …")
    return Exit.ANSWERED


def _folder(resume: str | None) -> str | None:
    """The run's folder, where ``resume`` names one of its checkpoints."""
    if resume is None:
        return None
    path = Path(resume)
    return str(path.parents[1] if path.parent.name == "checkpoints" else path)


@contextlib.contextmanager
def _watching(
    name: str, folder: Path, notes: Notes, is_plain: bool, is_resumed: bool
) -> Iterator[Callable[[Measured], None]]:
    curves = Curves(name)
    if is_resumed:
        for measured in read(folder):
            curves.add(measured)
    if is_plain or not sys.stderr.isatty():
        yield lambda measured: _say(measured, notes)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        notes.above = lambda text: console.print(Text(clean(text)))

        def show(measured: Measured) -> None:
            curves.add(measured)
            live.update(Group(*(Text(row, no_wrap=True) for row in curves.rows(console.width))), refresh=True)

        try:
            yield show
        finally:
            notes.above = None


def _say(measured: Measured, notes: Notes) -> None:
    """Steps that are not sampled are many and alike."""
    if measured.stage not in ("warmup", "sft") or measured.step % EVERY == 0 or "validation/reward" in measured.values:
        notes.say(line(measured))


COMMAND = Command(
    name="train",
    about="Carry out a recipe: a Python file whose run() returns a ramify.train.config.Run.\n\n"
    "FIELD=VALUE overrides a field that exists, as in rl.optim.lr=1e-4 or rl.algorithm=grpo.",
    run=train,
    words="RECIPE [FIELD=VALUE…]",
    max_words=None,
    options=(
        Option("out", str, "folder of the run: checkpoints, metrics, the policy [runs/NAME]", "DIR"),
        Option(
            "resume",
            str,
            "go on from a run's last checkpoint, or from the one named; the recipe may be left out",
            "DIR",
        ),
        Option("plain", bool, "lines instead of a live view, as where stderr is no terminal", has_no=False),
        Option("quiet", bool, "nothing but errors", has_no=False),
    ),
)
