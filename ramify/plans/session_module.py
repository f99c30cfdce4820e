"""The module ``ramify_plans`` of a session: bounded questions about parts of a text, asked all at
once.

    from ramify_plans import classify
    labels = classify(context, ["error", "warning", "fine"])      # one for each line

Standard library only: this source runs *inside* the session, where the guest provides ``notebook``
and ``namespace``. Each function sends its value to the host, which runs the step of a plan by the
same code as a plan of the user (``session_plans.py``); the context itself is never sent. Not here:
how a text is cut, what is asked, and what an answer must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

if not globals().get("namespace_is_live", True):
    raise ImportError(
        "ramify_plans needs a session that can import modules: use another sandbox, or a scaffold "
        "without plans"
    )

_prelude = globals()["notebook"].modules["prelude"]
_context = globals()["namespace"].get("context")
_MAX_CHARS = 16_000_000
_PART_KEYS = {"place", "text"}


class LocatedTextPart(str):
    """A part of a text: a str with its ``place`` and its ``records``."""

    place: str
    """Where it is: ``lines 1-120``."""
    preview: str
    """What ``filter`` reads instead of the whole part; empty if it reads all of it."""
    _spans: str

    def __new__(
        cls, text: str, place: str = "", spans: str = "", preview: str = ""
    ) -> LocatedTextPart:
        part = super().__new__(cls, text)
        part.place = place
        part.preview = preview
        part._spans = spans
        return part

    @property
    def records(self) -> list[str]:
        """The lines, sentences or items of the part that are not blank."""
        bounds = [int(each) for each in self._spans.split()]
        return [self[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]

    def __reduce__(self) -> Any:
        return LocatedTextPart, (str(self), self.place, self._spans, self.preview)


class _Options:
    """Base class of the options that code in a session passes to plan functions.

    They are sent to the host, where ``_by`` says which kind of option they are. ``_name`` is the
    name in the session.
    """

    _by = ""
    _name = ""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{self._name}({given})"


class LeafQuestionSpec(_Options):
    """A question about one item, with limits.

    ``{question}`` in the prompt stands for your question. ``schema`` is a JSON schema or a type of
    the answer, None for text. It reads at most ``tokens`` tokens (3 bytes each) and replies with at
    most ``reply_tokens``. With ``each=True``, it gives one value for each record of a part.
    """

    _by = "leaf"
    _name = "Leaf"

    def __init__(
        self,
        prompt: str,
        schema: Any = None,
        tokens: int = 4000,
        reply_tokens: int = 512,
        each: bool = False,
        label: str = "leaf",
    ) -> None:
        self.prompt = prompt
        self.schema = _prelude.schema_of(schema)
        self.tokens = tokens
        self.reply_tokens = reply_tokens
        self.each = each
        self.label = label


class SessionRegexFilter(_Options):
    """Keeps what a regular expression matches (without look-around and back-references)."""

    _by = "regex"
    _name = "Pattern"

    def __init__(self, regex: str, ignore_case: bool = True, field: str = "") -> None:
        self.regex = regex
        self.ignore_case = ignore_case
        self.field = field


class SessionBm25Filter(_Options):
    """Keeps the ``top`` parts that match the words of ``query`` best (BM25); by default the words
    of the question."""

    _by = "bm25"
    _name = "Relevance"

    def __init__(self, top: int, query: str = "") -> None:
        self.top = top
        self.query = query


class SessionFieldFilter(_Options):
    """Keeps items whose ``field`` is True, or for which ``field op value`` holds.

    The operator ``op`` is one of ==, !=, <, <=, >, >=, in or contains.
    """

    _by = "field"
    _name = "Comparison"

    def __init__(self, field: str = "", op: str = "", value: Any = None) -> None:
        self.field = field
        self.op = op
        self.value = value


# One name stands for one class in this package, and a session uses the names of ``ramify.plans``.
Part, Leaf = LocatedTextPart, LeafQuestionSpec
Pattern, Relevance, Comparison = SessionRegexFilter, SessionBm25Filter, SessionFieldFilter


def __getattr__(name: str) -> Any:
    # Read by ``import *`` alone. The guest would bind the names of an ``__all__`` in the notebook,
    # where ``map`` and ``filter`` are Python's.
    if name != "__all__":
        raise AttributeError(f"module 'ramify_plans' has no attribute '{name}'")
    own = (key for key, value in globals().items() if getattr(value, "__module__", "") == __name__)
    return [key for key in own if not key.startswith(("_", "Session"))]


# --- questions ------------------------------------------------------------------------------------


def search(text: Any = None, question: str | None = None, **options: Any) -> Any:
    """Answer the question from the passage of the text that contains the answer; None if no passage
    does.

    Options: top=20 (number of parts that are read, the best by BM25; 0 for all), part_tokens, by,
    cut.
    """
    return _ready("search", text, question, options)


def classify(parts: Any, labels: Sequence[str], question: str | None = None, **options: Any) -> Any:
    """One of ``labels`` for each record, in order: each line of a text, each item of a list, each
    record of the parts of ``split``.

    None where it failed. Options: part_tokens, by, cut.
    """
    return _ready("classify", parts, question, {"labels": _plain(labels), **options})


def aggregate(
    parts: Any = None,
    labels: Sequence[str] | None = None,
    question: str | None = None,
    **options: Any,
) -> Any:
    """The answer to a question about counts: each record is labelled, as by ``classify``, and the
    labels are counted. answers=False gives the counts.

    Without ``labels``, the model finds its own words.
    """
    return _ready("aggregate", parts, question, {"labels": _plain(labels), **options})


def pairwise(parts: Any = None, question: str | None = None, **options: Any) -> Any:
    """The pairs that the question asks for.

    Options: ordered, part_tokens, by, cut.
    """
    return _ready("pairwise", parts, question, options)


def summarise(text: Any = None, question: str | None = None, **options: Any) -> Any:
    """A summary of the whole text, with the question in mind."""
    return _ready("summarise", text, question, options)


def multi_hop(text: Any = None, question: str | None = None, **options: Any) -> Any:
    """The answer to a question whose facts are in several places."""
    return _ready("multi_hop", text, question, options)


def _ready(name: str, value: Any, question: str | None, options: dict[str, Any]) -> Any:
    return _run(name, value if value is not None else _context, options, question)


# --- steps ----------------------------------------------------------------------------------------


def split(
    text: Any = None, by: str = "lines", tokens: int = 4000, **options: Any
) -> list[LocatedTextPart]:
    """Cut a text, or a list or dict of texts, into parts of at most ``tokens`` tokens (of 3 bytes);
    by lines, records, sentences, tokens or items.

    Options: overlap, separator, max_records, cut.
    """
    value = text if text is not None else _context
    found: list[LocatedTextPart] = _run("split", value, {"by": by, "tokens": tokens, **options})
    return found


def peek(parts: Any, tokens: int = 500) -> list[LocatedTextPart]:
    """Let ``filter`` read only the beginning of each part."""
    found: list[LocatedTextPart] = _run("peek", parts, {"tokens": tokens})
    return found


def map(items: Any, leaf: Any) -> list[Any]:
    """The answers of ``leaf`` about the items, in order.

    Those that failed are left out; with ``each``, they are lists of None.
    """
    items, leaf = _ordered("map", items, leaf)
    found: list[Any] = _run("map", items, {"leaf": leaf})
    return found


def filter(items: Any, predicate: Any) -> list[Any]:
    """The items that a Pattern, Relevance, Comparison or a Leaf with schema=bool keeps."""
    items, predicate = _ordered("filter", items, predicate)
    items = items if _is_text(items) or isinstance(items, Mapping) else list(items)
    return [items[index] for index in _run("filter", items, {"predicate": predicate})]


def reduce(items: Any, leaf: Any) -> Any:
    """All items merged into one value by ``leaf``, in a tree: each call reads as many as fit."""
    items, leaf = _ordered("reduce", items, leaf)
    return _run("reduce", items, {"leaf": leaf})


def ask(value: Any, leaf: Any) -> Any:
    """The answer of ``leaf`` about the whole value."""
    value, leaf = _ordered("ask", value, leaf)
    return _run("ask", value, {"leaf": leaf})


def _ordered(name: str, items: Any, leaf: Any) -> tuple[Any, Any]:
    """Return (items, leaf), swapping the arguments if they were given in the other order."""
    if isinstance(items, _Options) and not isinstance(leaf, _Options):
        items, leaf = leaf, items
    if not isinstance(leaf, _Options):
        own = f"; Python's own is builtins.{name}" if name in ("map", "filter") else ""
        raise TypeError(
            f"{name} of ramify_plans needs a Leaf('…'), not a {type(leaf).__name__}: "
            f"{name}(items, Leaf('…')){own}"
        )
    return items, leaf


# --- steps without a model ------------------------------------------------------------------------


def concat(items: Any) -> Any:
    """A list of lists joined into one list, or a list of texts joined into one text."""
    return _run("concat", items, {})


def cross(
    items: Any, key: str = "", left: Any = None, right: Any = None, *, ordered: bool = False
) -> Any:
    """The pairs of values of ``key``, one from an item that satisfies the Comparison ``left`` and
    one from an item that satisfies ``right``."""
    return _run("cross", items, {"key": key, "left": left, "right": right, "ordered": ordered})


def best(items: Any, by: str = "") -> Any:
    """The item with the highest value of a field."""
    return _run("best", items, {"by": by})


def top(items: Any, k: int, by: str = "") -> Any:
    """The ``k`` items with the highest values of ``by``, or the ``k`` highest counts."""
    return _run("top", items, {"k": k, "by": by})


def field(items: Any, name: str) -> Any:
    """One field of a dict, or of each dict of a list."""
    return _run("field", items, {"name": name})


def count(items: Any, *by: str) -> Any:
    """How often each value occurs, most frequent first."""
    return _run("count", items, {"by": list(by)})


def total(items: Any, field: str = "", how: str = "sum") -> Any:
    """The sum, mean, min or max of the numbers."""
    return _run("total", items, {"field": field, "how": how})


def distinct(items: Any, field: str = "") -> Any:
    """The set of the values, sorted."""
    return _run("distinct", items, {"field": field})


def periods(items: Any, field: str = "", per: str = "day") -> Any:
    """The items with each date replaced by its day, week, month or year."""
    return _run("periods", items, {"field": field, "per": per})


class _Pair(NamedTuple):
    left: Any
    right: Any


def combine(left: Any, right: Any, how: str = "union") -> Any:
    """The union, intersection or difference of two lists."""
    return _run("combine", _Pair(left, right), {"how": how})


def join(left: Any, right: Any, on: str) -> Any:
    """The dicts of two lists that have the same value of ``on``, merged into one dict for each
    match."""
    return _run("join", _Pair(left, right), {"on": on})


# --- the host -------------------------------------------------------------------------------------


def _run(name: str, value: Any, options: dict[str, Any], question: str | None = None) -> Any:
    if question is not None and not isinstance(question, str):
        raise TypeError(f"{name}: question must be a str, not {type(question).__name__}")
    given = {key: _option(each) for key, each in options.items() if each is not None}
    reply = _prelude.ask_host("tool", "ramify_plans", name, _sent(name, value), given, question)
    answer = reply["answer"]
    if reply["has_asked"]:
        _prelude.received.append(answer)
    if reply["note"]:
        print(f"{name}: {reply['note']}")
    return [LocatedTextPart(*each) for each in answer] if reply["is_parts"] else answer


def _option(value: Any) -> Any:
    if not isinstance(value, _Options):
        return _plain(value)
    fields = {name: _plain(each) for name, each in vars(value).items()}
    return {"by": value._by, **fields}


def _sent(name: str, value: Any) -> Any:
    """Convert ``value`` to the form in which it is sent to the host.

    The session's own context need not be sent.
    """
    if value is _context and value is not None:
        return {"of": "context"}
    if isinstance(value, _Pair):
        return {"of": "pair", "pair": [_sent(name, each) for each in value]}
    if isinstance(value, Iterable) and not (_is_text(value) or isinstance(value, Mapping)):
        value = list(value)
        parts = [_part(each) for each in value]
        if value and None not in parts:
            _check_size(name, parts)
            return {"of": "parts", "parts": [_fields(each) for each in parts if each is not None]}
    if isinstance(value, LocatedTextPart):
        value = [value]
        return {"of": "part", "parts": [_fields(each) for each in value]}
    plain = _plain(value)
    _check_size(name, plain)
    return {"of": "value", "value": plain}


def _part(value: Any) -> LocatedTextPart | None:
    """Convert ``value`` to a text part, if it is one or is a dict as returned by ``chunks``.

    Return None for any other value.
    """
    if isinstance(value, LocatedTextPart):
        return value
    if not isinstance(value, dict) or value.keys() != _PART_KEYS or not _is_text(value["text"]):
        return None
    text, spans, start = str(value["text"]), list[str](), 0
    for line in text.splitlines(keepends=True):
        if inner := line.strip():
            begin = start + line.index(inner)
            spans.append(f"{begin} {begin + len(inner)}")
        start += len(line)
    return LocatedTextPart(text, str(value["place"]), " ".join(spans))


def _fields(part: LocatedTextPart) -> list[str]:
    return [str(part), part.place, part._spans, part.preview]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "find")


def _plain(value: Any) -> Any:
    """Convert ``value`` to plain lists, dicts and strings.

    This replaces subclasses, and other types that behave like them, such as a set or text that is
    read from its file.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, bytes | bytearray):
        return value
    if hasattr(value, "find"):  # a text in its file
        return str(value[:])
    if isinstance(value, Iterable):
        return [_plain(each) for each in value]
    return value


def _check_size(name: str, value: Any) -> None:
    size = _num_chars(value)
    if size > _MAX_CHARS:
        raise ValueError(
            f"{name}: {size:,} characters are too many to send at once: give `context` itself, or "
            f"at most {_MAX_CHARS:,} at a time"
        )


def _num_chars(value: Any) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, dict):
        return sum(_num_chars(key) + _num_chars(each) for key, each in value.items())
    return sum(_num_chars(each) for each in value) if isinstance(value, list) else 0
