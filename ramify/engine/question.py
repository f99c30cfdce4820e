"""Build the question of a run, and its options, from the user's arguments.

completion(text, "how many?")          context = text, question = "how many?"
completion("How many days has May?")   no context: the question is answered directly
completion(very_long_prompt)           context = the prompt, question = "do what it asks"
completion(ramify.load("logs/"), "…")  context, tools and a description from the sources
completion(frame, "…")                 context = a table, with ``sql`` over it

Values of other libraries, such as data frames, are converted by ``sources/convert_to_context.py``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

import msgspec

from ramify.clients.base import Client, Sampling
from ramify.clients.model_config import Model
from ramify.engine import observation_messages
from ramify.engine.answer_strategies import Mode, Strategy
from ramify.engine.branch_search import BranchSearch
from ramify.engine.limits import BudgetLedger, Limits
from ramify.engine.prompt_scaffold import Scaffold
from ramify.engine.prompt_text import PromptExample, parse_prompt_examples
from ramify.engine.run_pictures import PictureSource
from ramify.engine.tool_set import optional_tool_names
from ramify.engine.typed_answers import CITE_INSTRUCTION, AnswerSchema, cited_type, to_answer_schema
from ramify.errors import ConfigError, StrictKeywordsMeta, check_types, did_you_mean
from ramify.logging import calling_line, warn_at
from ramify.nearest_name import nearest_name
from ramify.sandbox.base import JailSpec, Session, SharedContextValue, Table
from ramify.sources.convert_to_context import as_context, needs_io
from ramify.sources.loaded_sources import MIN_SEARCHED_CHARS, DocumentPartLocation
from ramify.types.event import Listener, ModeChosen
from ramify.types.message import Message, escape_surrogates

ModelSpec = str | Model | Client
"""A name ``provider:model``, a model with its key and settings, or a client."""
_OF_A_MODEL = ("api_key", "base_url", "alias", "window", "price", "headers", "vision")
"""Keyword arguments of ``Model`` that users often pass elsewhere by mistake."""
_PICTURES = ("image", "image_url", "input_image", "input_audio", "input_file", "file", "video_url")
"""The names that providers use for those parts of a message that are not text."""
PAGE_PICTURE = "page_picture"
"""Name of the tool that shows a page of a PDF. It is optional: a short context is answered by a
plain call, without the tool."""
_MAX_PATH_CHARS = 255
"""Contexts longer than this are not tested for being a file name."""
_LONG_QUESTION_CHARS = 2000
"""A question that is longer than its context causes a warning only if it has at least this many
characters."""
MAX_BARE_PROMPT_CHARS = 20_000
"""A prompt without a query becomes the context if it is longer than this."""
_BARE = "The task and its data are in `context`. Read it and do what it asks."


@runtime_checkable
class ContextWithTools(Protocol):
    """The interface of a source that was loaded with ``ramify.load``.

    It provides a context, tools to query the context, and a description of the context for the
    model.
    """

    @property
    def context(self) -> Any: ...

    @property
    def tools(self) -> Mapping[str, Any]: ...

    def manifest(self) -> str: ...


DirectChoice = bool | Literal["always"]
"""Whether one plain model call without a session answers the question: False forbids it, True
allows it for short contexts, and ``always`` requires it."""
ALWAYS: Literal["always"] = "always"


class RunOptions(msgspec.Struct, metaclass=StrictKeywordsMeta, frozen=True, kw_only=True):
    """The options with which a question is asked.

    Methods of ``RLM`` accept them as keyword arguments, as one object, or both; a keyword replaces
    a field of the object.

        strict = ramify.RunOptions(cite=True, limits=ramify.Limits(max_turns=5))
        rlm.completion(text, "Which host failed?", strict)
        rlm.completion(text, "Which hosts failed?", strict, answer_type=list[str])

    The options passed to ``RLM(…)`` or ``conversation`` are the defaults for all of its questions.
    A field of a later object overrides them only if it differs from the field's own default value.
    """

    model: ModelSpec | Sequence[ModelSpec] | None = None
    """Model, or one model per depth; None means the model of the RLM."""
    sub_model: ModelSpec | Sequence[ModelSpec] | None = None
    """Model for all calls below the root. A list adds models that a session can choose by name."""
    limits: Limits | None = None
    """Limits of the question: turns, depth, calls, tokens, dollars, seconds. All runs of an RLM
    share ``max_concurrency``."""
    sampling: Sampling | None = None
    """Temperature and other sampling settings, for example a different seed for each attempt."""
    answer_type: Any = None
    """Python type, such as ``list[str]``, or JSON schema that the answer must match. None leaves
    the answer unchecked."""
    cite: bool = False
    """Ask for citations, and check them against the context."""
    instructions: str = ""
    """Instructions added to the prompt of each session or direct call, such as the form of the
    answer."""
    examples: Sequence[Any] = ()
    """Example questions with the desired answers, added to the prompt of each session or direct
    call: (question, answer) pairs, or dicts with these keys."""
    cache: bool = False
    """Reuse stored replies to identical requests. Needs a store."""
    search: BranchSearch | int | None = None
    """Sample several continuations of a turn and choose one of their answers. Give a number of
    continuations of the first turn (majority vote; 1 disables it), ``BestOfBranches`` or a
    ``BranchSearch``."""
    on_event: Listener | None = None
    """Function called with each event of the run; it must not be ``async``."""
    metadata: Mapping[str, Any] | None = None
    """Additional values to save with the configuration of the run."""
    direct: DirectChoice = True
    """If False, the root has a session even for a short context. With ``"always"``, one plain call
    answers a context of any length; a context with tools, such as a table with ``sql``, is
    refused."""
    retry_empty: bool = True
    """If one plain call answers and its reply is empty or calls a tool, ask again, at most twice.
    False accepts such a reply as the answer, as in training and evaluation."""
    strategy: Strategy | None = None
    """Code that answers the question in place of a session, such as a
    ``ramify.plans.PlanStrategy``."""
    mode: Mode | None = None
    """How the question is answered: ``free`` (in a session), ``plan`` (by the ready-made plan that
    fits the wording of the question), ``direct`` (by one plain call), or ``auto``, which chooses by
    rules and at most one call. None: ``direct`` and ``strategy`` decide."""
    budget: BudgetLedger | None = None
    """Budget shared by several runs. Every request reserves its cost from this budget too. A stored
    run that exhausts it is suspended, and can be resumed."""

    def updated(
        self, options: RunOptions | None, changes: Mapping[str, Any], more: Iterable[str] = ()
    ) -> RunOptions:
        """Return a copy updated with the options set in ``options`` and then with ``changes``.

        Raises ConfigError for an unknown name. The error suggests the most similar name among the
        options and ``more``, the caller's other keywords.
        """
        if options is not None and not isinstance(options, RunOptions):
            raise ConfigError(
                f"options is a {type(options).__name__}: give a ramify.RunOptions(…), or keyword "
                "arguments"
            )
        for name in changes:
            if name not in self.__struct_fields__:
                raise ConfigError(f"unknown option '{name}': {_place_of(name, more)}")
        check_types(RunOptions, changes)
        given = {} if options is None else _set_fields(options)
        updated = msgspec.structs.replace(self, **{**given, **changes})
        _check_combination(updated)
        return updated


def _place_of(name: str, more: Iterable[str]) -> str:
    """Return a hint for an unknown option: the option or field that the user may have meant.

    It names the option with the nearest name, or the option that has a field of that name.
    """
    options = [*RunOptions.__struct_fields__, *more]
    places = {
        **{f: f"limits=ramify.Limits({f}=…)" for f in Limits.__struct_fields__},
        **{f: f"sampling=ramify.Sampling({f}=…)" for f in Sampling.__struct_fields__},
        **{f: f"sandbox=ramify.JailSpec({f}=…)" for f in JailSpec.__struct_fields__},
        **{f: f"model=ramify.Model('provider:model', {f}=…)" for f in _OF_A_MODEL},
    }
    close = nearest_name(name, [*options, *places])
    if close in options or close is None:
        return did_you_mean(name, options)
    what = "" if close == name else f"did you mean '{close}'? "
    return f"{what}{'it belongs to a model: ' * (close in _OF_A_MODEL)}give {places[close]}"


def _check_combination(options: RunOptions) -> None:
    """Raise ConfigError if an example is invalid, or if an option contradicts another one."""
    parse_prompt_examples(options.examples)
    if options.mode is not None:
        other = "strategy" if options.strategy is not None else "direct"
        if options.strategy is not None or options.direct is not True:
            raise ConfigError(
                f"mode='{options.mode}' and {other} set the same thing: give only one"
            )


class RlmKeywordOptions(TypedDict, total=False):
    """The fields of ``RunOptions`` that ``RLM`` accepts as keyword arguments."""

    sub_model: ModelSpec | Sequence[ModelSpec] | None
    limits: Limits | None
    sampling: Sampling | None
    answer_type: Any
    cite: bool
    instructions: str
    examples: Sequence[Any]
    cache: bool
    search: BranchSearch | int | None
    on_event: Listener | None
    metadata: Mapping[str, Any] | None
    direct: DirectChoice
    retry_empty: bool
    strategy: Strategy | None
    mode: Mode | None
    budget: BudgetLedger | None


class RunKeywordOptions(RlmKeywordOptions, total=False):
    """The fields of ``RunOptions`` that can be passed as keyword arguments with a single
    question."""

    model: ModelSpec | Sequence[ModelSpec] | None


def _set_fields(options: RunOptions) -> dict[str, Any]:
    """Return the fields of ``options`` that differ from their default values."""
    defaults = RunOptions()
    fields = {name: getattr(options, name) for name in options.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not getattr(defaults, name)}


class Question(msgspec.Struct, frozen=True):
    """One question with everything needed to answer it, such as its context, tools and answer
    type."""

    text: str
    context: Any
    """Value that the session receives; None for a question without a context."""
    about: str = ""
    """Description of the context for the model, in addition to its size and its first
    characters."""
    tools: Mapping[str, Any] = {}
    """Functions that belong to the sources of the context."""
    kind: AnswerSchema | None = None
    cite: bool = False
    on_session: Callable[[Session], Awaitable[None]] | None = None
    """Prepares each new session before its first cell."""
    on_context: Callable[[SharedContextValue], None] | None = None
    """Called with the encoded context before it is used."""
    conduct: Callable[[Any], Awaitable[Any]] | None = None
    """Task code that conducts the conversation with the model, in place of the engine's loop."""
    strategy: Strategy | None = None
    """Code that answers the question with many small model calls, in place of the engine's loop."""
    direct: DirectChoice = True
    """True if one direct call may answer, False if the root always gets a session, and ``always``
    if one direct call must answer."""
    retry_empty: bool = True
    """Whether to ask again if the direct call's reply is empty. If False, the empty reply is the
    answer."""
    mode: Mode | None = None
    """Mode that determines ``direct`` and ``strategy`` when the run begins; None leaves them
    unchanged."""
    chosen_mode: ModeChosen | None = None
    """Mode choice recorded by the run that is being repeated."""
    instructions: str = ""
    """Instructions of the task, which are added to those of the user."""
    examples: tuple[PromptExample, ...] = ()
    before: tuple[Message, ...] = ()
    """Messages before the question: a system message, few-shot examples, earlier turns."""
    warnings: tuple[str, ...] = ()
    """Warnings about the sources, such as files that are not in the context."""
    pictures: Mapping[str, PictureSource] = {}
    """Pictures of the context: digest -> their bytes, or where these are stored."""
    needs_session: bool = False
    """True if a part of the context, such as scanned pages, can be read only through a tool."""
    read: Mapping[str, Any] = {}
    """Record of the sources: ``sources.loaded_sources.LoadedSourcesRecord`` as plain values."""
    sources: Mapping[str, Any] = {}
    """Data from which a repeated run reloads the tools of the sources
    (``LoadedContext.recorded_sources``)."""

    @property
    def has_mandatory_tools(self) -> bool:
        """True if the question comes with tools that are needed to answer it.

        A plain model call is then not enough, because only a session can offer tools.
        """
        return bool(
            self.tools and self.tools.keys() - {PAGE_PICTURE, *optional_tool_names(self.tools)}
        )

    def with_run_options(self, options: RunOptions) -> Question:
        """Return a copy of the question that is answered according to ``options``."""
        return msgspec.structs.replace(
            self,
            direct=options.direct,
            retry_empty=options.retry_empty,
            strategy=options.strategy,
            mode=options.mode,
        )

    def can_answer_plainly(self, scaffold: Scaffold, window: int, has_tools: bool) -> bool:
        """Return True if one plain model call is enough to answer the question.

        The context must be small, and nothing may require a session. Raises ConfigError if the
        question demands a plain call but requires a session.
        """
        needs_session = (
            self.needs_session
            or has_tools
            or self.has_mandatory_tools
            or self.on_session is not None
        )
        if self.direct == ALWAYS:
            if needs_session:
                raise ConfigError(
                    "one plain call (--mode direct, direct='always') cannot use the tools or "
                    "session setup that this question or its input needs, such as sql over a "
                    "table: choose --mode free, or omit direct"
                )
            return True
        if not self.direct or needs_session or scaffold.protocol != "notebook":
            return False
        return self.context is None or observation_messages.count_context_chars(
            self.context
        ) <= min(scaffold.direct_chars, 2 * window)


