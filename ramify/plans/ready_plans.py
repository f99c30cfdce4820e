"""Six ready-made plans for common kinds of questions, and the rules that choose between them.

    search      split ─ filter (BM25) ─ map ─ filter ─ best       the place that answers it
    classify    split ─ map ─ concat                              a label for each record
    aggregate   split ─ map ─ concat ─ count ─ both ─ ask         counts over all records
    pairwise    split ─ map ─ concat ─ count ─ top ─ ask ─ cross  pairs of things that fit together
    summarise   split ─ map ─ reduce                              a summary of everything
    multi_hop   split ─ peek ─ filter ─ map ─ reduce ─ ask        facts that must be combined

Each of these is a function that returns a ``Plan``; the question is filled in when the plan runs.
The functions from which they are composed are in ``step_constructors.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ramify.errors import ConfigError, did_you_mean
from ramify.plans import step_constructors as c
from ramify.plans.leaf_questions import Leaf
from ramify.plans.part_size_calibration import part_size
from ramify.plans.plan import Plan
from ramify.plans.plan_strategy import PlanStrategy
from ramify.plans.predicates import Comparison, Relevance
from ramify.plans.text_parts import By

_PART_TOKENS = 4000
_LABEL_TOKENS = 24
_FACT_TOKENS = 32
"""Maximum reply tokens for the key and the value of one record, in the plan ``pairwise``."""
_SIDES_TOKENS = 2_048
_COUNT_BYTES = 100
"""Maximum size in bytes of one entry of a count as the model reads it, in addition to the entry's
key and value."""
_MAX_RECORDS = 100
"""Maximum number of records in a part if the model gives a value for each record."""
_MIN_MERGED_TOKENS, _MAX_MERGED_TOKENS = 32, 512


def search(
    part_tokens: int = _PART_TOKENS, by: By = "lines", *, top: int = 20, cut: bool = False
) -> Plan:
    """Return a plan that finds the passage with the answer to the question.

    A model reads only the ``top`` parts that match the question best by BM25. 0 reads all parts.

    >>> str(plans.search(top=5).type)
    'text'
    """
    leaf = Leaf(
        "Question: {question}\n\nDoes the text below answer it? If it does, set found to true, "
        "give the answer in as few words as possible, and how certain you are, from 0 to 10. If it "
        "does not, set found to false and answer to an empty text.",
        _record_schema(
            found={"type": "boolean"},
            answer={"type": "string"},
            certainty={"type": "integer", "minimum": 0, "maximum": 10},
        ),
        part_tokens,
        256,
        label="answer",
    )
    plan = c.split(by, part_tokens, cut=cut)
    if top:
        plan |= c.filter(Relevance(top))
    found = c.filter(Comparison("found")) | c.best("certainty")
    return plan | c.map(leaf) | found | c.field("answer")


def classify(
    labels: Sequence[str], part_tokens: int = _PART_TOKENS, by: By = "lines", *, cut: bool = False
) -> Plan:
    """Return a plan that gives each record one of several labels.

    The answer is the list of labels, in the order of the records.

    >>> str(plans.classify(["spam", "ham"]).type)
    'list of text'
    """
    return _split(by, part_tokens, cut) | c.map(_labelling_leaf(labels, part_tokens)) | c.concat()


def aggregate(
    labels: Sequence[str] | None = None,
    part_tokens: int = _PART_TOKENS,
    by: By = "lines",
    *,
    answers: bool = True,
    cut: bool = False,
) -> Plan:
    """Return a plan that counts what the question asks about.

    Without labels, the model chooses its own words for what it counts. If ``answers`` is false, the
    result is the counts. Otherwise, one more call answers the question from the counts.

    >>> str(plans.aggregate(["spam", "ham"], answers=False).type)
    'counts'
    """
    labelling = _labelling_leaf(labels, part_tokens)
    plan = _split(by, part_tokens, cut) | c.map(labelling) | c.concat()
    if labels is None:
        plan |= c.filter(Comparison("", "!=", "none"))
    plan |= c.count()
    if not answers:
        return plan
    leaf = Leaf(
        "Question: {question}\n\nAll records of the data have been labelled and counted. The first "
        "line below has the most frequent labels with their counts, and the second line how many "
        "labels have each count. Answer the question from them, in as few words as possible.",
        tokens=2 * part_tokens,
        reply_tokens=256,
        label="answer",
    )
    most = max(1, leaf.read_bytes // 2 // (labelling.max_answer_bytes + _COUNT_BYTES))
    return plan | c.both(c.top(most), c.spread() | c.top(most)) | c.ask(leaf)


def pairwise(
    part_tokens: int = _PART_TOKENS, by: By = "lines", *, ordered: bool = False, cut: bool = False
) -> Plan:
    """Return a plan for questions that ask for pairs of items.

    For each record, a model names its subject and the value on which the question's condition
    depends, and code counts how often each subject has each value. From these counts, a second call
    decides which subjects can be the first and which the second of a pair. Code then forms the
    pairs.

    >>> str(plans.pairwise().type)
    'list of pair of text and text'
    """
    facts = Leaf(
        "Question: {question}\n\nThe question asks for pairs. For each numbered record, give key, "
        "the name of the one that it is about, as the question means it, and value: in one to "
        "three words, what of the record the condition depends on; none if it leaves the record "
        "out.",
        _record_schema(key={"type": "string"}, value={"type": "string"}),
        part_tokens,
        _FACT_TOKENS,
        each=True,
        label="facts",
    )
    names = ["first", "second", "both", "neither"]
    sides = Leaf(
        "Question: {question}\n\nThe question asks for pairs. The records of the data have been "
        "counted by key and value. Give for each key which side it fits by these counts: whether "
        "it meets the condition on the first of a pair, on the second, on both, or on neither.",
        {"type": "array", "items": _record_schema(key={"type": "string"}, side={"enum": names})},
        2 * part_tokens,
        _SIDES_TOKENS,
        label="sides",
    )
    most = max(1, sides.read_bytes // (facts.max_answer_bytes + _COUNT_BYTES))
    plan = _split(by, part_tokens, cut) | c.map(facts) | c.concat()
    plan |= c.filter(Comparison("value", "!=", "none")) | c.count("key", "value") | c.top(most)
    first, second = (Comparison("side", "in", [side, "both"]) for side in names[:2])
    return plan | c.ask(sides) | c.cross("key", first, second, ordered=ordered)


def summarise(part_tokens: int = _PART_TOKENS, by: By = "sentences", *, cut: bool = True) -> Plan:
    """Return a plan that summarises what the whole context says about the question.

    >>> print([step.title for step in plans.summarise().steps])
    ['split', 'map summarise', 'reduce merge']
    """
    tokens = _merged_tokens(part_tokens)
    part, merged = (
        Leaf(
            f"Question: {{question}}\n\nSummarise what the {what} below say about it, in at most "
            f"{tokens // 2} words.",
            tokens=part_tokens,
            reply_tokens=tokens,
            label=label,
        )
        for what, label in (("passages", "summarise"), ("summaries", "merge"))
    )
    return c.split(by, part_tokens, cut=cut) | c.map(part) | c.reduce(merged)


def multi_hop(
    part_tokens: int = _PART_TOKENS,
    by: By = "lines",
    *,
    peek_tokens: int = 1000,
    overlap: int = 100,
    cut: bool = False,
) -> Plan:
    """Return a plan for questions whose answer combines facts from several places in the context.

    A model looks at the beginning of each part and picks the relevant parts. It extracts facts from
    these, and combines the facts into an answer.

    >>> str(plans.multi_hop(overlap=200).type)
    'text'
    """
    matters = Leaf(
        "Question: {question}\n\nBelow is the beginning of a passage. Might the passage have a "
        "fact that helps to answer the question, also indirectly? In doubt, say true.",
        {"type": "boolean"},
        part_tokens,
        16,
        label="relevant",
    )
    tokens = _merged_tokens(part_tokens)
    facts, merge, answer = (
        Leaf(
            f"Question: {{question}}\n\n{asked}",
            tokens=part_tokens,
            reply_tokens=most,
            label=label,
        )
        for asked, most, label in (
            (
                "List the facts in the passage that help to answer it, with names. Write none if "
                "there are none.",
                tokens,
                "facts",
            ),
            (
                "Below are facts from several passages. Keep those that help to answer the "
                "question, and drop repetitions.",
                tokens,
                "merge",
            ),
            ("Answer it from the facts below, in as few words as possible.", 256, "answer"),
        )
    )
    overlap = min(overlap, part_tokens // 2)
    return (
        c.split(by, part_tokens, overlap=overlap, cut=cut)
        | c.peek(min(peek_tokens, part_tokens))
        | c.filter(matters)
        | c.map(facts)
        | c.reduce(merge)
        | c.ask(answer)
    )


READY_PLANS: dict[str, Callable[..., Plan]] = {
    "search": search,
    "classify": classify,
    "aggregate": aggregate,
    "pairwise": pairwise,
    "summarise": summarise,
    "multi-hop": multi_hop,
}
"""Name of a ready-made plan -> function that returns the plan."""


class SelectedPlan(NamedTuple):
    """The ready-made plan that was chosen for a question, and the reason for the choice."""

    name: str
    reason: str
    """Rule that chose the plan."""


_RULES = (
    ("summarise", r"\bsummar\w*|\boverview\b|\bgist\b|\bmain (?:points|topics|themes)\b"),
    ("pairwise", r"\bpairs?\b|\beach other\b"),
    (
        "aggregate",
        r"\bhow (?:many|often)\b|\bcounts?\b|\bmost (?:common|frequent)|\bleast (?:common|frequent)"
        r"|\b(?:more|less|equally) (?:common|frequent|often)\b|\bhas the (?:most|fewest|least)\b"
        r"|\bfrequen\w*|\bhow much\b|\bproportion\b|\bpercent|\bdistribution\b",
    ),
    ("multi-hop", r"\bwh\w+\b.*\b(?:that|which|who|whose)\b.*\b(?:that|which|who|whose)\b"),
)
"""Name of a ready-made plan -> words of a question that ask for it. The first match is chosen."""


def plan_for(question: str, labels: Sequence[str] | None = None) -> SelectedPlan:
    """Choose a ready-made plan from the words of a question.

    If the words do not decide, the choice is ``classify`` if labels are given, and ``search``
    otherwise.

    >>> plans.plan_for("How many errors are there?").name
    'aggregate'
    """
    chosen = plan_by_keywords(question)
    if chosen is not None:
        return chosen
    if labels:
        return SelectedPlan("classify", "labels are given")
    return SelectedPlan("search", "no words of the question ask for another plan")


def plan_by_keywords(question: str) -> SelectedPlan | None:
    """Return the ready-made plan that the words of a question ask for, such as ``aggregate`` for
    "how many".

    Returns None if no rule matches.
    """
    for name, pattern in _RULES:
        if found := re.search(pattern, question, re.IGNORECASE):
            return SelectedPlan(name, f"the question says {found[0]!r:.60}")
    return None


def ready_plan(name: str, *, model: Any = None, **options: Any) -> Plan:
    """Return a ready-made plan by name.

    Its parts have the size ``part_tokens`` if given, and otherwise the size that ``ramify
    calibrate`` found for the model. Raises ConfigError for an unknown name or option.

    >>> plans.ready_plan("search", top=5) == plans.search(top=5)
    True
    """
    make = READY_PLANS.get(name)
    if make is None:
        raise ConfigError(f"unknown plan '{name}': {did_you_mean(name, READY_PLANS)}")
    if model is not None:
        options["part_tokens"] = part_size(model, options.get("part_tokens"))[0]
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return make(**given)
    except TypeError as error:
        raise ConfigError(f"plan {name}: {error}") from None


def strategy_for(
    question: str,
    *,
    name: str | None = None,
    why: str = "named",
    model: Any = None,
    is_table: bool = False,
    **options: Any,
) -> PlanStrategy:
    """Return a strategy that answers a question with the ready-made plan of this name.

    Without a name, the words of the question choose the plan. Set ``is_table`` if the context is
    CSV, whose first line names the columns.

    The reason that the strategy records is ``why``, or the rule that chose the plan if no name was
    given. If the model has a calibration, the reason also says how large the parts are.

    Example:
        strategy = plans.strategy_for("How many of these are complaints?", labels=("yes", "no"))
    """
    if name is None:
        name, rule = plan_for(question, options.get("labels"))
        reason = f"{name}: {rule}"
    else:
        reason = f"{name}: {why}"
    size, note = part_size(model, options.get("part_tokens"))
    plan = ready_plan(name, **{**options, "part_tokens": size})
    if is_table:
        plan = plan.with_table_header()
    return PlanStrategy(plan, "; ".join(filter(None, [reason, note])))


def _split(by: By, part_tokens: int, cut: bool) -> Plan:
    return c.split(by, part_tokens, max_records=_MAX_RECORDS, cut=cut)


def _merged_tokens(part_tokens: int) -> int:
    """Return the maximum length, in tokens, of a model reply that merges several items.

    It is short enough that one later call, which reads ``part_tokens`` tokens, can merge several
    replies.
    """
    return max(_MIN_MERGED_TOKENS, min(_MAX_MERGED_TOKENS, part_tokens // 8))


def _labelling_leaf(labels: Sequence[str] | None, part_tokens: int) -> Leaf:
    """Return the leaf (bounded question) that asks a model to label each record.

    The model uses the given labels, or its own words if there are none.
    """
    if labels is None:
        return Leaf(
            "Question: {question}\n\nFor each numbered record, give in one to three words the "
            "value that the question asks to count or compare; none if it leaves the record out.",
            {"type": "string"},
            part_tokens,
            _LABEL_TOKENS,
            each=True,
            label="value",
        )
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str | bytes)
    if not is_list or not all(isinstance(label, str) for label in labels):
        raise ConfigError(f"labels={labels!r:.80}: give a list of strings")
    names = [label.strip() for label in labels]
    if not names or not all(names):
        raise ConfigError("the set of labels is empty: give at least one label, none of them blank")
    if len(set(names)) < len(names):
        raise ConfigError(f"the label '{max(names, key=names.count)}' is given twice: give it once")
    longest = max(len(name.encode()) for name in names)
    return Leaf(
        "Question: {question}\n\nLabel each numbered record with the label that fits it best: "
        f"{', '.join(names)}.",
        {"enum": names},
        part_tokens,
        max(_LABEL_TOKENS, longest),
        each=True,
        label="label",
    )


def _record_schema(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields]}
