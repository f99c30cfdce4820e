"""The command ``ramify train``: train a policy from a recipe, and show its curves live.

    tiny · rl · step 23 · 72 s
    reward        ▁▂▃▃▄▅▅▆▆▆▇▇▇ 0.81
    loss          ▇▆▅▅▄▃▃▂▂▂▁▁▁ 0.118
    validation    ▁▃▆▇ 0.85   (best 0.85 at step 20)

With ``--restarts N`` the trainer runs in a child process, which is restarted after a failure that
a restart can cure:

    trainer ends ─┬─ success, or stopped by the user ──────────▶ return its exit code
                  ├─ failed before its first measurement:
                  │  the run itself is wrong ──────────────────▶ return its exit code
                  └─ killed, lost a rank, stalled, an error ───▶ restart from the last checkpoint
                                                                 after a pause; give up after N
                                                                 failures without progress

The fields of a recipe are in ``train/config.py``, training itself is in ``train/execute.py``, and
``train/checkpoint.py`` saves the state that a restarted run loads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ramify.actors.child_process import ForegroundProcess, exit_reason
from ramify.actors.restarts import ProcessRestartLimiter
from ramify.cli.list_train_fields import print_fields
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.progress_display import OPTION, ProgressDisplay, choose_display_form
from ramify.cli.telemetry import span_export_context
from ramify.cli.terminal_text import StderrMessageWriter, print_error
from ramify.log_handlers import RUN_LOG
from ramify.logging import ComponentLogger, run_log
from ramify.nearest_name import nearest_name
from ramify.progress import track_progress
from ramify.train.checkpoint import find_lock_holder
from ramify.train.metrics import FILE, StepMetrics, read_metrics

if TYPE_CHECKING:
    from rich.text import Text

_log = ComponentLogger("cli")

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("reward", "child_reward", "loss", "grad_norm", "tokens_per_s")
"""Metrics that are drawn as curves if the run reports them."""
IN_LINES = (*SHOWN, "groups_with_signal", "entropy", "no_signal", "failed_rollouts")
"""Metrics that a step's log line shows, in addition to all metrics named ``reward``. The file
metrics.jsonl has the others."""


class LiveTrainingCurves(msgspec.Struct):
    """The curves and scores in a training run's live view, collected from step metrics."""

    name: str
    stage: str = "starting"
    step: int = 0
    seconds: float = 0.0
    curves: dict[str, list[float]] = {}
    scores: list[tuple[int, float]] = []
    """Pairs of a step and its mean reward on the validation items."""
    final: dict[str, float] = {}
    """Rewards from the end of the run, such as ``last test/reward``."""

    def add(self, measured: StepMetrics) -> None:
        values = measured.values
        self.step = measured.step
        self.seconds = measured.at_s
        if measured.stage in ("first", "last", "best"):
            if measured.stage == "first" and "validation/reward" in values:
                self.scores.append((measured.step, values["validation/reward"]))
            rewards = {name: value for name, value in values.items() if name.endswith("/reward")}
            self.final.update(
                {f"{measured.stage} {name}": value for name, value in rewards.items()}
            )
            return
        if measured.stage != self.stage:
            self.stage, self.curves = measured.stage, {}
        if "validation/reward" in values:
            self.scores.append((measured.step, values["validation/reward"]))
        for name in SHOWN:
            if name in values:
                self.curves.setdefault(name, []).append(values[name])

    def rows(self, width: int = 80) -> list[str]:
        """Return the lines of the live view, each at most ``width`` characters wide."""
        head = f"{self.name} · {self.stage} · step {self.step:,} · {self.seconds:,.0f} s"
        rows = [
            head,
            *(
                f"{name:<13} {self._curve(values, width - 28)} {values[-1]:.4g}"
                for name, values in self.curves.items()
            ),
        ]
        if self.scores:
            step, best = max(self.scores, key=lambda pair: pair[1])
            shown = self._curve([score for _, score in self.scores], width - 60)
            rows.append(
                f"{'validation':<13} {shown} {self.scores[-1][1]:.4g}   (best {best:.4g} at step "
                f"{step})"
            )
        return [
            row[:width]
            for row in [*rows, *(f"{name}: {value:.4g}" for name, value in self.final.items())]
        ]

    @staticmethod
    def _curve(values: Sequence[float], width: int) -> str:
        return draw_sparkline(values, max(width, 8))


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Draw a series of numbers as one line of at most ``width`` bars.

    If there are more numbers than bars, each bar is the mean of several consecutive numbers.

    >>> curve([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    num = min(width, len(values))
    edges = [index * len(values) // num for index in range(num + 1)] if num else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def format_metrics_line(measured: StepMetrics) -> str:
    """Format the metrics of one step as a log line.

    The line of an evaluation has its scores. The line of a training step has the rewards and a
    selection of metrics.
    """
    return f"{measured.at_s:8.1f} s  step {measured.step} ({measured.stage})  " + "  ".join(
        f"{name} {value:.4g}" for name, value in _metrics_in_line(measured).items()
    )


def _metrics_in_line(measured: StepMetrics) -> dict[str, float]:
    is_evaluation = "evaluate_s" in measured.values
    return {
        name: value
        for name, value in measured.values.items()
        if (name in IN_LINES and (value or name != "failed_rollouts"))
        or ("/" in name and (is_evaluation or name.endswith("/reward")))
    }


TRACKERS = "tensorboard, wandb, mlflow, trackio"
EVERY = 50
"""Steps between log lines in stages without sampling, when the live view is off."""
_END_S = 30.0
"""Seconds that a stalled run gets to end by itself."""


def train(
    words: list[str],
    out: str | None = None,
    resume: str | None = None,
    plain: bool | None = None,
    quiet: bool | None = None,
    progress: str | None = None,
    track: list[str] | None = None,
    restarts: int | None = None,
    placement: str | None = None,
    preset: str | None = None,
    fields: bool | None = None,
) -> int:
    if fields:
        print_fields(words, resume)
        return ExitCode.ANSWERED
    recipes = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(recipes) > 1 or (not recipes and resume is None):
        _check_fields_have_values(recipes)
        raise UsageError("give one recipe, or --resume DIR")
    if recipes and not Path(recipes[0]).exists():
        _check_fields_have_values(recipes)
    if preset and not recipes:
        raise UsageError(
            f"--preset {preset} needs the recipe: a resumed run keeps the options it began with"
        )
    notes = StderrMessageWriter(bool(quiet))
    notes.show_warnings_and_logs()
    if plain and progress not in (None, "lines"):
        raise UsageError(f"--plain means --progress lines: remove --plain or --progress {progress}")
    if restarts is not None:
        run_folder = out or _resumed_folder(resume)
        if run_folder is None:
            raise UsageError("--restarts needs --out DIR, to find the checkpoints")
        flags = [f"--{name}" for name, is_on in (("plain", plain), ("quiet", quiet)) if is_on]
        options = [
            *(("--progress", progress) if progress else ()),
            *(("--placement", placement) if placement else ()),
            *(("--preset", preset) if preset else ()),
            *(part for name in track or () for part in ("--track", name)),
        ]
        return train_with_restarts(words, [*flags, *options], Path(run_folder), resume, restarts)
    form = choose_display_form("lines" if plain else progress, notes)
    with span_export_context(notes), ProgressDisplay(notes, form, has_lines=True) as screen:
        with track_progress("starting"):
            from ramify.train.backends.launch import is_restarted
            from ramify.train.config_overrides import override
            from ramify.train.execute import train
            from ramify.train.other_trainer_presets import choices_by_field, with_preset
            from ramify.train.placement_plan import with_placement_kind
            from ramify.train.recipe import load_recipe, load_stored_run  # imports everything heavy

            run = load_recipe(recipes[0]) if recipes else load_stored_run(str(resume), overrides)
            # Preset and placement come first, so that the overrides can change their fields.
            run = with_preset(run, preset) if preset else run
            run = with_placement_kind(run, placement) if placement else run
            run = override(run, overrides, choices_by_field(preset))
            run = msgspec.structs.replace(run, trackers=(*run.trackers, *(track or ())))
        folder = Path(out or _resumed_folder(resume) or f"runs/{run.name}")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder} is a file: give a folder")
        if is_restarted() and any(folder.glob("checkpoints/step-*")):
            resume = str(folder)
        _end_with_a_record(folder)
        listener = _listener(run.name, folder, screen, resume is not None)
        try:
            train(
                run,
                folder,
                resume=resume,
                listener=listener,
                on_stall=_end_soon,
            )
        except KeyboardInterrupt:
            screen.close()
            return ExitCode.STOPPED
    print(f"trained policy in {folder}/policy: ramify ask --model local:{folder}/policy …")
    return ExitCode.ANSWERED


def _check_fields_have_values(words: Sequence[str]) -> None:
    """Raise UsageError if one of the words for a recipe is a field of the run instead."""
    from ramify.train.config import Run
    from ramify.train.config_fields import fields

    known = {each.name for each in fields(Run)}
    for word, after in pairwise([*words, ""]):
        if word in known:
            raise UsageError(f"'{word}' has no value: write {word}={after or 'VALUE'}")


def _advise_on_option(given: str, arguments: list[str]) -> str:
    """Return how to write a field of the run that was given as an option.

    Returns "" if the option is more like one of the command.
    """
    from ramify.train.config import Run
    from ramify.train.config_fields import fields, unknown_field_hint

    option, has_value, value = given.partition("=")
    name = option.lstrip("-").replace("-", "_")
    if not has_value and given in arguments:
        value = next(iter(arguments[arguments.index(given) + 1 :]), "")
    if any(each.name == name for each in fields(Run)):
        return f"a field of the run has no dashes: write {name}={value or 'VALUE'}"
    if "." not in name and nearest_name(name, [each.name for each in COMMAND.options]):
        return ""
    hint = unknown_field_hint(Run, None, name, with_known=False)
    advice = "a field of the run has no dashes, as in rl.optim.lr=1e-4"
    return f"{advice}: {hint}" if hint else advice


def _end_with_a_record(folder: Path) -> None:
    """Make SIGTERM and SIGHUP write a log record before they end the run.

    SIGHUP arrives when the terminal is closed; under nohup it remains ignored.
    """

    def end(number: int, _: object) -> None:
        name = signal.Signals(number).name
        text = f"the run was ended by {name}; continue with: ramify train --resume {folder}"
        _log.error("run_ended", text, signal=name)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _end_soon(why: str) -> None:
    """Exit this process with the error message ``why`` after a delay.

    A stalled run might otherwise never end.
    """

    def end() -> None:
        print_error(why)
        os._exit(ExitCode.ERROR)

    timer = threading.Timer(_END_S, end)
    timer.daemon = True
    timer.start()


def _resumed_folder(resume: str | None) -> str | None:
    """Return the folder of the run that ``--resume`` names.

    The option may name the folder itself or one of the run's checkpoints.
    """
    if resume is None:
        return None
    path = Path(resume)
    return str(path.parents[1] if path.parent.name == "checkpoints" else path)


def _listener(
    name: str, folder: Path, screen: ProgressDisplay, is_resumed: bool
) -> Callable[[StepMetrics], None]:
    """Return a function that shows each step's metrics in the progress form that the user chose.

    The form is curves, lines, JSON or nothing.
    """
    match screen.form:
        case "live":
            return _create_curve_drawer(name, folder, screen, is_resumed)
        case "json":
            return lambda measured: screen.write_json_event(
                "measured",
                step=measured.step,
                stage=measured.stage,
                trained_s=measured.at_s,
                values=measured.values,
            )
        case "lines":
            return lambda measured: _say(measured, screen.notes)
        case _:
            return lambda measured: None


def _create_curve_drawer(
    name: str, folder: Path, screen: ProgressDisplay, is_resumed: bool
) -> Callable[[StepMetrics], None]:
    """Return a function that draws the curves of the metrics so far.

    The curves remain on the terminal at the end.
    """
    from rich.text import Text

    curves = LiveTrainingCurves(name)
    for measured in read_metrics(folder) if is_resumed else ():
        curves.add(measured)

    def rows(width: int, height: int) -> list[Text]:
        return [Text(row) for row in curves.rows(width)[:height]]

    def show(measured: StepMetrics) -> None:
        with screen.lock:
            curves.add(measured)
        screen.keeps = True
        screen.draw(rows)

    return show


def _say(measured: StepMetrics, notes: StderrMessageWriter) -> None:
    """Print the metrics of a training step as one line.

    In stages without sampling, only one in ``EVERY`` steps is printed. A step without any metric to
    print, such as one that failed, has no line.
    """
    if _metrics_in_line(measured) and (
        measured.stage not in ("warmup", "sft")
        or measured.step % EVERY == 0
        or "validation/reward" in measured.values
    ):
        notes.say(format_metrics_line(measured))


COMMAND = SubcommandSpec(
    name="train",
    about="""\
Train a policy from RECIPE, a Python file whose run() returns a ramify.train.config.Run.

FIELD=VALUE overrides a field of the run, as in rl.optim.lr=1e-4 or rl.objective=gspo. All fields:
ramify train --fields, or docs/fields.md.""",
    run=train,
    words="RECIPE [FIELD=VALUE…]",
    advise_on_option=_advise_on_option,
    max_words=None,
    options=(
        CliOptionSpec(
            "out",
            str,
            "folder for checkpoints, metrics and the trained policy (default: runs/NAME)",
            "DIR",
        ),
        CliOptionSpec(
            "resume",
            str,
            "continue from a run's last checkpoint, or from the given one; RECIPE is optional",
            "DIR",
        ),
        CliOptionSpec(
            "restarts",
            int,
            "restart failed training from the last checkpoint, up to N times without progress",
        ),
        CliOptionSpec(
            "placement",
            str,
            "how the run's processes are started: local, or ray (joins RAY_ADDRESS if set)",
            "local|ray",
        ),
        CliOptionSpec(
            "preset",
            str,
            "the defaults of another trainer for the objective and the optimizer; see "
            "docs/objectives.md",
            "trl|skyrl|prime|verl|areal",
        ),
        CliOptionSpec(
            "track",
            list,
            f"also send metrics to {TRACKERS} or module:Class; repeat for more",
            "NAME",
        ),
        CliOptionSpec(
            "plain",
            bool,
            "print lines instead of a live view (the default if stderr is not a terminal)",
            has_no=False,
        ),
        CliOptionSpec("quiet", bool, "print only errors to stderr", has_no=False),
        OPTION,
        CliOptionSpec(
            "fields",
            bool,
            "list all fields, or those of the given SECTIONs (rl.optim), with their type, default "
            "and meaning; with RECIPE, also its values",
            has_no=False,
        ),
    ),
)


def train_with_restarts(
    words: Sequence[str],
    options: Sequence[str],
    folder: Path,
    resume: str | None,
    restarts: int,
) -> int:
    """Train in child processes, and restart the trainer after each failure.

    Returns the exit code of the last trainer.

    ``options`` are passed to each trainer. ``restarts`` is the maximum number of consecutive
    restarts without progress in training.
    """
    if restarts < 1:
        raise UsageError(f"--restarts {restarts}: give at least 1, or leave it out")
    if os.environ.get("WORLD_SIZE"):
        raise UsageError("--restarts does not work under torchrun: use torchrun --max-restarts")
    since, furthest, name = time.time(), -1, folder.resolve().name
    losses = ProcessRestartLimiter(restarts, _log, "trainer")
    command = [sys.executable, "-m", "ramify", "train", *words, "--out", str(folder), *options]
    with run_log(folder / RUN_LOG, name) as log, ForegroundProcess() as trainer:
        log.release_held_records()
        while True:
            code = trainer.run([*command, *(("--resume", resume) if resume else ())])
            if (
                code == ExitCode.ANSWERED
                or trainer.was_stopped
                or code in (ExitCode.STOPPED, -signal.SIGINT)
            ):
                return (
                    ExitCode.STOPPED if code == -signal.SIGINT else 128 - code if code < 0 else code
                )
            if code == ExitCode.USAGE and find_lock_holder(folder) is not None:
                return code  # another run holds the folder, so its files are not this run's
            step = _last_step(folder, since)
            if step is None and furthest < 0 and code > 0:
                return code  # the trainer has already printed the reason
            # Only progress beyond the furthest step resets the count: repeating lost steps does
            # not.
            if step is not None and step > furthest:
                losses.record_success(name)
            furthest = max(furthest, step or 0)
            how = exit_reason(code)
            attempt = losses.num_consecutive_losses(name) + 1
            if attempt > restarts:
                text = (
                    f"the trainer {how} at step {furthest}: failure {attempt} in a row without "
                    f"progress, so it is not restarted (--restarts {restarts})"
                )
                _log.error("trainer_lost", text, step=furthest, attempt=attempt)
                print_error(text)
                return ExitCode.ERROR
            checkpoint = _latest_checkpoint(folder, since)
            resume = str(checkpoint) if checkpoint is not None else resume
            losses.decide_restart(
                name,
                f"the trainer {how} after step {furthest}",
                f"restarting from {resume or 'the beginning'}",
                step=furthest,
            )
            trainer.sleep_until_interrupted(losses.pause_s(name))
            losses.record_restart(name)


def _last_step(folder: Path, since: float) -> int | None:
    """Return the last training step recorded since the given time, or None if there is none."""
    path = folder / FILE
    if not path.is_file() or path.stat().st_mtime < since:
        return None
    return max((measured.step for measured in read_metrics(folder)), default=None)


def _latest_checkpoint(folder: Path, since: float) -> Path | None:
    """Return the latest complete checkpoint that was written since the given time, or None.

    Older checkpoints are ignored, because the run may since have been resumed from an earlier step.
    """
    states = [
        path
        for path in folder.glob("checkpoints/step-*/state.json")
        if path.stat().st_mtime >= since
    ]
    return max((path.parent for path in states), default=None)