def to_session_value(prompt: Any) -> Any:
    """Convert a prompt to a loaded source or to a value that a session can hold.

    The result of ``ramify.load`` is returned unchanged. Paths and open files are read immediately.
    """
    # The columns of a DataFrame are attributes, and could be called like those of a source.
    is_frame = hasattr(type(prompt), "__arrow_c_stream__")
    if isinstance(prompt, str) or (isinstance(prompt, ContextWithTools) and not is_frame):
        return prompt
    try:
        return as_context(prompt)
    except RecursionError:
        return prompt  # refused below


async def read_if_file(prompt: Any) -> Any:
    """Read a prompt in a background thread if it is a path or an open file.

    Any other prompt is returned unchanged.
    """
    return await asyncio.to_thread(to_session_value, prompt) if needs_io(prompt) else prompt


class _SourceFacts(NamedTuple):
    """What a loaded source adds to a question, such as a description, tools and pictures.

    It also holds warnings and provenance.
    """

    about: str = ""
    tools: Mapping[str, Any] = {}
    warnings: tuple[str, ...] = ()
    pictures: Mapping[str, PictureSource] = {}
    needs_session: bool = False
    places: Mapping[str, Sequence[DocumentPartLocation]] = {}
    read: Mapping[str, Any] = {}
    sources: Mapping[str, Any] = {}

    def around(self, inner: _SourceFacts) -> _SourceFacts:
        """Merge the facts of a wrapping source with those of ``inner``, the source that it
        wraps."""
        return _SourceFacts(
            f"{self.about}\n{inner.about}".strip(),
            {**inner.tools, **self.tools},
            (*self.warnings, *inner.warnings),
            {**self.pictures, **inner.pictures},
            self.needs_session or inner.needs_session,
            {**self.places, **inner.places},
            {**self.read, **inner.read},
            {**self.sources, **inner.sources},
        )


