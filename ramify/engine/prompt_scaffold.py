"""Define scaffolds: replaceable prompts and reply conventions between the engine and a model.

They are data, so users can replace them. Only the markers of ``MARKERS`` in double braces are
replaced, so a prompt may contain any other braces: ``{{tools}}`` becomes the user's tools,
``{{limits}}`` the limits, and so on. Their texts are facts of the run (see ``prompt_text.py``). In
``first``, the markers are ``{{question}}``, ``{{chars}}`` and ``{{about}}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from ramify.clients.base import Tool
from ramify.clients.model_config import Model
from ramify.engine import observation_messages, prompt_text, retool_protocol
from ramify.engine.foreign_reply_syntax import parse_any_syntax
from ramify.engine.prompt_text import ContextFacts, PromptFacts
from ramify.engine.reply_action_parsing import NATIVE_TOOLS, ParsedAction, parse_action
from ramify.errors import ConfigError, StrictKeywordsMeta
from ramify.plugins import PluginRegistry
from ramify.trained_policy_settings import (
    FILE,
    PolicyRolloutSettings,
    local_model_folder,
    read_policy_settings,
)
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Cell

_DEFAULT_SYSTEM = """\
{{task}}

{{example}}

{{notebook}}

In the session you have:
{{names}}
{{children}}
{{final}}
{{tools}}

{{models}}
{{machine}}

{{method}}

{{limits}}

