"""What a model is told, and how it is read: prompts and conventions, as data that a user may
replace.

Markers in doubled braces are filled in, and nothing else, so that a prompt may contain any braces
it likes: ``{{tools}}`` the user's tools, ``{{limits}}`` what may be spent, ``{{children}}`` how to
start children where that is possible. In ``first`` they are ``{{question}}`` and ``{{chars}}``.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ramify.clients.base import Tool
from ramify.engine import observe, retool
from ramify.engine.action import ParsedAction, read_action
from ramify.errors import ConfigError, nearest
from ramify.inference.base import made_for
from ramify.types.message import Message
from ramify.types.trajectory import Cell

_DEFAULT_SYSTEM = """\
You answer a question about data that may be far larger than what you can read at once. The data is in the variable
`context` of a live Python session, which you drive: write code in a fence marked repl, and you will see its output.

```repl
print(type(context), len(context))
print(context[:500])
```

The session is a notebook: variables, functions and imports stay; the last expression of a cell is echoed. Long output
is cut in the middle, so print what you need. In the session you have:
- `context`: the data.
- `llm_query(prompt, model=None, schema=None)`: ask a language model that sees only your prompt, so put the text into it;
  it can read some 100,000 characters. With `schema` (a JSON schema, or a type such as list[int]) you get a checked value.
- `llm_query_batched(prompts)`: many at once, in parallel; much faster than a loop.
{{children}}- A sub-call that fails raises SubcallError: `.results` has the replies that did arrive (None where one failed),
  `.failures` the reasons by index.
- `SHOW_VARS()`, `history`, `outputs[n]` (the whole output of cell n where it was cut).
- `FINAL(value)`: give the final answer, any Python value. `FINAL_VAR("name")`: the same by variable name.
- `answer["content"] = …` keeps your best answer so far; `answer["ready"] = True` makes it final.
{{tools}}
How to work: look at the data first (size, structure, a few records). Compute with code whatever code can compute
exactly: counting, parsing, filtering, joining. Use language models for what needs reading: cut the data into pieces that
fit, ask about all pieces at once, combine the replies in code, and check them. Do not guess, and do not answer before you
have seen the evidence. Then give the final answer with FINAL(…), in a cell of its own once you have seen what it rests on.
{{limits}}"""

_CHILDREN = """\
- `rlm_query(prompt, context=None, model=None)`: start a child like you with its own session; its `context` is the one
  you give (by default yours). For parts that need several steps themselves. Returns its answer as a Python value.
