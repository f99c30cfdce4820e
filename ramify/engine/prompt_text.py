"""Define the facts that a session's prompt can state, and the sentences that state them.

    PromptFacts ──> sections() ──> {"task": …, "example": …, "models": …}  ──> Scaffold.system
    ContextFacts ──> first_message(): the question, and the context's size, shape, head and tail

A sentence appears only if it is true of this run, and every example runs in its session. The system
message is ASCII as long as its facts are, because its bytes are counted at each turn. This module
decides the words, the order of facts and the sizes in the examples. The facts are gathered by
``prompt_facts.py``, the markers in a system message are defined in ``prompt_scaffold.py``, and the
messages after a turn are written by ``observation_messages.py``.

The texts of this file are part of the models' behavior. ``benchmarks/prompts.py`` measures them:
scripted readers do exactly what they show and say.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.clients.base import Price
from ramify.errors import ConfigError, did_you_mean
from ramify.sandbox.base import BufferNdArray, Table, is_file_backed
from ramify.sandbox.guest.mapped_text import MAX_SLICE_CHARS, FileBackedText
from ramify.types.picture import MAX_PICTURES

ContextKind = Literal[
    "none",
    "text",
    "list",
    "dict",
    "folder",
    "rows",
    "tables",
    "table",
    "frame",
    "array",
    "database",
    "conversation",
    "value",
]
"""Kind of a context. ``table`` is a ``Table``, ``frame`` a table that is a DataFrame in the
session, and ``array`` an array of numbers."""

CHARS_PER_TOKEN = 3
"""Characters per token, rounded down so that the estimate is safe for any common language."""
_TYPICAL_CHARS = 4
"""Characters per token in English text, for figures that are marked as estimates."""
_PART_CHARS = 50_000
"""Maximum characters of a text part in the prompt's worked example. Models read larger parts less
carefully."""
_HEAD_CHARS = 300
_TAIL_CHARS = 200
_NUM_NAMES = 8
_NUM_CHECKED = 1_000
"""Maximum number of dictionary keys that are tested for looking like file names."""
_NUM_KEYS = 12
_NUM_COLUMNS = 40
_NUM_ROWS = 3
_MANY_ITEMS = 10_000
"""Lists longer than this are not inspected item by item."""
_FILE_NAME = re.compile(r"[^\n]*[^\s/]\.[A-Za-z]\w{0,7}|[^\n/]+(/[^\n/]+)+")
_TABLE = (
    "`len({0})`, `{0}.types`, `{0}['name']` (a column, a sequence), `{0}[i]` (a dict), `{0}[i:j]` "
    "(a Table); iterating gives dicts, `{0}.rows()` tuples."
)
"""Description of what code in a session can do with a table."""
_DATABASE = "SQLite database "
"""Prefix of the text that ``sources/sqlite.py`` puts in place of a database. It identifies a
context as a database."""


# --- facts ----------------------------------------------------------------------------------------


class ContextFacts(msgspec.Struct, frozen=True):
    """Facts about the context of one call, such as its type, size and structure."""

    kind: ContextKind = "none"
    chars: int = 0
    """Total characters of all texts in the context."""
    shape: str = ""
    """Type, size and structure, as the end of a sentence that begins "`context` is"."""
    databases: tuple[str, ...] = ()
    """Names of the databases in queries of the tool ``sql``; empty if there is only one."""
    type: str = "str"
    """Name of the context's Python type."""
    bytes_per_char: float = 1.0
    """Mean UTF-8 bytes per character. Non-Latin scripts take more tokens per character."""
    mapped: bool = False
    """True if some texts of the context are file-backed (``FileBackedText``)."""


class PromptModelFacts(msgspec.Struct, frozen=True):
    """The facts about one model of a run that a prompt states, such as its name, price and roles.

    They include the sizes that it can read and write.
    """

    alias: str
    """Short name that ``model=`` accepts."""
    chars: int
    """Maximum characters of a prompt that fits the window and the budget, with room for a reply."""
    reply_tokens: int
    """Maximum tokens of a reply, without hidden reasoning."""
    price: Price | None = None
    vision: bool | None = None
    """Whether the model reads images; None if unknown."""
    roles: tuple[str, ...] = ()
    """Roles of the model in this call: "you", "`llm_query`", "your children". Empty for a model
    that is only used by name."""