{{instructions}}"""

_MINIMAL_SYSTEM = """\
Answer the question with Python. The data is in `context`. Write one code fence marked repl per message and you see its
output. `llm_query(prompt)` asks a language model. Give the answer with FINAL(value).
{{tools}}
{{limits}}
{{instructions}}"""

_RETOOL_SYSTEM = """\
You solve mathematical problems. Think step by step, and leave calculations and searches to Python: {how} What it printed \
comes back between <interpreter> and </interpreter>; variables stay from one piece of code to the next. Check your result, \
and end with the answer as \\boxed{{answer}}."""
_RETOOL_TAGS = "write code between <code> and </code>."
_RETOOL_CALLS = "call the tool code_interpreter with your code."
_RETOOL_FIRST = "{{question}}\n\nPut the final answer into \\boxed{}."

_DIRECT_SYSTEM = "Answer the question from the text that is given. Be exact and brief. If the text does not say, say so."


MARKERS = {
    "task": "what the model is asked to do, and where the data is",
    "example": "first code to run, for this kind of context",
    "notebook": "what a session keeps and shows",
    "names": "`context`, `llm_query` and `llm_query_batched`",
    "children": "`rlm_query` and `rlm_query_batched`; empty if there can be no children",
    "final": "`SubcallError`, `budget`, `FINAL`, `answer` and the rest of the session's names",
    "tools": "the user's tools; empty if there are none",
    "models": "names, sizes and prices of the models",
    "machine": "packages, files and network of the session",
    "method": "how to work, with a worked example",
    "limits": "turns, calls, tokens, dollars and seconds",
    "instructions": "the user's instructions and examples; they come last if this is missing",
}
"""Marker of a system message -> description of the text that replaces it."""
_MARKER = re.compile(r"(?<=\n\n)\{\{(\w+)\}\}\n\n|^\{\{(\w+)\}\}\n|\{\{(\w+)\}\}", re.MULTILINE)
"""Matches a marker: alone between two empty lines, alone on its line, or elsewhere."""


def _fill_marker(found: re.Match[str], filled: Mapping[str, str]) -> str:
    """Return the text that replaces a marker, such as ``{{tools}}``, in a prompt.

    A marker without text is removed together with its line. Other words in double braces remain
    unchanged.
    """
    name = found[1] or found[2] or found[3]
    if name not in filled:
        return found[0]
    return filled[name] + found[0][len(name) + 4 :] if filled[name] else ""


class Scaffold(
    msgspec.Struct, metaclass=StrictKeywordsMeta, frozen=True, forbid_unknown_fields=True
):
    """The prompts of a run, and the conventions by which the model replies and the engine
    answers."""

    name: str = "default"
    system: str = _DEFAULT_SYSTEM
    """System prompt of the root call; if empty, no system message is sent."""
    child_system: str | None = None
    """System prompt of child calls; None means the same as ``system``."""
    first: str = ""
    """First message of a call. If empty, it contains the question and the size and beginning of the
    context (``prompt_text.first_message``). Markers: ``{{question}}``, ``{{chars}}`` (characters of
    the context) and ``{{about}}`` (further text about the context)."""
    direct_system: str = _DIRECT_SYSTEM
    direct_chars: int = 32_000
    """A root context of at most this many characters is answered by one direct call without a
    session; 0 disables this."""
    max_output_chars: int = 10_000
    """Maximum characters of a cell's output that are shown to the model. Of a longer output, it
    sees the beginning and the end."""
    defer_final: bool = True
    """Defer a final answer by one turn if it came with output that the model had not seen yet."""
    max_idle: int = 3
    """Number of consecutive turns without code or answer that ends the call with ``no_code``."""
    last_word: bool = True
    """When a limit is reached, ask the model for a final answer. If False, use the best answer so
    far."""
    compact_at: float = 0.8
    """Share of the model's window at which the history is summarized and a new branch begins; 0
    disables this."""
    native_tools: bool = False
    """Also offer native tools for running code and for answering."""
    protocol: Literal["notebook", "retool"] = "notebook"
    """Format of replies and observations: that of ``reply_action_parsing.py`` or that of ``retool_protocol.py``."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply and are kept as part of it, such as ``</code>``. If a model did not
    stop there, it would continue and invent the output of its code."""
    raw_code: bool = False
    """Run each reply as one cell of code, without fences or text around it."""
    plans: bool = False
    """Let sessions import ``ramify_plans``, functions that ask many small questions at once. The
    system message says so if it lists the tools."""
    terse_chars: int = 0
    """Maximum length of an observation that contains only the cell's output. 0 gives full
    observations with notes, remaining limits and the turn count."""

    def __post_init__(self) -> None:
        if (
            self.max_output_chars < 100
            or self.max_idle < 1
            or not 0 <= self.compact_at <= 1
            or self.direct_chars < 0
        ):
            raise ConfigError(
                f"scaffold '{self.name}' has values out of range: "
                f"max_output_chars={self.max_output_chars} "
                "must be at least 100, "
                f"max_idle={self.max_idle} at least 1, compact_at={self.compact_at} from 0 to 1, "
                f"direct_chars={self.direct_chars} not negative"
            )
        if self.protocol == "notebook" and not self.raw_code:
            for field in ("system", "child_system"):
                self._check_system(field, getattr(self, field) or "")
        if self.first and "{{question}}" not in self.first:
            raise ConfigError(
                f"scaffold '{self.name}': first has no {{{{question}}}}, so the model would not "
                "learn what was asked: add the marker"
            )
        if self.terse_chars and self.terse_chars < 20:
            raise ConfigError(
                f"scaffold '{self.name}': terse_chars={self.terse_chars} is too small to show "
                "anything; give 20 or more"
            )
        if self.native_tools and self.raw_code:
            raise ConfigError(
                f"scaffold '{self.name}': raw_code makes each reply plain code: remove native_tools"
            )
        if self.protocol != "notebook" and (self.raw_code or self.terse_chars):
            raise ConfigError(
                f"scaffold '{self.name}': protocol '{self.protocol}' has its own reply format: "
                "remove raw_code and terse_chars"
            )

    def _check_system(self, field: str, text: str) -> None:
        """Raise ConfigError if a system message lacks a marker that every session needs.

        An example is ``{{limits}}``, which the limits of the run replace.
        """
        losses = {
            "tools": "which tools there are",
            "limits": "its limits",
            "final": "how to answer",
        }
        for marker, loss in losses.items():
            is_there = f"{{{{{marker}}}}}" in text or (marker == "final" and "FINAL" in text)
            if text and not is_there:
                or_name = ", or the word FINAL" if marker == "final" else ""
                raise ConfigError(
                    f"scaffold '{self.name}': {field} has no {{{{{marker}}}}}, so the model would "
                    f"not learn {loss}: add the marker{or_name}"
                )

    def system_prompt(self, facts: PromptFacts | None = None) -> str:
        """Return the system message of a call, with its markers replaced by ``facts`` about the
        run.

        Without ``facts``, the message contains nothing specific to a run.
        """
        text = self.child_system if facts and facts.depth and self.child_system else self.system
        if not text:
            return ""
        facts = PromptFacts() if facts is None else facts
        filled = prompt_text.marker_replacements(facts) if "{{" in text else {}
        added = prompt_text.user_instructions(facts.instructions, facts.examples)
        if added and "{{instructions}}" not in text:
            text = f"{text.rstrip()}\n\n{{{{instructions}}}}"
            filled["instructions"] = added
        return _MARKER.sub(lambda found: _fill_marker(found, filled), text).strip()

    def first_message(
        self, question: str, context: object, facts: ContextFacts | None = None, about: str = ""
    ) -> str:
        """Return the first message of a call, which presents the question.

        ``context`` is the value that the call's session contains.
        """
        if not self.first:
            return prompt_text.first_message(question, facts or ContextFacts(), about)
        filled = {
            "{{question}}": question,
            "{{chars}}": str(observation_messages.count_context_chars(context)),
            "{{about}}": about,
        }
        return re.sub(
            "|".join(map(re.escape, filled)), lambda marker: filled[marker[0]], self.first
        )

    def code_reply(self, code: str) -> Reply:
        """Return a reply that runs ``code``, written as a model would write it for this
        scaffold."""
        if self.protocol == "retool":
            text = f"<code>\n{code}\n</code>"
        else:
            text = code if self.raw_code else f"```repl\n{code}\n```"
        return Reply(Message("assistant", text))

    @property
    def accepts_plain_text_answer(self) -> bool:
        """True if a last message without a formal final answer may count as the answer."""
        return not self.raw_code and self.protocol == "notebook"

    @property
    def lists_tools(self) -> bool:
        """True if the system message tells the model which tools a session has.

        False if the scaffold has no system message or a fixed one, as in the prompts of ReTool.
        """
        is_frozen = self.raw_code or self.protocol != "notebook" or not self.system
        return not is_frozen and "{{tools}}" in self.system

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools that requests offer to the model through the provider's tool-calling
        API."""
        if not self.native_tools:
            return ()
        return (retool_protocol.TOOL,) if self.protocol == "retool" else NATIVE_TOOLS

    def read(self, message: Message, is_cut: bool = False) -> ParsedAction:
        """Parse a reply into code to run or a final answer.

        If ``is_cut`` is True, the reply was truncated, so its last code or answer may be
        incomplete. With ``raw_code``, the end of code is not marked, so even a truncated reply is
        run.
        """
        if self.raw_code:
            return ParsedAction(codes=(message.content,))
        if self.protocol == "retool":
            return retool_protocol.parse_reply(message, is_cut)
        action = parse_action(message, is_cut)
        return (
            action
            if action.is_in_expected_form(message.content)
            else parse_any_syntax(message, is_cut)
        )

    def report(self, cell: Cell) -> str:
        """Return the text that the model sees after a piece of its code (a cell) has run."""
        if self.protocol == "retool":
            return retool_protocol.report(cell)
        return (
            observation_messages.terse_cell_report(cell, self.terse_chars)
            if self.terse_chars
            else observation_messages.cell_report(cell)
        )


