"""Prepare runs that resume, replay or fork a recorded run.

A run is forked at a turn.

    record ──> compare the settings ──> repeat what is recorded ──> continue

This module decides which settings may differ from the recorded ones (limits, but not the depth),
and which finished runs may be continued (those that a limit ended, with a higher limit). What a
fork takes from its origin is decided in ``run_fork.py``; recorded replies are looked up in
``store/recorded_replies.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.engine.branch_search import recorded_search
from ramify.engine.limits import Limits
from ramify.engine.question import Question, RunOptions, make_question
from ramify.engine.resources import INSTRUCTIONS, RlmSetup, require_store
from ramify.engine.run_result import Result, as_text
from ramify.engine.tool_set import optional_tool_names
from ramify.engine.typed_answers import Citation, CitedAnswer, TypeMismatch, to_answer_schema
from ramify.errors import ConfigError, ReplayDiverged
from ramify.sandbox.base import SharedContextValue
from ramify.types.event import (
    RunEnded,
    RunStarted,
)
from ramify.types.message import Message
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.store.base import RunStore
    from ramify.store.recorded_replies import RunEventIndex

_OF_THE_RECORD = ("cite", "cache", "metadata", "direct", "retry_empty", "mode", *INSTRUCTIONS)
"""Options that a resumed or replayed run takes from the recorded run."""
COMPARED = ("model", "sub_model", "scaffold", "sampling", "tools", "depths")
"""Settings of a run that affect its requests, so that a repeated run must have the same."""
_LIMIT_OF = {
    Stop.MAX_TURNS: ("max_turns",),
    Stop.MAX_CALLS: ("max_calls",),
    Stop.MAX_TOKENS: ("max_tokens", "max_reply_tokens"),
    Stop.MAX_COST: ("max_cost",),
    Stop.DEADLINE: ("max_seconds",),
}
"""Stop reason -> limits, of which at least one must be raised to continue the run."""


def rerun_options(
    defaults: RunOptions, options: RunOptions | None, changes: Mapping[str, Any]
) -> RunOptions:
    """Return the options for repeating a recorded run.

    Raises ConfigError if ``changes`` sets an option whose value must come from the record.
    """
    for name in _OF_THE_RECORD:
        if name in changes:
            raise ConfigError(f"a repeated run takes {name} from its record: omit it")
    unused: dict[str, Any] = dict.fromkeys(("cite", "cache"), False)
    unused |= {"metadata": None, "direct": True, "retry_empty": True, "mode": None}
    return msgspec.structs.replace(defaults.updated(options, changes), **unused)


def rerun_setup(setup: RlmSetup, recording: RunEventIndex, options: RunOptions) -> RlmSetup:
    """Return the settings for repeating a recorded run, updated by ``options``.

    Instructions and examples come from the record. The search over continuations does too, unless
    ``options`` sets one.
    """
    now = setup.for_run(options).with_recorded_instructions(recording.started.config)
    if options.search is not None:
        return now
    search = recorded_search(recording.started.config, setup.search)
    return msgspec.structs.replace(now, search=search)


def check_settings_match_recording(
    started: RunStarted, setup: RlmSetup, options: RunOptions
) -> list[str]:
    """Raise ReplayDiverged if a setting that affects requests differs from the recorded one.

    Models may differ if ``options`` names them explicitly. Such differences are returned as a list
    of sentences.
    """
    chosen = [name for name in ("model", "sub_model") if getattr(options, name) is not None]
    changed = list(_differences(started.config, setup.config, chosen))
    compared = [name for name in COMPARED if name not in chosen]
    differences = list(_differences(started.config, setup.config, compared))
    depths = [
        config.get("limits", {}).get("max_depth", 1) for config in (started.config, setup.config)
    ]
    if started.config.get("limits") is not None and depths[0] != depths[1]:
        differences.append(_difference("limits.max_depth", *depths))
    if differences:
        raise ReplayDiverged(
            f"run {started.id} was started with {'; '.join(differences)}: resume it with the "
            "recorded settings, or ask as a new run"
        )
    return changed


def _differences(
    recorded: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]
) -> Iterator[str]:
    for name in names:
        # A run without tools records none.
        absent: dict[str, Any] | None = {} if name == "tools" else None
        before, after = recorded.get(name, absent), now.get(name, absent)
        if before is None or before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            added = after.keys() if name != "scaffold" else set()
            for field in sorted(before.keys() | added):
                if before.get(field) != after.get(field):
                    yield _difference(f"{name}.{field}", before.get(field), after.get(field))
        else:
            yield _difference(name, before, after)


def _difference(name: str, before: Any, after: Any) -> str:
    if name.startswith("tools."):
        changed = "not given" if after is None else "not used" if before is None else "changed"
        return f"tool {name.removeprefix('tools.')} ({changed} now)"
    shown = [
        ", ".join(map(str, value)) if isinstance(value, list) and value else repr(value)
        for value in (before, after)
    ]
    return (
        f"{name}={shown[0]}, not {shown[1]}"
        if sum(map(len, shown)) < 200
        else f"another {name} (of {len(shown[0]):,} characters, not {len(shown[1]):,})"
    )


def check_models_match_recording(started: RunStarted, setup: RlmSetup) -> None:
    """Raise ReplayDiverged if the models in ``setup`` are not those that the recorded run used."""
    differences = [*_differences(started.config, setup.config, ("model", "sub_model"))]
    if differences:
        raise ReplayDiverged(
            f"run {started.id} cannot be replayed: it was started with {'; '.join(differences)}"
        )


def is_limit_raised(recording: RunEventIndex, limits: Limits) -> bool:
    """Return True if the recorded run ended at a limit and ``limits`` now allows more."""
    ended = recording.ended
    if ended is None or ended.stop not in _LIMIT_OF:
        return False
    before = recorded_limits(recording)
    for name in _LIMIT_OF[ended.stop]:
        old, new = getattr(before, name), getattr(limits, name)
        if new is not None and (old is None or new > old):
            return True
    return False


def limit_hint(recording: RunEventIndex) -> str:
    """Return a hint on how to continue a run that ended at a limit, such as which limit to raise.

    Empty if the run did not end at a limit.
    """
    ended = recording.ended
    if ended is None or ended.stop not in _LIMIT_OF:
        return ""
    before = recorded_limits(recording)
    names = (f"{name}={getattr(before, name)}" for name in _LIMIT_OF[ended.stop])
    return f"to continue it, give more than {' or '.join(names)}"


def is_conversation(recording: RunEventIndex) -> bool:
    """Return True if the recorded run was started by ``RLM.conversation``."""
    return len(recording.questions) > 1 or bool(recording.started.config.get("conversation"))


def recorded_limits(recording: RunEventIndex) -> Limits:
    """Return the limits that applied when the recorded run was last started or resumed."""
    fields = recording.limits or recording.started.config.get("limits", {})
    return msgspec.convert(fields, Limits)


def recorded_context(store: RunStore | None, started: RunStarted) -> Any:
    """Load the context of a recorded run from the store, or return None if the run has no
    context."""
    if started.context is None:
        return None
    blob = require_store(store, "resume").blobs.get(started.context.digest)
    return SharedContextValue.from_encoded(blob, started.context.files).value


def tools_of_sources(started: RunStarted, given: Container[str]) -> dict[str, Any]:
    """Load the tools that a recorded run got from its data sources, such as ``sql`` and ``tables``.

    Return no tools if ``given`` already has all of them. Raises SourceError if a source no longer
    exists.
    """
    sources = started.config.get("sources")
    if not isinstance(sources, Mapping) or all(n in given for n in sources.get("tools", ())):
        return {}
    from ramify.sources.load_sources import (
        reload_recorded_tools,  # it imports the readers of all files
    )

    return reload_recorded_tools(started.id, sources)


def rebuild_question(
    store: RunStore | None,
    started: RunStarted,
    kind: Any,
    prompt: Any = None,
    of_sources: Mapping[str, Any] | None = None,
) -> Question:
    """Rebuild the question of a recorded run, including the tools of its context.

    ``kind`` replaces the recorded answer type if it is not None. Tools that the record cannot
    restore are taken from ``prompt`` (a context or task given again) and from ``of_sources`` (name
    to tool).
    """
    config, value = started.config, recorded_context(store, started)
    cite = bool(config.get("cite"))
    kind = kind if kind is not None else None if cite else config.get("answer_schema")
    resolved = (
        make_question("" if value is None else value, started.question, kind, cite)
        if value is not None
        else None
    )
    resolved = resolved or make_question(started.question, None, kind, cite)
    direct = config.get("direct", True)
    tools = _recorded_tools(resolved, config, of_sources or {})
    resolved = msgspec.structs.replace(resolved, tools=tools)
    if prompt is not None:
        given = make_question(prompt, started.question, None, False)
        resolved = msgspec.structs.replace(
            resolved,
            tools={**resolved.tools, **given.tools},
            on_session=given.on_session,
            on_context=given.on_context or resolved.on_context,
            conduct=given.conduct,
        )
    if config.get("conducted") and resolved.conduct is None:
        raise ConfigError(
            f"run {started.id} cannot be run again alone, because its task holds its "
            "conversations: resume the evaluation or training that made it"
        )
    before = msgspec.convert(config.get("before", ()), tuple[Message, ...])
    pictures = () if started.context is None else started.context.pictures
    return msgspec.structs.replace(
        resolved,
        about=config.get("about", ""),
        direct=direct,
        retry_empty=config.get("retry_empty", True),
        mode=config.get("mode"),
        before=before,
        pictures=dict.fromkeys(pictures),
    )


def _recorded_tools(
    resolved: Question, config: Mapping[str, Any], of_sources: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the tools that the recorded run got from its context and data sources, in order."""
    # Whether a context is searched may depend on what is installed here.
    optional = optional_tool_names(resolved.tools)
    tools = {name: tool for name, tool in resolved.tools.items() if name not in optional}
    tools |= of_sources
    if names := config.get("context_tools"):
        from ramify.sources.text_search import context_search_tools_by_name

        tools |= context_search_tools_by_name(names, resolved.context)
    return tools


def recorded_result(store: RunStore, run: str, ended: RunEnded, kind: Any = None) -> Result:
    """Return the result of a run that has already ended.

    ``kind`` is the requested answer type, if any. Raises ConfigError if the recorded answer does
    not have that type.
    """
    trajectory = store.load(run)
    answer: Any = trajectory.answer
    if ended.typed_answer is not None:
        answer = SharedContextValue.from_jsonable(ended.typed_answer)
    citations: tuple[Citation, ...] = ()
    if trajectory.metadata.get("cite") and answer is not None:
        cited = msgspec.convert(answer, CitedAnswer[Any])
        answer, citations = cited.answer, cited.citations
    check = None if kind is None else to_answer_schema(kind)
    if check is not None and answer is not None:
        try:
            answer = check.convert(answer)
        except TypeMismatch as mismatch:
            raise ConfigError(
                f"the recorded answer of run {trajectory.id} does not match the requested type: "
                f"{mismatch}"
            ) from None
    return Result(
        as_text(answer),
        answer,
        trajectory.stop or Stop.ERROR,
        trajectory.usage,
        trajectory.cost,
        trajectory,
        citations,
        partial=ended.partial,
    )