_NO_SOURCE = _SourceFacts()


def _facts_of(source: ContextWithTools) -> _SourceFacts:
    return _SourceFacts(
        source.manifest(),
        dict(source.tools),
        tuple(getattr(source, "warnings", tuple)()),
        getattr(source, "pictures", {}),
        getattr(source, "needs_session", False),
        getattr(source, "places", {}),
        getattr(source, "to_record", dict)(),
        getattr(source, "recorded_sources", dict)(),
    )


def make_question(prompt: Any, query: str | None, kind: Any, cite: bool) -> Question:
    """Create the question for ``completion(prompt, query)``.

    Raises ConfigError if the question or the context is empty or has the wrong type.
    """
    on_session = conduct = None
    instructions, examples = "", tuple[PromptExample, ...]()
    before = tuple[Message, ...]()
    source = _NO_SOURCE
    prompt = to_session_value(prompt)
    # Most prompts are texts, and the check of a protocol looks at each of its attributes.
    is_source = not isinstance(prompt, str) and isinstance(prompt, ContextWithTools)
    if is_source:
        instructions = getattr(prompt, "instructions", "")
        examples = parse_prompt_examples(getattr(prompt, "examples", ()))
        before = tuple(getattr(prompt, "messages", ()))
        on_session = getattr(prompt, "on_session", None)  # the setup of a task
        conduct = getattr(prompt, "conduct", None)
        source = _facts_of(prompt)
        inner = to_session_value(prompt.context)
        if inner is not prompt.context and isinstance(inner, ContextWithTools):  # a task's path
            source, inner = source.around(_facts_of(inner)), inner.context
        prompt = inner
    about, tools = source.about, dict(source.tools)
    tables = None
    if isinstance(prompt, Table) or (
        type(prompt) is dict and any(isinstance(each, Table) for each in prompt.values())
    ):
        from ramify.sources.context_sql_tables import (
            ContextSqlTables,  # it imports what queries need
        )

        tables = ContextSqlTables.from_context(prompt, tools)
    if tables is not None:
        about, tools = f"{about}\n{tables.manifest()}".strip(), {**tables.tools, **tools}
    if query is None:
        if not isinstance(prompt, str):
            raise ConfigError(
                f"a context of type {type(prompt).__name__} needs a question: completion(context, "
                "query)"
            )
        text, context = (prompt, None) if len(prompt) <= MAX_BARE_PROMPT_CHARS else (_BARE, prompt)
    else:
        text, context = query, prompt
    if isinstance(text, RunOptions):
        raise ConfigError("the question is a RunOptions: give options=…")
    if not isinstance(text, str):
        raise ConfigError(f"the question is a {type(text).__name__}: give a text")
    _refuse_pictures(context)
    if isinstance(context, str) and len(text) > max(len(context), _LONG_QUESTION_CHARS):
        warn_at(
            calling_line(),
            f"the question has {len(text):,} characters and its context {len(context):,}: the "
            "order is completion(context, question)",
            UserWarning,
        )
    if isinstance(context, str) and _is_path(context):
        warn_at(
            calling_line(),
            f"the context is the text '{context}' itself, not the content of that file or folder: "
            f"give ramify.load('{context}')",
            UserWarning,
        )
    if not text.strip():
        raise ConfigError("the question is empty: say what you want to know")
    num_chars = 0 if context is None else _num_chars(context)
    if context is not None and num_chars == 0 and (tables is not None or not tools):
        raise ConfigError(
            "the context is empty, so there is nothing to answer from; omit it to ask without a "
            "context"
        )
    if num_chars >= MIN_SEARCHED_CHARS and not is_source:  # sources bring these tools
        from ramify.sources.text_search import (
            build_context_search_tools,  # few contexts are so long
        )

        tools = {**tools, **build_context_search_tools(context)}
    if cite:
        kind = cited_type(kind, context, source.places)
    elif kind is not None:
        kind = to_answer_schema(kind)
    if cite and context is None:
        raise ConfigError("citations need a context to cite: give one, or ask without cite")
    return Question(
        escape_surrogates(text),
        context,
        "\n".join(filter(None, [about, CITE_INSTRUCTION if cite else ""])),
        tools,
        kind,
        cite,
        on_session,
        None if tables is None else tables.set_context,
        conduct,
        instructions=instructions,
        examples=examples,
        before=before,
        warnings=source.warnings,
        pictures=source.pictures,
        needs_session=source.needs_session,
        read=source.read,
        sources=source.sources,
    )