class BudgetFacts(msgspec.Struct, frozen=True):
    """The limits stated in a call's prompt, as of the start of the call."""

    turns: int = 30
    """Maximum number of turns of this call; each message of the model is one turn."""
    calls: int = 1000
    tokens: int = 20_000_000
    dollars: float = math.inf
    """Dollar limit; infinite if no model has a price and no limit was given."""
    seconds: float = 1800.0
    max_depth: int = 1
    max_children: int = 64
    """Maximum children of one call that run at once."""


class PromptExample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An example for the prompt: a question and the answer that the user wants."""

    question: str
    answer: Any


class MountedPath(msgspec.Struct, frozen=True):
    """One of the user's files or folders that code in the session can read."""

    path: str
    """Path of the file or folder inside the session."""
    is_folder: bool


class PromptFacts(msgspec.Struct, frozen=True):
    """All facts that the system message of one call may state."""

    depth: int = 0
    context: ContextFacts = ContextFacts()
    has_pictures: bool = False
    """True if the session has pictures, and a model of the run may read them."""
    models: tuple[PromptModelFacts, ...] = ()
    budget: BudgetFacts | None = None
    children: bool = False
    """True if the call may start children."""
    tools: str = ""
    """Description of the tools, one line each; see ``ToolSet.describe``."""
    tool_names: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    mounts: tuple[MountedPath, ...] = ()
    has_network: bool = True
    """False only if the sandbox is known to isolate the network."""
    full_python: bool = True
    output_chars: int = 10_000
    """Maximum characters of a cell's output that the model sees."""
    instructions: str = ""
    examples: tuple[PromptExample, ...] = ()

    def model_for_role(self, role: str) -> PromptModelFacts | None:
        return next((model for model in self.models if role in model.roles), None)


def parse_prompt_examples(given: object) -> tuple[PromptExample, ...]:
    """Convert the user's examples to ``PromptExample`` objects.

    Each one may be a pair, a dict or a ``PromptExample``. Raises ConfigError for an example without
    a question or an answer.
    """
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(
            f"examples is a {type(given).__name__}: give a list of (question, answer) pairs"
        )
    return tuple(_example(item, number) for number, item in enumerate(given, 1))


def _example(item: object, number: int) -> PromptExample:
    if isinstance(item, Mapping):
        for name in item:
            if name not in PromptExample.__struct_fields__:
                remedy = did_you_mean(str(name), PromptExample.__struct_fields__)
                raise ConfigError(f"example {number}: unknown field '{name}': {remedy}")
        item = (item.get("question"), item.get("answer"))
    elif isinstance(item, PromptExample):
        item = (item.question, item.answer)
    pair = tuple(item) if isinstance(item, list | tuple) else (item,)
    if len(pair) > 2:
        raise ConfigError(f"example {number} has {len(pair)} parts: give a question and its answer")
    question, answer = (*pair, None, None)[:2]
    for name, value in (("question", question), ("answer", answer)):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise ConfigError(f"example {number} has no {name}: give a question and its answer")
    if not isinstance(question, str):
        raise ConfigError(
            f"example {number}: the question is a {type(question).__name__}: give a text"
        )
    return PromptExample(question, answer)


# --- the context ----------------------------------------------------------------------------------


