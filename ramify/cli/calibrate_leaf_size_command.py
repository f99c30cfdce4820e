"""The command ``ramify calibrate MODEL``: measure a model's accuracy on texts of different sizes.

Later plans use the best size for each model call that reads one part of a text.

    model ──> sizes up to its window ──> cost estimate ──> confirmation ──> plain calls about
    generated texts (a matrix, as of ``ramify eval``) ──> curve ──> the file that later plans read

A calibration that was killed continues with ``--resume``, and pays for no reply twice.
``eval_matrix.py`` makes the attempts, and ``plans/part_size_calibration.py`` uses the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.ask import KINDS, SETTINGS, make_message_writer, make_rlm, sandbox_spec
from ramify.cli.eval_matrix import EvalMatrixCommand, EvalMatrixOptions
from ramify.cli.parser import CliOptionSpec, SubcommandSpec, UsageError
from ramify.cli.progress_display import ProgressDisplay, choose_display_form
from ramify.cli.settings import fill_missing_settings, named_models, open_configured_folder_store
from ramify.cli.telemetry import span_export_context
from ramify.cli.terminal_text import format_dollars, json_line, pluralize
from ramify.errors import ConfigError, UnknownRun

if TYPE_CHECKING:
    from ramify.evaluate.evaluation_matrix import EvalMatrixPlan
    from ramify.evaluate.run_evaluation import AttemptOutcome

_ITEMS = 20
"""Number of questions for each question family and text size."""
_MIN_TEXT = 1_000
"""Shortest text of a question suite, in tokens of four characters."""
_REPLY_TOKENS = 1_024
"""Maximum tokens of a reply, without hidden reasoning. The longest correct reply has 150 words."""
_ASKED_WITH = (
    *("max_reply_tokens", "max_reasoning_tokens", "max_concurrency", "patience", "temperature"),
)
"""Settings of ``ask`` that apply to plain model calls."""
_KEPT = (*_ASKED_WITH, "json", "quiet", "verbose", "progress")
OPTIONS = (
    CliOptionSpec(
        "sizes",
        str,
        "leaf sizes to try, in tokens (counted as 3 bytes each), such as 2000,8000 (default: "
        "2000, doubled up to the model's window)",
        "SIZES",
    ),
    CliOptionSpec("items", int, f"number of questions per kind and size (default: {_ITEMS})"),
    CliOptionSpec(
        "tolerance",
        float,
        "how far the best size may fall below the highest accuracy (default: 0.02)",
    ),
    CliOptionSpec("seed", int, "seed of the questions (default: 0)"),
    CliOptionSpec("concurrency", int, "concurrent questions (default: 16)"),
    CliOptionSpec("svg", str, "also write the curve to an image", "FILE"),
    CliOptionSpec("yes", bool, "begin without asking", has_no=False, short="-y"),
    CliOptionSpec("resume", str, "continue an interrupted calibration; last is the latest", "ID"),
    *(option for option in SETTINGS if option.name in _KEPT),
)


def run(
    words: list[str],
    sizes: str | None = None,
    items: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    concurrency: int | None = None,
    svg: str | None = None,
    yes: bool | None = None,
    resume: str | None = None,
    **given: Any,
) -> int:
    """Run ``ramify calibrate``: measure a model's accuracy at each text size, and store the result.

    Later plans use the stored result.
    """
    from ramify.plans.part_size_calibration import TOLERANCE

    settings = {
        name: value for name, value in fill_missing_settings(given, KINDS).items() if name in _KEPT
    }
    notes = make_message_writer(settings, KINDS)
    if bool(words) == (resume is not None):
        if not words:
            raise UsageError("no model: ramify calibrate MODEL, such as openai:gpt-5-mini")
        raise UsageError("--resume continues with the recorded model: remove the model")
    if resume is not None and (sizes or items is not None or seed is not None):
        raise UsageError("--resume continues with the recorded questions: remove the other options")
    tolerance = TOLERANCE if tolerance is None else tolerance
    if not 0 <= tolerance < 1:
        raise UsageError(f"--tolerance {tolerance:g}: give a number from 0 to less than 1")
    for name, number in (("items", items), ("concurrency", concurrency)):
        if number is not None and number < 1:
            raise UsageError(f"--{name} {number}: give at least 1")
    if svg is not None and not Path(svg).expanduser().parent.is_dir():
        raise UsageError(f"--svg {svg}: its folder does not exist")
    with (
        span_export_context(notes),
        ProgressDisplay(notes, choose_display_form(settings.get("progress"), notes)) as screen,
    ):
        shown = _Curve(screen, tolerance, svg, as_json=bool(settings.get("json")))
        options = EvalMatrixOptions(
            k=None,
            concurrency=concurrency or 16,
            html=None,
            is_dry_run=False,
            is_confirmed=bool(yes),
            command="ramify calibrate",
            show=shown,
        )
        command = EvalMatrixCommand(settings, screen, options)
        if resume is not None:
            return command.resume(_load_stored_plan(resume))
        plan, likely = _plan(words[0], settings, sizes, items or _ITEMS, seed or 0)
        shown.announce(plan, likely)
        return command.begin_plan(plan)


class _Curve:
    """Prints and stores a calibration curve: a model's accuracy at each text size."""

    def __init__(
        self, screen: ProgressDisplay, tolerance: float, svg: str | None, *, as_json: bool
    ) -> None:
        self._notes = screen.notes
        self._tolerance = tolerance
        self._svg = svg
        self._as_json = as_json

    def announce(self, plan: EvalMatrixPlan, likely: float | None) -> None:
        """Announce the text sizes to measure, the number of questions and the probable cost."""
        from ramify.evaluate.leaf_size_accuracy_curve import call_size_of_cell

        sizes = sorted({call_size_of_cell(cell) for cell in plan.cells})
        per_size = sum(cell.plan.items for cell in plan.cells) // len(sizes)
        self._notes.say(
            f"calibrate {plan.first_cell_plan.model}: "
            f"{', '.join(f'{size:,}' for size in sizes)} tokens, "
            f"{pluralize(per_size, 'question')} each, one call for each question"
            + ("" if likely is None else f", about {format_dollars(likely)} in all")
        )

    def __call__(
        self, plan: EvalMatrixPlan, outcomes: Mapping[str, Sequence[AttemptOutcome]]
    ) -> None:
        from ramify.evaluate.leaf_size_accuracy_curve import (
            calibration_points,
            curve_lines,
            curve_svg,
            evaluation_date,
        )
        from ramify.plans.part_size_calibration import PartSizeCalibration, store_calibration

        points = calibration_points(plan, outcomes)
        if not points:
            return
        missing = sum(cell.plan.items for cell in plan.cells) - sum(each.items for each in points)
        model = plan.first_cell_plan.model
        name = named_models()[model].name if model in named_models() else model
        found = PartSizeCalibration(name, evaluation_date(plan), points, self._tolerance)
        path = None
        if not missing:
            path = store_calibration(found, open_configured_folder_store("ramify calibrate").root)
        if self._svg is not None:
            image = Path(self._svg).expanduser()
            try:
                image.write_text(curve_svg(found), encoding="utf-8")
            except OSError as error:
                # The calls are paid for, so the curve is printed anyway.
                self._notes.warning(f"the image {image} cannot be written: {error.strerror}")
        if self._as_json:
            data = msgspec.to_builtins(found)
            file = None if path is None else str(path)
            print(json_line({**data, "part_tokens": found.part_tokens, "file": file}))
        else:
            print("\n".join(curve_lines(found)))
        if path is None:
            self._notes.warning(
                f"not stored: {pluralize(missing, 'question')} failed and got no score; retry "
                f"with: ramify calibrate --resume {plan.id}"
            )
        else:
            self._notes.say(f"stored in {path}; plans with {found.model} use {found.size_note}")