- `rlm_query_batched(prompts, contexts=None)`: many children at once.
"""

_MINIMAL_SYSTEM = """\
Answer the question with Python. The data is in `context`. Write one code fence marked repl per message and you see its
output. `llm_query(prompt)` asks a language model. Give the answer with FINAL(value).
{{tools}}"""

_RETOOL_SYSTEM = """\
You solve mathematical problems. Think step by step, and leave calculations and searches to Python: {how} What it printed \
comes back between <interpreter> and </interpreter>; variables stay from one piece of code to the next. Check your result, \
and end with the answer as \\boxed{{answer}}."""
_RETOOL_TAGS = "write code between <code> and </code>."
_RETOOL_CALLS = "call the tool code_interpreter with your code."
_RETOOL_FIRST = "{{question}}\n\nPut the final answer into \\boxed{}."

_DIRECT_SYSTEM = "Answer the question from the text that is given. Be exact and brief. If the text does not say, say so."


class Scaffold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts and conventions of a run."""

    name: str = "default"
    system: str = _DEFAULT_SYSTEM
    """Empty: there is no system message."""
    child_system: str | None = None
    """For children; None: the same as ``system``."""
    first: str = ""
    """The first message of a call; empty: question, size and beginning of the context
    (``observe.first_message``). Its markers: ``{{question}}``, ``{{chars}}`` of the context,
    ``{{about}}`` what the user pointed at."""
    direct_system: str = _DIRECT_SYSTEM
    direct_chars: int = 32_000
    """A root context of at most this many characters is answered by one direct call, without a
    session; 0 is never."""
    max_output_chars: int = 10_000
    """Of a cell's output shown to the model, head and tail."""
    defer_final: bool = True
    """Put a final answer off by one turn where it came together with output that the model had not
    seen."""
    max_idle: int = 2
    """Turns in a row without code or answer after which the call ends with ``no_code``."""
    last_word: bool = True
    """Ask for the answer with what there is where a limit is reached; otherwise the best so far is
    the answer."""
    compact_at: float = 0.8
    """Share of the model's window at which the history is summarised and a new branch begins; 0 is
    never."""
    native_tools: bool = False
    """Also offer running code and answering as native tools."""
    protocol: Literal["notebook", "retool"] = "notebook"
    """How replies are read and answered: as ``action.py`` has it, or as ``retool.py`` has."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply and belong to it, as ``</code>``: a model that went on would invent
    what came back."""
    raw_code: bool = False
    """A reply is one cell of code as it stands, without fences or words around it."""
    terse_chars: int = 0
    """Longest observation that is what a cell gave and nothing else; 0: observations are whole,
    with notes, what is left of limits, and the count of turns."""

    def __post_init__(self) -> None:
        if (
            self.max_output_chars < 100
            or self.max_idle < 1
            or not 0 <= self.compact_at <= 1
            or self.direct_chars < 0
        ):
            raise ConfigError(
                f"scaffold '{self.name}' is out of range: max_output_chars={self.max_output_chars} "
                "must be at least 100, "
                f"max_idle={self.max_idle} at least 1, compact_at={self.compact_at} from 0 to 1, "
                f"direct_chars={self.direct_chars} not negative"
            )
        if self.terse_chars and self.terse_chars < 20:
            raise ConfigError(
                f"scaffold '{self.name}': terse_chars={self.terse_chars} shows nothing; give 20 or "
                "more"
            )
        if self.native_tools and self.raw_code:
            raise ConfigError(
                f"scaffold '{self.name}': with raw_code a reply is code, so leave native_tools out"
            )
        if self.protocol != "notebook" and (self.raw_code or self.terse_chars):
            raise ConfigError(
                f"scaffold '{self.name}': protocol '{self.protocol}' has its own form: leave "
                "raw_code and terse_chars out"
            )

    def system_prompt(self, *, depth: int, children: bool, tools: str, limits: str) -> str:
        text = self.system if depth == 0 or self.child_system is None else self.child_system
        filled = {
            "{{children}}": _CHILDREN if children else "",
            "{{tools}}": tools,
            "{{limits}}": limits,
        }
        for marker, value in filled.items():
            text = text.replace(marker, value)
        return text.strip()

    def first_message(
        self, question: str, context: object, description: str = "", about: str = ""
    ) -> str:
        """What a call is told first. ``context`` is the value that its session gets."""
        if not self.first:
            return observe.first_message(question, description, about)
        filled = {
            "{{question}}": question,
            "{{chars}}": str(observe.chars_of(context)),
            "{{about}}": about,
        }
        return re.sub("|".join(map(re.escape, filled)), lambda found: filled[found[0]], self.first)

    @property
    def takes_words(self) -> bool:
        """Whether at the end what was said last is the answer, where none was given in its form."""
        return not self.raw_code and self.protocol == "notebook"

    def tools(self, usual: tuple[Tool, ...] = ()) -> tuple[Tool, ...]:
        """What is offered natively; ``usual`` are those of the notebook."""
        if not self.native_tools:
            return ()
        return (retool.TOOL,) if self.protocol == "retool" else usual

    def read(self, message: Message, is_cut: bool = False) -> ParsedAction:
        """What a reply asks for; ``is_cut`` if it ended at its limit, so that its last code or
        answer may be half of one. With ``raw_code`` nothing says where code ends, so that a cut
        reply is run as it is."""
        if self.raw_code:
            return ParsedAction(codes=(message.content,))
        return (
            retool.read(message, is_cut)
            if self.protocol == "retool"
            else read_action(message, is_cut)
        )

    def report(self, cell: Cell) -> str:
        """What is shown of one execution."""
        if self.protocol == "retool":
            return retool.report(cell)
        return (
            observe.terse(cell, self.terse_chars) if self.terse_chars else observe.cell_report(cell)
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
"""For policies of a few hundred thousand parameters: as few tokens as will do, nothing that needs
reading."""
BARE = msgspec.structs.replace(TINY, name="bare", first="{{question}}")
"""The same for questions without a context: the question, and not a word more."""
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
"""Mathematics with a Python tool, in tags, for models without native calls."""
RETOOL_NATIVE = msgspec.structs.replace(
    RETOOL,
    name="retool_native",
    system=_RETOOL_SYSTEM.format(how=_RETOOL_CALLS),
    native_tools=True,
    stop=("</code>", "</tool_call>"),
)
"""The same by native calls."""
SCAFFOLDS = {
    each.name: each
    for each in (
        Scaffold(),
        Scaffold(name="minimal", system=_MINIMAL_SYSTEM),
        TINY,
        BARE,
        RETOOL,
        RETOOL_NATIVE,
    )
}


def scaffold_of(given: Scaffold | str | None, model: object = None) -> Scaffold:
    """A scaffold by name, as it is, or else the one that ``model`` (a name, a client or a list of
    them) was made for."""
    if isinstance(given, Scaffold):
        return given
    given = given or made_for(model) or "default"
    if given not in SCAFFOLDS:
        raise ConfigError(
            f"unknown scaffold '{given}': {nearest(given, SCAFFOLDS)}; or give a Scaffold of your "
            "own"
        )
    return SCAFFOLDS[given]