def context_facts(
    value: Any,
    chars: int,
    num_bytes: int = 0,
    tools: Collection[str] = (),
    packages: Collection[str] = (),
) -> ContextFacts:
    """Return facts about the context ``value``, which has ``chars`` characters of text in
    ``num_bytes`` bytes.

    The session's tools and packages matter: ``sql`` queries a database, and a table becomes a
    DataFrame if pandas is available.
    """
    if value is None:
        return ContextFacts()
    density = min(4.0, max(1.0, round(num_bytes / max(chars, 1), 1))) if chars >= 1000 else 1.0
    if isinstance(value, Table | BufferNdArray):
        return _facts_of_values(value, chars, packages)
    kind = _kind_of(value, "sql" in tools)
    databases: tuple[str, ...] = ()
    if kind == "database" and isinstance(value, Mapping):
        names = [name for name, text in value.items() if _is_database(text)]
        databases = tuple(names) if len(names) > 1 else ()
    shape = _shape(kind, value, chars, density)
    if isinstance(value, Mapping) and any(isinstance(each, Table) for each in value.values()):
        is_frame = "pandas" in packages
        how = "A table is a pandas DataFrame." if is_frame else f"A table is a Table. {_TABLE}"
        shape += "\n" + how.format("t")
    mapped = is_file_backed(value)
    return ContextFacts(kind, chars, shape, databases, type(value).__name__, density, mapped)


def _facts_of_values(
    value: Table | BufferNdArray, chars: int, packages: Collection[str]
) -> ContextFacts:
    if isinstance(value, BufferNdArray):
        is_numpy = "numpy" in packages or "pandas" in packages
        name = "numpy.ndarray" if is_numpy else "BufferNdArray"
        shape = f"a {name} of {value.dtype} with the shape {value.shape}. "
        if not is_numpy:
            shape += (
                "`context[i]` and `context[i, j]` are its numbers or parts, `context[i:j]` is an "
                "array, `context.tolist()` is a list; it has no arithmetic. "
            )
        return ContextFacts(
            "array", chars, f"{shape}It begins:\n{_first_numbers(value)}", type=name
        )
    is_frame = "pandas" in packages
    name = "pandas DataFrame" if is_frame else "Table"
    shape = (
        f"a {name} of {counted_noun(len(value), 'row')} and "
        f"{counted_noun(len(value.columns), 'column')}: {_columns(value)}."
    )
    if not is_frame:
        shape += f" {_TABLE.format('context')}"
    rows = "\n".join(_short_repr(row) for row in value.rows(0, _NUM_ROWS))
    shape += f" The first rows:\n{rows}" if rows else ""
    return ContextFacts("frame" if is_frame else "table", chars, shape, type=name)


def _columns(table: Table) -> str:
    names = [f"{_short_repr(name, 60)} ({kind})" for name, kind in table.types.items()]
    return ", ".join(names[:_NUM_COLUMNS]) + (", …" if len(names) > _NUM_COLUMNS else "")


def _first_numbers(array: BufferNdArray) -> str:
    while len(array.shape) > 1 and len(array):
        array = array[0]
    return _short_repr(array[:_NUM_KEYS].tolist())


def _is_database(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_DATABASE)


def _kind_of(value: Any, has_sql: bool) -> ContextKind:
    if isinstance(value, FileBackedText):
        return "text"
    if isinstance(value, str):
        return "database" if has_sql and _is_database(value) else "text"
    if isinstance(value, Mapping):
        return _kind_of_dict(value, has_sql)
    if not isinstance(value, list | tuple):
        return "value"
    if value and len(value) <= _MANY_ITEMS and all(isinstance(item, Mapping) for item in value):
        if all("role" in item and "content" in item for item in value):
            return "conversation"
        if value[0] and all(item.keys() == value[0].keys() for item in value):
            return "rows"
    return "list"


def _kind_of_dict(value: Mapping[Any, Any], has_sql: bool) -> ContextKind:
    if not value:
        return "dict"
    if has_sql and any(map(_is_database, value.values())):
        return "database"
    if all(isinstance(item, str | FileBackedText) for item in value.values()):
        names = itertools.islice(value, _NUM_CHECKED)
        are_files = all(isinstance(name, str) and _FILE_NAME.fullmatch(name) for name in names)
        return "folder" if are_files else "dict"
    if all(isinstance(item, list | tuple) for item in value.values()):
        is_table = (_kind_of(rows, False) == "rows" for rows in value.values())
        return "tables" if all(is_table) else "dict"
    return "dict"