def _plan(
    model: str, settings: dict[str, Any], sizes: str | None, items: int, seed: int
) -> tuple[EvalMatrixPlan, float | None]:
    """Plan a calibration, which measures a model's accuracy in plain calls at each text size.

    Returns the plan and its likely cost in dollars, which is None if the model has no price.

    Raises ConfigError if the model cannot be used, and UsageError if a size exceeds its window.
    """
    from ramify.evaluate.answer_modes import root_model_spec
    from ramify.evaluate.evaluation_matrix import (
        EvalMatrixAxes,
        EvalMatrixTaskCache,
        make_matrix_plan,
    )
    from ramify.evaluate.leaf_size_accuracy_curve import (
        QUESTIONS,
        calibration_sizes,
        estimate_calibration_cost,
        to_suite_tokens,
    )
    from ramify.evaluate.run_evaluation import EvaluationPlan

    kept = {name: settings[name] for name in _ASKED_WITH if name in settings}
    kept.setdefault("max_reply_tokens", _REPLY_TOKENS)
    rlm = make_rlm({**kept, "model": model}, sandbox_spec({}), None)
    room = asyncio.run(root_model_spec(rlm))
    chosen = calibration_sizes(room) if sizes is None else _parse_sizes(sizes)
    for size in chosen:
        if not room.fits(to_suite_tokens(size)):
            raise UsageError(
                f"a leaf of {size:,} tokens does not fit the window of {model} "
                f"({room.window:,} tokens, of which {room.reply:,} are for the reply)"
            )
    axes = EvalMatrixAxes(
        suites=tuple(QUESTIONS),
        lengths=tuple(map(to_suite_tokens, chosen)),
        models=(model,),
        modes=("direct",),
        base=EvaluationPlan(
            model=model, task="", options={"seed": seed}, items=items, settings=kept
        ),
    )
    plan = make_matrix_plan(axes, EvalMatrixTaskCache())
    cells = tuple(
        cell for cell in plan.cells if cell.place["family"] in QUESTIONS[cell.place["suite"]]
    )
    plan = msgspec.structs.replace(plan, cells=cells)
    return plan, estimate_calibration_cost(plan, room)


