"""The command ``ramify plan``: show a plan and its estimated cost, and run it once the user agrees.

    arguments, sources ──> plan ──> cost estimate ──> confirmation ──> run, as for ``ramify ask``

Nothing is sent before the user agrees, unless ``--yes`` is given. The settings are those of ``ask``
(see ``ask.py``) without those of sessions. ``ask_runner.py`` runs the plan and prints the answer;
the plans are in ``ramify/plans``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.ask import (
    KINDS,
    NO_MODEL,
    NOT_OF_MODE,
    SETTINGS,
    check_models_ready,
    load_sources,
    make_message_writer,
    make_rlm,
    open_store,
    refuse_question_without_quotes,
    sandbox_spec,
)
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError, exit_codes_epilog
from ramify.cli.progress_display import ProgressDisplay, choose_display_form
from ramify.cli.settings import fill_missing_settings, named_models
from ramify.cli.telemetry import span_export_context
from ramify.cli.terminal_text import (
    StderrMessageWriter,
    format_count,
    format_dollars,
    format_duration,
    json_line,
    pluralize,
    write_stderr,
)
from ramify.errors import ConfigError
from ramify.logging import hold_warnings_for_next_run
from ramify.plans.plan import Plan
from ramify.plans.plan_cost import ModelCostProfile, PlanCostBound, look_up_model
from ramify.plans.plan_strategy import PlanStrategy
from ramify.plans.ready_plans import strategy_for

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.sources.loaded_sources import LoadedContext

_CALL_S = 2.0
"""Assumed seconds per model call when the total time is estimated."""
_NOT_HERE = (*NOT_OF_MODE["plan"], "sub_model", "direct")
"""Settings of ``ramify ask`` that ``ramify plan`` does not have, or that it describes
differently."""
_SUB_MODEL = CliOptionSpec("sub_model", list, "model of the leaves (default: --model)", "MODEL")
OPTIONS = (
    CliOptionSpec(
        "plan",
        str,
        "search, classify, aggregate, pairwise, summarise or multi-hop, or a .json file with a "
        "plan (default: chosen by the words of the question)",
        "NAME|FILE",
    ),
    CliOptionSpec("yes", bool, "run the plan without asking", has_no=False, short="-y"),
    CliOptionSpec(
        "labels", str, "labels of classify and aggregate, with commas between them", "A,B"
    ),
    CliOptionSpec(
        "by", str, "what is kept whole: lines, records (blank lines between), sentences or tokens"
    ),
    CliOptionSpec(
        "part_tokens",
        int,
        "maximum size of a part, in tokens (counted as 3 bytes each; default: 4000)",
    ),
    CliOptionSpec(
        "top", int, "number of parts that search reads, ranked by BM25 (default: 20; 0: all)"
    ),
    CliOptionSpec("cut", bool, "cut a record that is larger than a part instead of refusing it"),
    _SUB_MODEL,
    *(option for option in SETTINGS if option.name not in _NOT_HERE),
)


def run(
    words: list[str],
    plan: str | None = None,
    yes: bool | None = None,
    labels: str | None = None,
    by: str | None = None,
    part_tokens: int | None = None,
    top: int | None = None,
    cut: bool | None = None,
    **given: Any,
) -> int:
    """Run ``ramify plan``: show the plan for a question and its cost, and run it once the user
    agrees."""
    settings = fill_missing_settings(given, KINDS)
    hold_warnings_for_next_run()
    notes = make_message_writer(settings, KINDS)
    form = choose_display_form(settings.get("progress"), notes)
    if not words or not words[0].strip():
        raise UsageError("no question: ramify plan QUESTION PATH…")
    if not settings.get("model"):
        write_stderr(NO_MODEL.replace("ramify ask", "ramify plan"))
        return ExitCode.USAGE
    question, *paths = words
    refuse_question_without_quotes(question, paths, "ramify plan")
    options = {
        "labels": None if labels is None else [label.strip() for label in labels.split(",")],
        "by": by,
        "part_tokens": part_tokens,
        "top": top,
        "cut": cut,
    }
    leaf_model = (settings.get("sub_model") or [settings["model"]])[0]
    leaf_model = named_models().get(leaf_model, leaf_model)
    chosen = _choose_plan(question, plan, leaf_model, options)
    settings = {**settings, "branches": 1}
    rlm = make_rlm(settings, sandbox_spec({}), open_store(settings))
    if yes:
        check_models_ready(settings)
    loaded = load_sources(paths, notes, settings)
    if loaded is None:
        raise UsageError("no context: ramify plan QUESTION PATH…, or a pipe")
    if loaded.is_csv and not (plan and _is_file(plan)):
        chosen = PlanStrategy(chosen.plan.with_table_header(), chosen.reason)
    model = look_up_model(leaf_model, rlm.limits)
    cost, _ = chosen.plan.cost_and_bounds(loaded.context, question, model)
    is_sent = bool(yes)
    as_json = bool(settings.get("json"))
    if as_json and not is_sent:
        print(json_line(_as_json(chosen, cost)))
        return ExitCode.ANSWERED
    for line in _lines(chosen, cost, model, rlm):
        if is_sent:
            notes.say(line)
        else:
            print(line)
    cost.check(_budget(rlm, model))
    if not is_sent and not _is_agreed(notes):
        return ExitCode.ANSWERED
    return _answer(rlm, question, loaded, chosen, notes, form, as_json=as_json)


def _answer(
    rlm: RLM,
    question: str,
    loaded: LoadedContext,
    chosen: PlanStrategy,
    notes: StderrMessageWriter,
    form: Any,
    *,
    as_json: bool,
) -> int:
    from ramify.cli import ask_runner
    from ramify.engine.question import RunOptions

    asked = ask_runner.QuestionRunRequest(question, loaded, RunOptions(strategy=chosen))
    with span_export_context(notes), ProgressDisplay(notes, form) as screen:
        return ask_runner.run(rlm, asked, screen, as_json=as_json)


def _choose_plan(
    question: str, name: str | None, model: Any, options: dict[str, Any]
) -> PlanStrategy:
    """Return the plan that ``--plan`` names, or the plan that suits the question best.

    The result states the reason for the choice. ``model`` is the model that the plan will call.
    """
    if name is not None and _is_file(name):
        if used := [key for key, value in options.items() if value is not None]:
            raise UsageError(
                f"--{used[0].replace('_', '-')} applies only to ready plans: set it in {name} "
                "instead"
            )
        try:
            return PlanStrategy(
                Plan.from_json(Path(name).expanduser().read_bytes()), f"from {name}"
            )
        except OSError as error:
            raise ConfigError(f"the plan {name} cannot be read: {error.strerror}") from None
    return strategy_for(question, name=name, model=model, **options)


def _is_file(name: str) -> bool:
    """Return True if the value of ``--plan`` is a file name, not the name of a built-in plan."""
    return name.endswith(".json") or os.path.sep in name


def _budget(rlm: RLM, model: ModelCostProfile) -> Any:
    from ramify.engine.limits import BudgetLedger

    return BudgetLedger(rlm.limits, priced=model.price is not None).limit


def _lines(
    chosen: PlanStrategy, cost: PlanCostBound, model: ModelCostProfile, rlm: RLM
) -> Iterator[str]:
    yield f"plan {chosen.reason}"
    yield from chosen.plan.picture().splitlines()
    yield ""
    steps = ", ".join(f"{step.step} {step.calls:,}" for step in cost.steps if step.calls)
    how = "exactly" if cost.is_exact else "at most"
    yield f"calls    {how} {cost.calls:,}" + f" ({steps})" * bool(steps)
    if cost.steps and not cost.calls:
        yield (
            "reason   no part of the context passes the plan's filter, so the answer would be "
            "empty: ask in words that the context has, or read every part (search: --top 0)"
        )
    yield (
        f"tokens   at most {format_count(cost.input_tokens)} in, "
        f"{format_count(cost.output_tokens)} out"
    )
    if cost.dollars is None:
        yield f"dollars  unknown: {model.name} has no price"
    else:
        likely = format_dollars(cost.likely_dollars(model))
        yield f"dollars  at most {format_dollars(cost.dollars)}, about {likely} for English text"
    num = rlm.limits.max_concurrency
    rounds = pluralize(cost.rounds(num), "round")
    time = format_duration(cost.seconds(_CALL_S, num))
    yield f"time     {rounds} of up to {num} calls: about {time} if a call takes {_CALL_S:g} s"
    more = "" if cost.retries.dollars is None else f", {format_dollars(cost.retries.dollars)}"
    yield f"retries  at most {cost.retries.calls:,} more calls{more}"


def _as_json(chosen: PlanStrategy, cost: PlanCostBound) -> dict[str, Any]:
    """Return the JSON object that ``--json`` prints for a plan that is shown but not run.

    It contains the plan, the reason for choosing it, and its cost.
    """
    plain: dict[str, Any] = msgspec.to_builtins(cost)
    return {"plan": msgspec.to_builtins(chosen.plan), "reason": chosen.reason, "cost": plain}


def _is_agreed(notes: StderrMessageWriter) -> bool:
    """Ask on the terminal whether to run the plan, and return True if the user agrees.

    Without a terminal, print how to run the plan.
    """
    if not (sys.stdin is not None and sys.stdin.isatty()):
        notes.say("nothing was sent; to run the plan, add --yes")
        return False
    sys.stderr.write("run it? [y/N] ")
    sys.stderr.flush()
    is_agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not is_agreed:
        notes.say("nothing was sent")
    return is_agreed


COMMAND = SubcommandSpec(
    "plan",
    """\
Show a plan for QUESTION over the content of each PATH: a fixed program over bounded questions, with
its calls, tokens, dollars and time. Nothing is sent until you agree, or with --yes. The answer goes
to stdout, everything else to stderr.""",
    run,
    "QUESTION PATH…",
    max_words=None,
    options=OPTIONS,
    epilog=exit_codes_epilog(),
)