def _is_path(text: str) -> bool:
    """Return True if a context looks like the name of a file or folder.

    The caller then probably meant the content. A folder name must contain a slash.
    """
    if len(text) > _MAX_PATH_CHARS or "\n" in text or "\0" in text:
        return False
    return os.path.isfile(text) or (os.sep in text and os.path.isdir(text))


def _refuse_pictures(context: Any) -> None:
    """Raise ConfigError if the context is a list of chat messages with images or files.

    A session would receive them as encoded text, at thousands of tokens per image.
    """
    for message in context if isinstance(context, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in [message, *(content if isinstance(content, list) else ())]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _PICTURES:
                raise ConfigError(
                    f"the context has a part of type '{kind}', but only text is read from "
                    "messages: give the picture's file with ramify.load(path), or its text"
                )


def leading_messages(system: str, before: Sequence[Message]) -> list[Message]:
    """Return the opening messages of a prompt, which precede the question.

    Joins ``system`` and all system messages in ``before`` into one, because a prompt may have only
    one system message.
    """
    texts = [system, *(message.content for message in before if message.role == "system")]
    text = "\n\n".join(filter(None, texts))
    others = [message for message in before if message.role != "system"]
    return [*([Message("system", text)] if text else []), *others]


def _num_chars(context: Any) -> int:
    try:
        return observation_messages.count_context_chars(context)
    except RecursionError:
        raise ConfigError(
            "the context is nested too deeply or contains itself: flatten it"
        ) from None