TINY = Scaffold(
    name="tiny",
    system="",
    first="{{question}}\nlen {{chars}}",
    raw_code=True,
    terse_chars=90,
    direct_chars=0,
    defer_final=False,
    last_word=False,
    compact_at=0.0,
)
"""For policies of a few hundred thousand parameters that were trained with this scaffold. The whole
reply is run as code. The prompt is the question and the length of the context."""
BARE = msgspec.structs.replace(TINY, name="bare", first="{{question}}")
"""For policies that were trained with this scaffold on questions without a context. The whole reply
is run as code. The prompt is the question alone."""
RETOOL = Scaffold(
    name="retool",
    system=_RETOOL_SYSTEM.format(how=_RETOOL_TAGS),
    first=_RETOOL_FIRST,
    protocol="retool",
    stop=("</code>",),
    max_output_chars=1024,
    max_idle=16,
    direct_chars=0,
    defer_final=False,
    last_word=False,
    compact_at=0.0,
)
"""For mathematics, with models that lack native tool calls. A reply contains thoughts, Python code
in tags, and a boxed answer."""
RETOOL_NATIVE = msgspec.structs.replace(
    RETOOL,
    name="retool_native",
    system=_RETOOL_SYSTEM.format(how=_RETOOL_CALLS),
    native_tools=True,
    stop=("</code>", "</tool_call>"),
)
"""For mathematics: thoughts, Python code in native tool calls, and a boxed answer."""
DEFAULT = Scaffold()
"""For any model that follows instructions. Code in Markdown blocks of a reply is run. The prompt
states the facts of the run."""
MINIMAL = Scaffold(name="minimal", system=_MINIMAL_SYSTEM)
"""For small models. Code in Markdown blocks of a reply is run. The instructions are as short as
possible."""
PLANS = Scaffold(name="plans", plans=True)
"""Like ``default`` and for the same models, but code may also import functions that combine plans
from ``ramify_plans``."""
_HERE = "ramify.engine.prompt_scaffold"
SCAFFOLDS = PluginRegistry(
    "scaffold",
    "ramify.scaffolds",
    {
        "default": f"{_HERE}:DEFAULT",
        "minimal": f"{_HERE}:MINIMAL",
        "plans": f"{_HERE}:PLANS",
        "tiny": f"{_HERE}:TINY",
        "bare": f"{_HERE}:BARE",
        "retool": f"{_HERE}:RETOOL",
        "retool_native": f"{_HERE}:RETOOL_NATIVE",
    },
    others="your own Scaffold, module:name or file.py:name",
)
"""Name -> scaffold."""


