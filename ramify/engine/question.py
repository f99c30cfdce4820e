"""The question of a run, built from the user's arguments: a prompt, an optional query, or sources
from ``ramify.load``.

    completion(text, "how many?")          context = text, question = "how many?"
    completion("How many days has May?")   no context: the question is answered directly
    completion(very_long_prompt)           context = the prompt, question = "do what it asks"
    completion(ramify.load("logs/"), "…")  context, tools and a description from the sources
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from ramify.engine import observe
from ramify.engine.citations import INSTRUCTION, cited_type
from ramify.engine.scaffold import Scaffold
from ramify.engine.typed import AnswerType, answer_type
from ramify.errors import ConfigError
from ramify.sandbox.base import Session
from ramify.types.message import encodable

MAX_BARE_PROMPT_CHARS = 20_000
"""A longer prompt without a query becomes the context."""
_BARE = "The task and its data are in `context`. Read it and do what it asks."


@runtime_checkable
class SourceContext(Protocol):
    """Interface of the object that ``ramify.load`` returns."""

    @property
    def context(self) -> Any: ...

    @property
    def tools(self) -> Mapping[str, Any]: ...

    def manifest(self) -> str: ...


class Question(msgspec.Struct, frozen=True):
    """One question, ready to run."""

    text: str
    context: Any
    """Value that the session gets; None for a question without a context."""
    about: str = ""
    """What the model learns about the context in addition to its size and beginning."""
    tools: Mapping[str, Any] = {}
    """Functions that come with the sources."""
    kind: AnswerType | None = None
    cite: bool = False
    on_session: Callable[[Session], Awaitable[None]] | None = None
    """Prepares each new session before its first cell."""
    direct: bool = True
    """True if one direct call may answer it. If False, the root always has a session."""

    def is_direct(self, scaffold: Scaffold, window: int, has_tools: bool) -> bool:
        """True if the context is small enough for one direct call and nothing requires a
        session."""
        if (
            not self.direct
            or has_tools
            or self.tools
            or self.on_session is not None
            or scaffold.protocol != "notebook"
        ):
            return False
        return self.context is None or observe.chars_of(self.context) <= min(
            scaffold.direct_chars, 2 * window
        )


def question(prompt: Any, query: str | None, kind: Any, cite: bool) -> Question:
    """Return the question of ``completion(prompt, query)``. Raises ConfigError if it is empty."""
    about, tools, on_session = "", {}, None
    if isinstance(prompt, SourceContext):
        on_session = getattr(prompt, "on_session", None)  # the setup of a task
        about, tools, prompt = prompt.manifest(), dict(prompt.tools), prompt.context
    if hasattr(prompt, "read"):
        raise ConfigError(
            f"a context cannot be a {type(prompt).__name__}: give prompt.read(), or "
            "ramify.load(path)"
        )
    if query is None:
        if not isinstance(prompt, str):
            raise ConfigError(
                f"a context of type {type(prompt).__name__} needs a question: completion(context, "
                "query)"
            )
        text, context = (prompt, None) if len(prompt) <= MAX_BARE_PROMPT_CHARS else (_BARE, prompt)
    else:
        text, context = query, prompt
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("the question is empty: say what you want to know")
    if context is not None and _num_chars(context) == 0 and not tools:
        raise ConfigError(
            "the context is empty, so there is nothing to answer from; omit it to ask without a "
            "context"
        )
    check = cited_type(kind, context) if cite else answer_type(kind)
    if cite and context is None:
        raise ConfigError("citations need a context to cite: give one, or ask without cite")
    return Question(
        encodable(text),
        context,
        "\n".join(filter(None, [about, INSTRUCTION if cite else ""])),
        tools,
        check,
        cite,
        on_session,
    )


def _num_chars(context: Any) -> int:
    try:
        return observe.chars_of(context)
    except RecursionError:
        raise ConfigError(
            "the context is nested too deeply or contains itself: flatten it"
        ) from None