def _parse_sizes(text: str) -> list[int]:
    """Parse the value of ``--sizes``: both ``2000,8000`` and ``2k,8k`` give [2000, 8000].

    Returns token counts in ascending order. Raises UsageError for any other form.
    """
    from ramify.evaluate.leaf_size_accuracy_curve import to_suite_tokens

    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        number, thousand = (word[:-1], 1_000) if word[-1:] in "kK" else (word, 1)
        if not number.isdecimal() or to_suite_tokens(int(number) * thousand) < _MIN_TEXT:
            raise UsageError(
                f"--sizes {text}: '{word}' is not a number of tokens of at least 1,334"
            )
        found.append(int(number) * thousand)
    if len(set(found)) < max(1, len(found)):
        raise UsageError(f"--sizes {text}: give at least one size, and each only once")
    return sorted(found)


def _load_stored_plan(id: str) -> EvalMatrixPlan:
    """Load the plan of a stored calibration by its id.

    Raises an error if the id is unknown or belongs to another kind of evaluation.
    """
    from ramify.evaluate.evaluation_matrix import EvaluationMatrixStore
    from ramify.evaluate.leaf_size_accuracy_curve import is_calibration

    plan = EvaluationMatrixStore(open_configured_folder_store("ramify calibrate").root).find(id)
    if plan is None:
        raise UnknownRun(f"no calibration is called {id!r}: ramify calibrate prints its id")
    if not is_calibration(plan):
        raise ConfigError(f"{plan.id} is not a calibration: continue it with ramify eval --resume")
    return plan


COMMAND = SubcommandSpec(
    "calibrate",
    """\
Measure how accurate MODEL answers about texts of each size, and store the best size for plans.

The texts and their questions are generated: some ask for four values, others for all facts of one
kind. The number of calls and an upper bound on their cost come first. Later plans with this model
(`ramify plan`, `ask --mode plan`) cut the context into parts of the best size, and say so.""",
    run,
    "MODEL",
    max_words=1,
    options=OPTIONS,
)