def _shape(kind: ContextKind, value: Any, chars: int, density: float) -> str:
    tokens = max(1, int(chars * density / _TYPICAL_CHARS))
    size = f"{counted_noun(chars, 'character')} (about {counted_noun(tokens, 'token')})"
    if isinstance(value, str | FileBackedText):
        num_lines = value.count("\n") + (not value.endswith("\n"))
        lines = counted_noun(num_lines, "line")
        return f"a {type(value).__name__} of {size}, in {lines}. {_describe_ends(value)}"
    if isinstance(value, Mapping):
        return _shape_of_dict(kind, value, size)
    if isinstance(value, list | tuple):
        return _shape_of_list(kind, value, size)
    return f"a value of type {type(value).__name__}: {_short_repr(value)}"


def _describe_ends(text: str | FileBackedText) -> str:
    if len(text) <= _HEAD_CHARS + _TAIL_CHARS:
        return f"All of it:\n{text!r}"
    return f"It begins:\n{text[:_HEAD_CHARS]!r}\nIt ends:\n{text[-_TAIL_CHARS:]!r}"


def _shape_of_dict(kind: ContextKind, value: Mapping[Any, Any], size: str) -> str:
    what = {"folder": "file", "tables": "table"}.get(kind, "entry")
    entries = list(value.items())[:_NUM_NAMES]
    names = ", ".join(f"{_short_repr(key, 120)} ({_size_of_entry(item)})" for key, item in entries)
    more = f", … ({len(value) - _NUM_NAMES:,} more)" if len(value) > _NUM_NAMES else ""
    keys = {
        "folder": "from file name to text",
        "tables": "from table name to rows, each row a dict",
    }.get(kind)
    head = f"a dict {keys}: " if keys else "a dict of "
    text = f"{head}{counted_noun(len(value), what)}, {size} in all: {names}{more}"
    first = next(iter(value.values()), None)
    return f"{text}\nThe first begins:\n{_short_repr(first)}" if value else text


def _size_of_entry(item: Any) -> str:
    if isinstance(item, str | FileBackedText):
        return counted_noun(len(item), "character")
    if isinstance(item, list | tuple) and item and isinstance(item[0], Mapping):
        return f"{counted_noun(len(item), 'row')}: {_keys(item[0])}"
    if isinstance(item, Table):
        return f"a table of {counted_noun(len(item), 'row')}: {_columns(item)}"
    return type(item).__name__


def _keys(row: Mapping[Any, Any]) -> str:
    names = [_short_repr(key, 60) for key in list(row)[:_NUM_KEYS]]
    return ", ".join(names) + (", …" if len(row) > _NUM_KEYS else "")


def _shape_of_list(kind: ContextKind, value: Sequence[Any], size: str) -> str:
    name = type(value).__name__
    if kind == "conversation":
        roles = [str(item["role"]) for item in value]
        counts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        messages = counted_noun(len(value), "message")
        what = f"a {name} of {messages} ({counts}), oldest first, each a dict with 'role' and "
        what += f"'content', {size} in all"
    elif kind == "rows":
        keys = _keys(value[0])
        what = (
            f"a {name} of {counted_noun(len(value), 'row')}, each a dict with {keys}, {size} in all"
        )
    else:
        what = f"a {name} of {counted_noun(len(value), 'item')}{_items(value)}, {size} in all"
    if not value:
        return what
    last = f"\nThe last:\n{_short_repr(value[-1], _TAIL_CHARS)}" if len(value) > 1 else ""
    return f"{what}. The first:\n{_short_repr(value[0])}{last}"


def _items(value: Sequence[Any]) -> str:
    """Describe the types and lengths of a list's items for the prompt.

    Return an empty string if the list is empty or too long to be inspected quickly.
    """
    if not value or len(value) > _MANY_ITEMS:
        return ""
    types = list(dict.fromkeys(type(item).__name__ for item in value))
    if len(types) > 1:
        return f" ({', '.join(types[:4])}{', …' if len(types) > 4 else ''})"
    if types == ["str"]:
        low, high = min(map(len, value)), max(map(len, value))
        lengths = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f", each a str of {lengths} characters"
    return f", each of type {types[0]}"