def scaffold_of(given: Scaffold | str | None, model: object = None) -> Scaffold:
    """Return the scaffold with the name ``given``, or ``given`` itself if it is a scaffold.

    If it is None, return the scaffold that ``model`` was trained for, or else the default. Raises
    ConfigError for an unknown name.
    """
    if isinstance(given, Scaffold):
        return given
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"scaffold is a {type(given).__name__}: give a name or a Scaffold")
    name = given or trained_scaffold_name(model) or "default"
    try:
        found = SCAFFOLDS.resolve(name)
    except ConfigError as error:
        if given is not None:
            raise
        raise ConfigError(
            f"{error}. The policy's {FILE} names it: install the package that has it, or give "
            "another scaffold"
        ) from error
    if not isinstance(found, Scaffold):
        raise ConfigError(f"scaffold '{name}' is a {type(found).__name__}, not a Scaffold")
    return found


def trained_scaffold_name(model: object) -> str | None:
    """Return the name of the scaffold that a model was trained for, or None if any scaffold works.

    ``model`` is a model name, a client, or a list whose first entry answers the root call. The
    answer comes from the checkpoint's folder, and no weights are loaded.
    """
    if isinstance(model, list | tuple) and model:
        return trained_scaffold_name(model[0])
    named = getattr(model, "scaffold", None)
    if isinstance(named, str):
        return named
    card = trained_policy_settings(model)
    # Policies from scratch were all trained with this one before folders named their scaffold.
    return TINY.name if card.scaffold is None and card.is_from_scratch else card.scaffold


def trained_policy_settings(model: object) -> PolicyRolloutSettings:
    """Return the settings from a trained policy's checkpoint folder: its scaffold and its limits.

    ``model`` is a model name, a client, or a list whose first entry answers the root call. The
    settings are empty if nothing is known about the model.
    """
    if isinstance(model, list | tuple) and model:
        return trained_policy_settings(model[0])
    if isinstance(model, Model):
        model = model.name
    if isinstance(model, str):
        folder = local_model_folder(model)
        return PolicyRolloutSettings() if folder is None else read_policy_settings(folder)
    card = getattr(model, "card", None)
    return card if isinstance(card, PolicyRolloutSettings) else PolicyRolloutSettings()