def _short_repr(item: Any, most: int = _HEAD_CHARS) -> str:
    # A long text is cut before its repr is taken, which would copy all of it.
    text = repr(item[: most + 1] if isinstance(item, str | bytes | FileBackedText) else item)
    return text if len(text) <= most + 2 else text[:most] + "…"


def counted_noun(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural, such as ``2,000 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"


def first_message(question: str, context: ContextFacts, about: str = "") -> str:
    """Return the first message of a call, which states the question and describes the context."""
    parts = [f"Question: {question}"]
    if context.kind != "none":
        parts.append(f"`context` is {context.shape}")
    return "\n\n".join([*parts, *([about] if about else [])])


# --- the system message ---------------------------------------------------------------------------


def marker_replacements(facts: PromptFacts) -> dict[str, str]:
    """Return the text that replaces each marker, such as ``{{tools}}``, in a system message.

    A marker that does not apply to this run gets an empty string.
    """
    return {
        "task": _task_section(facts),
        "example": repl_code_block(inspection_example(facts)),
        "notebook": _notebook_section(facts),
        "names": _names_section(facts),
        "children": _children_section(facts),
        "final": _final_section(facts),
        "tools": facts.tools.rstrip("\n"),
        "models": _models_section(facts),
        "machine": _machine_section(facts),
        "method": _method_section(facts),
        "limits": _limits_section(facts),
        "instructions": user_instructions(facts.instructions, facts.examples),
    }


def _task_section(facts: PromptFacts) -> str:
    what = "a question" if facts.depth == 0 else "one part of a larger question"
    if facts.context.kind == "none":
        return (
            f"You answer {what} with the help of a live Python session, which you drive: write "
            "code in a fence marked repl, and the next message shows its output:"
        )
    return (
        f"You answer {what} about data that may be far larger than what you can read at once. The "
        "data is the variable `context` of a live Python session, which you drive: write code in a "
        "fence marked repl, and the next message shows its output:"
    )


def repl_code_block(code: str) -> str:
    return f"```repl\n{code}\n```"


def inspection_example(facts: PromptFacts) -> str:
    """Return the first code example of the prompt, which inspects a context of the given kind."""
    context = facts.context
    match context.kind:
        case "none":
            if facts.mounts:
                return _look_at(facts.mounts[0])
            return "import math\nmath.comb(52, 5)"
        case "text":
            return "print(len(context))\nprint(context[:500])"
        case "list":
            return "print(len(context))\nfor item in context[:3]:\n    print(str(item)[:300])"
        case "dict":
            shown = "repr" if context.mapped else "str"
            return (
                "for key, value in list(context.items())[:10]:\n"
                f"    print(repr(key), type(value).__name__, {shown}(value)[:100])"
            )
        case "folder":
            return (
                "for name, text in list(context.items())[:10]:\n"
                "    print(name, len(text), repr(text[:100]))"
            )
        case "rows":
            return "print(len(context), list(context[0]))\nfor row in context[:3]:\n    print(row)"
        case "tables":
            return (
                "for name, rows in list(context.items())[:10]:\n"
                "    print(name, len(rows), rows[:2])"
            )
        case "table":
            return "print(len(context), context.types)\nfor row in context[:3]:\n    print(row)"
        case "frame":
            return "print(context.shape)\nprint(context.dtypes)\nprint(context.head(3))"
        case "array":
            return "print(context.shape, context.dtype)\nprint(context[:3])"
        case "database":
            db = f", db={context.databases[0]!r}" if context.databases else ""
            shown = "context" if context.type == "str" else "str(context)"
            return f'print({shown}[:1000])\nprint(sql("SELECT name FROM sqlite_master"{db}))'
        case "conversation":
            return (
                "for message in context[-3:]:\n"
                '    print(message["role"], str(message["content"])[:300])'
            )
        case "value":
            return "print(type(context))\nprint(str(context)[:500])"


def _look_at(mount: MountedPath) -> str:
    if mount.is_folder:
        return f"import os\nprint(sorted(os.listdir({mount.path!r}))[:20])"
    return f'print(open({mount.path!r}, "rb").read(500))'


def _notebook_section(facts: PromptFacts) -> str:
    return (
        "The session is a notebook: variables, functions and imports stay; the last expression of "
        f"a cell is shown. You see at most {facts.output_chars:,} characters of a cell's output, "
        "its head and tail; if it was longer, `outputs[n]` has all of what cell n printed."
    )


def _names_section(facts: PromptFacts) -> str:
    sub = facts.model_for_role("`llm_query`")
    has_choice = len(facts.models) > 1
    most = f", at most {sub.chars:,} characters" if sub is not None else ""
    # A model that sees images might be asked to look at one.
    is_blind = any(model.vision for model in facts.models) and not facts.has_pictures
    most += ", no images" if is_blind else ""
    images = ", images=None" * facts.has_pictures
    lines = [
        f"- `llm_query(prompt{', model=None' * has_choice}, schema=None{images})`: ask a language "
        f"model, which sees only `prompt`, so put the text into it{most}. Returns its text or, "
        "with a `schema` (a type such as list[int], or a JSON schema), a checked value.",
        "- `llm_query_batched(prompts)`: many prompts at once, in parallel, which is much faster "
        "than a loop. Returns the replies in order.",
    ]
    if facts.has_pictures:
        lines.append(
            "- Pictures: a value such as {'picture': '…', 'name': 'chart.png', …} stands for a "
            f"picture. `llm_query(prompt, images=[value])` shows up to {MAX_PICTURES} of them, or "
            "of the bytes of PNG, JPEG or WebP files, to the model; `llm_query_batched(prompts, "
            "images=[[value], …])` takes one list for each prompt. You see a picture only in this "
            "way."
        )
    if facts.context.kind != "none":
        lines.insert(
            0,
            f"- `context`: the data, a {facts.context.type}.{_mapped_text_section(facts.context)}",
        )
    return "\n".join(lines)


def _mapped_text_section(context: ContextFacts) -> str:
    """Return the prompt's note on the string operations that a memory-mapped text supports.

    Empty if the context has no such text.
    """
    if not context.mapped:
        return ""
    what = "It" if context.kind == "text" else "A large text in it is a FileBackedText: it"
    text = "context" if context.kind == "text" else "text"
    return (
        f" {what} stays in its file and has of a str: len, slices (each a str), `in`, find, rfind, "
        f"index, count, startswith, endswith. `{text}.splitlines()` has a length, indices and "
        f"slices, and a loop over it reads line by line. Instead of re.findall(pattern, {text}): "
        f"`{text}.findall(pattern)`, `{text}.finditer(pattern)`, `{text}.search(pattern)`. Nothing "
        f"else works on all of it: take slices, of at most {MAX_SLICE_CHARS:,} characters."
    )


def _children_section(facts: PromptFacts) -> str:
    if not facts.children:
        return ""
    budget = facts.budget or BudgetFacts()
    below = budget.max_depth - facts.depth - 1
    depth = " They can start children, too." if below > 0 else " They cannot start children."
    has_context = facts.context.kind != "none"
    given = (
        "`prompt` is its question; its `context` is the value that you give, by default yours"
        if has_context
        else "`prompt` is its question"
    )
    return (
        f"- `rlm_query(prompt{', context=None' * has_context})`: ask a child like you, with its "
        f"own session and turns, for a part that needs several steps. {given}. Returns its answer, "
        "a Python value.\n"
        f"- `rlm_query_batched(prompts{', contexts=None' * has_context})`: many children, "
        f"{budget.max_children:,} at once.{depth}"
    )


def _final_section(facts: PromptFacts) -> str:
    left = "`budget()`: what is left of your limits. " if "budget" not in facts.tool_names else ""
    return (
        "- SubcallError is raised if calls fail: `.results` has the replies that did arrive (None "
        "where one failed), `.failures` the reasons by index.\n"
        f"- {left}`SHOW_VARS()`: your variables. `history`: the messages so far.\n"
        '- `FINAL(value)`: give the final answer, any Python value. `FINAL_VAR("name")`: the same '
        "by variable name.\n"
        '- `answer["content"] = value` keeps your best answer so far; '
        '`answer["ready"] = True` makes it final.'
    )


def _models_section(facts: PromptFacts) -> str:
    if not facts.models:
        return ""
    if len(facts.models) == 1:
        (model,) = facts.models
        return f"`llm_query` asks {model.alias}, the model that you are: it {_model_size(model)}."
    lines = [f'- "{model.alias}" ({_role(model)}): {_model_size(model)}' for model in facts.models]
    return "\n".join(["Models, by the names that `model=` accepts:", *lines])


def _role(model: PromptModelFacts) -> str:
    return " and ".join(model.roles) if model.roles else "only by name"


def _model_size(model: PromptModelFacts) -> str:
    text = f"reads {model.chars:,} characters and writes {model.reply_tokens:,} tokens at most"
    price = model.price
    if price is None or not (price.input or price.output):
        return text
    return f"{text}, ${price.input:g} in and ${price.output:g} out per million tokens"


def _machine_section(facts: PromptFacts) -> str:
    packages = f", and {', '.join(facts.packages)}" if facts.packages else ""
    texts = [
        f"You can import Python's standard library{packages}."
        if facts.full_python
        else "The interpreter knows a part of Python and few modules of its standard library."
    ]
    if facts.mounts:
        paths = ", ".join(mount.path for mount in facts.mounts)
        texts.append(f"Files of the user that you can read: {paths}.")
    if not facts.has_network:
        texts.append("There is no network.")
    return " ".join(texts)


def _method_section(facts: PromptFacts) -> str:
    if facts.context.kind == "none":
        return (
            "How to work: compute with code whatever code can compute exactly, and check the "
            "result in a second way. Use language models for what needs reading or judging. Then "
            "give the final answer with FINAL(value)."
        )
    text = (
        "How to work: look at the data first (size, structure, a few records). Compute with code "
        "whatever code can compute exactly: counting, parsing, filtering, joining. Use language "
        "models for what needs reading"
    )
    example = batch_example(facts)
    text += (
        f": cut the data into parts, ask about all parts at once, combine in code:\n\n"
        f"{repl_code_block(example)}\n\n"
        if example
        else ". "
    )
    return (
        f"{text}Check before you answer: a quote must be in the data, numbers must add up, and a "
        "second way must give the same. Do not guess. Give the final answer with FINAL(value), in "
        "a cell of its own, once you have seen what it rests on."
    )


class _Parts(NamedTuple):
    """The size and number of the parts into which the prompt's example code splits the context."""

    size: int
    """Characters per part."""
    most: int | None
    """Maximum number of parts to ask about; None if the budget covers all of them."""


def _choose_parts(facts: PromptFacts) -> _Parts | None:
    """Choose the size and number of parts for the example code in the prompt.

    The model behind ``llm_query`` must be able to read a part, and the budget must cover all of
    them. Return None if that is impossible.
    """
    sub, budget = facts.model_for_role("`llm_query`"), facts.budget
    if sub is None or budget is None or sub.chars < 2000:
        return None
    size = round_down_to_two_digits(min(_PART_CHARS, sub.chars * 4 // 5))
    num = math.ceil(facts.context.chars * 1.1 / size)
    # A request reserves a token for each byte, and a reply.
    tokens_each = size + sub.reply_tokens
    price = sub.price or Price(0.0, 0.0)
    dollars_each = (size / CHARS_PER_TOKEN * price.input + sub.reply_tokens * price.output) / 1e6
    most = min(budget.calls // 2, 3 * budget.tokens // 4 // tokens_each, 10_000)
    if math.isfinite(budget.dollars) and dollars_each:
        most = min(most, int(0.75 * budget.dollars / dollars_each))
    if most < 1:
        return None
    return _Parts(size, None if num <= most else min(most, 100))


def round_down_to_two_digits(number: int) -> int:
    """Round a number down to two significant digits: 23,456 becomes 23,000."""
    unit: int = 10 ** max(0, len(str(number)) - 2)
    return number // unit * unit


_TEXTS: dict[ContextKind, str] = {
    "text": "",
    "list": 'text = "\\n".join(map(str, context))',
    "rows": 'text = "\\n".join(map(str, context))',
    "table": 'text = "\\n".join(map(str, context.rows()))',
    "frame": 'text = "\\n".join(map(str, context.itertuples(index=False, name=None)))',
    "array": "text = str(context.tolist())",
    "value": "text = str(context)",
    "dict": 'text = "\\n".join(f"== {key} ==\\n{value}" for key, value in context.items())',
    "folder": 'text = "\\n".join(f"== {name} ==\\n{text}" for name, text in context.items())',
    "tables": 'text = "\\n".join(f"{name}: {row}" for name in context for row in context[name])',
    "conversation": (
        "text = \"\\n\".join(f\"{each['role']}: {each['content']}\" for each in context)"
    ),
}
"""Kind of context -> code that turns the context into one text; empty if it already is one."""


def batch_example(facts: PromptFacts) -> str:
    """Return the worked example of the prompt, or an empty string if no part size fits the budget.

    The example's code splits the context into parts, asks about all parts at once and combines the
    replies.
    """
    parts = _choose_parts(facts)
    if parts is None:
        return ""
    context = facts.context
    if context.mapped:
        return "\n".join([f"size = {parts.size}", *_mapped_parts(context, parts), *_COMBINE])
    if context.kind == "database":
        db = f", db={context.databases[0]!r}" if context.databases else ""
        made = f'text = "\\n".join(map(str, sql("SELECT * FROM sqlite_master"{db})))'
    else:
        made = _TEXTS[context.kind]
    name = "text" if made else "context"
    lines = [
        *([made] if made else []),
        f"size = {parts.size}",
        f"parts = [{name}[i:i + size] for i in range(0, len({name}), size)]",
    ]
    if parts.most is not None:
        lines.append(f'parts = [part for part in parts if "a word" in part][:{parts.most}]')
    return "\n".join([*lines, *_COMBINE])


_COMBINE = (
    'task = "Quote what this text says about X, or reply NONE."',
    'replies = llm_query_batched([f"{task}\\n\\n{part}" for part in parts])',
    'found = [reply for reply in replies if reply.strip() != "NONE"]',
    "print(len(parts), len(found), found[:5])",
)
"""Last lines of the worked example, which ask about ``parts``."""


def _mapped_parts(context: ContextFacts, parts: _Parts) -> list[str]:
    """Return example code that cuts parts around each match of a word out of memory-mapped text.

    The texts that are searched may be larger than memory.
    """
    most = parts.most or 100
    if context.kind == "text":
        return [
            "parts = []",
            'for match in context.finditer("a word"):',
            "    start = max(0, match.start() - size // 2)",
            "    parts.append(context[start:start + size])",
            f"    if len(parts) == {most}:",
            "        break",
        ]
    return [
        "parts = []",
        "for name, text in context.items():",
        '    place = text.find("a word")',
        f"    if place >= 0 and len(parts) < {most}:",
        "        start = max(0, place - size // 2)",
        '        parts.append(f"== {name} ==\\n{text[start:start + size]}")',
    ]


def _limits_section(facts: PromptFacts) -> str:
    budget = facts.budget
    if budget is None:
        return ""
    dollars = f", ${budget.dollars:g}" if math.isfinite(budget.dollars) else ""
    shared = "with all its calls and children" if facts.children else "with all its calls"
    if facts.depth:
        shared = "of which you are a part"
    return (
        f"You have {counted_noun(budget.turns, 'turn')} (each of your messages is one). The run, "
        f"{shared}, has {counted_noun(budget.calls, 'model call')}, {budget.tokens:,} tokens"
        f"{dollars} and {budget.seconds:,.12g} seconds."
    )


def user_instructions(text: str, examples: Sequence[PromptExample]) -> str:
    """Format the user's instructions and examples for a prompt."""
    parts = []
    if text.strip():
        parts.append(f"Instructions of the user:\n{text.strip()}")
    if examples:
        lines = [f"Question: {example.question}\nAnswer: {example.answer}" for example in examples]
        parts.append("\n".join(["Examples of such questions and their answers:", *lines]))
    return "\n\n".join(parts)
