"""Plans in a session: the module ``ramify_plans`` gives the answers of plans, with as many calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import (
    RLM,
    Limits,
    ReplayDiverged,
    Result,
    SandboxSpec,
    ScriptedClient,
    Stop,
    Store,
    load,
    plans,
)
from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.extras.suites.oolong import oolong
from ramify.extras.suites.oolong_pairs import oolong_pairs
from ramify.tasks.base import DatasetTask
from ramify.types.message import Message
from ramify.types.trajectory import Call
from tests.plans.helpers import LABELS, QUESTION, answered, lines, reply

SMALL = 200
"""Tokens of a part: a dozen lines."""


def in_session(
    cells: Sequence[str],
    context: Any,
    leaf: Callable[..., Any] = reply,
    *,
    question: str = QUESTION,
    **options: Any,
) -> tuple[Result, ScriptedClient]:
    """Run ``cells`` in the session of a free run. Returns (the result, the model)."""
    client = ScriptedClient(session_script(cells, leaf))
    options.setdefault("sandbox", "inprocess")
    with RLM(client, scaffold="plans", **options) as rlm:
        return rlm.completion(context, question, direct=False), client


def session_script(cells: Sequence[str], leaf: Callable[..., Any] = reply) -> Callable[..., Any]:
    def script(messages: Sequence[Message]) -> Any:
        if messages[0].role != "system":
            return leaf(messages)
        turn = sum(message.role == "assistant" for message in messages)
        return f"```repl\n{cells[turn]}\n```" if turn < len(cells) else "FINAL(None)"

    return script


def printed(result: Result) -> str:
    """What the cells of the root printed, and their errors."""
    cells = [cell for turn in result.trajectory.root.turns for cell in turn.cells]
    return "".join(f"{cell.stdout}{cell.error or ''}" for cell in cells)


def leaves(result: Result) -> list[Call]:
    return [call for call in result.trajectory.calls if call.kind == "leaf"]


def prompts(client: ScriptedClient) -> list[str]:
    """The prompts of leaves, sorted, since they are sent at the same time."""
    sent = (request.messages for request in client.requests)
    return sorted(messages[-1].content for messages in sent if messages[0].role != "system")


READY = {
    "search": (plans.search(SMALL, top=0), "search(part_tokens=200, top=0)"),
    "classify": (
        plans.classify(LABELS, SMALL),
        "classify(context, ['ham', 'spam'], part_tokens=200)",
    ),
    "aggregate": (
        plans.aggregate(LABELS, SMALL),
        "aggregate(context, ['ham', 'spam'], part_tokens=200)",
    ),
    "pairwise": (plans.pairwise(SMALL), "pairwise(part_tokens=200)"),
    "summarise": (plans.summarise(SMALL), "summarise(context, part_tokens=200)"),
    "multi_hop": (plans.multi_hop(SMALL), "multi_hop(part_tokens=200)"),
}


@pytest.mark.parametrize("name", READY)
def test_a_session_gets_the_answer_of_the_plan_with_as_many_calls(name: str) -> None:
    plan, call = READY[name]
    text = lines(100)
    by_plan, planned = answered(plan, text)
    cell = f"from ramify_plans import {name}\nFINAL({call})"
    by_session, free = in_session([cell], text)
    assert by_session.answer == by_plan.answer
    assert prompts(free) == prompts(planned)
    assert len(leaves(by_session)) == len(leaves(by_plan)) == len(free.requests) - 1


@pytest.mark.parametrize("suite", [oolong, oolong_pairs])
def test_a_suite_is_answered_as_by_its_plan(suite: Callable[..., DatasetTask]) -> None:
    """The offline model answers the leaves of both."""
    for item in suite(tokens=8_000).splits["test"][:2]:
        name, _ = plans.plan_for(item.question)
        strategy = plans.PlanStrategy(plans.ready_plan(name, part_tokens=1000))
        cell = f"from ramify_plans import {name}\nFINAL({name}(part_tokens=1000))"
        with RLM("offline:default") as rlm:
            by_plan = rlm.completion(item.context, item.question, strategy=strategy)
        by_session, _ = in_session(
            [cell], item.context, question=item.question, sub_model="offline:default"
        )
        assert by_session.answer == by_plan.answer
        assert len(leaves(by_session)) == len(leaves(by_plan)) == by_plan.usage.calls > 5


def test_classify_replaces_a_loop_over_the_parts() -> None:
    cell = """
from ramify_plans import classify, count, split
parts = split(context, "lines", tokens=200, max_records=100)
labels = classify(parts, ["ham", "spam"])
FINAL([labels, count(labels), [part.place for part in parts][:2], parts[1].records[0][:7]])"""
    result, client = in_session([cell], lines(60))
    labels, counts, places, record = result.answer
    by_plan, planned = answered(plans.classify(LABELS, SMALL), lines(60))
    assert labels == by_plan.answer
    assert (counts, places) == ({"ham": 40, "spam": 20}, ["lines 1-12", "lines 13-24"])
    assert record == "12 spam"
    assert prompts(client) == prompts(planned)


def test_a_blank_part_has_no_labels() -> None:
    text = "a spam b\n" + "\n" * 1500 + "a ham b\n"
    cell = (
        "from ramify_plans import *\nFINAL(classify(split(context, tokens=200), ['ham', 'spam']))"
    )
    result, client = in_session([cell], text)
    by_plan, planned = answered(plans.classify(LABELS, SMALL), text)
    assert result.answer == by_plan.answer == ["spam", "ham"]
    assert prompts(client) == prompts(planned)


def test_leaves_are_recorded_below_one_call_of_the_session() -> None:
    cells = [
        "from ramify_plans import classify",
        "a = classify(context, ['ham', 'spam'], by='lines')",
    ]
    result, _ = in_session(cells, lines(3))
    _, plan, leaf = result.trajectory.calls
    assert (plan.id, plan.kind, plan.question, plan.depth) == ("0.0", "strategy", "classify", 1)
    assert (leaf.id, leaf.kind, leaf.depth, leaf.question) == (
        "0.0.0",
        "leaf",
        2,
        "label: lines 1-3",
    )
    assert plan.answer == ["spam", "ham", "ham"]


def test_values_of_a_session_are_lists_and_texts_of_any_kind() -> None:
    cells = [
        "import ramify_plans as rp",
        "print(rp.classify(['a spam b', '', 'x\\ny ham z'], ('ham', 'spam')))",
        "print(rp.classify([{'t': 'a spam '}, {'t': ' ham '}], ['ham', 'spam']))",
        "print(rp.classify([{'place': 'x', 'text': context}], ['ham', 'spam']) == rp.classify(context, ['ham', 'spam']))",
        "print(rp.filter([{'n': 1}, {'n': 5}], rp.Comparison('n', '>', 2)))",
        "print(rp.filter(iter(['a', 'error b', 'a']), rp.Pattern('^a|c')))",
        "print(rp.total([{'n': 1}, None, {'n': 5}], 'n'), rp.best([{'n': 1}, {'n': 5}], 'n'))",
        "print(rp.join([{'id': 1, 'a': 2}], [{'id': 1, 'b': 3}], 'id'), rp.combine(['a', 'b'], ['b', 'c']))",
        "print(rp.top({'x': 1, 'y': 2}, 1), rp.distinct(['b', 'a', 'b']), rp.concat([[1], [2]]))",
        "print(rp.periods(['May 3, 2024'], per='month'), rp.field([{'a': 1}], 'a'))",
        "print(rp.cross([{'u': 'b'}, {'u': 'a'}], 'u'), rp.concat(rp.split('a b', tokens=16)))",
        "print(rp.map(rp.Leaf('Is it?', schema=bool), ('a', 'spam')))",
        "print(rp.ask({'a': 1}, rp.Leaf('Is it?', schema=bool)))",
    ]
    context = lines(20)
    result, _ = in_session(["\n".join(cells)], context)
    assert printed(result).splitlines() == [
        "['spam', 'ham', 'ham']",
        "['spam', 'ham']",
        "True",
        "[{'n': 5}]",
        "['a', 'a']",
        "6 {'n': 5}",
        "[{'id': 1, 'a': 2, 'b': 3}] ['a', 'b', 'c']",
        "{'y': 2} ['a', 'b'] [1, 2]",
        "['2024-05'] [1]",
        "[['a', 'b']] [line 1]",
        "a b",
        "[False, True]",
        "False",
    ]


def test_texts_that_stay_in_their_files_are_read(tmp_path: Path) -> None:
    names = ["a.log", "b.log"]
    for name in names:
        (tmp_path / name).write_text(lines(30))
    one, two = load(tmp_path / "a.log", mapped_bytes=100), load(tmp_path, mapped_bytes=100)
    cell = """
from ramify_plans import *
a = classify(context, ["ham", "spam"], part_tokens=200)
b = classify(split(context, tokens=200), ["ham", "spam"])
c = classify(context[:200], ["ham", "spam"])
FINAL([len(a), len(b), len(c), ask(context, Leaf("?", schema=bool))])"""
    result, _ = in_session([cell], one)
    assert result.answer == [30, 30, 5, True]
    cell = """
from ramify_plans import *
FINAL([len(classify(context, ["ham", "spam"])), len(split([context["a.log"]], "items", tokens=900))])"""
    result, _ = in_session([cell], two)
    assert result.answer == [60, 1]


RANDOM = """
import random
from ramify_plans import Leaf, concat, map, reduce, split
found, random = [], random.Random(7)
for _ in range(40):
    words = [random.choice(["a", "bc", "Über.", "\\n", "\\n\\n", "x" * 20, " "]) for _ in range(60)]
    text, by = "".join(words) + "end", random.choice(["lines", "records", "sentences", "tokens"])
    options = {"tokens": random.randint(40, 90), "overlap": random.randint(0, 20), "cut": True}
    parts = split(text, by, **options)
    found.append([text, by, options, [[part, part.place, part.records] for part in parts]])
FINAL(found)"""


def test_a_session_cuts_as_a_plan_does() -> None:
    result, _ = in_session([RANDOM], "-")
    assert len(result.answer) == 40
    for text, by, options, parts in result.answer:
        (step,) = plans.split(by, **options).steps
        ours = step.parts(text)  # type: ignore[union-attr]
        assert [[p.text, p.place, [p.text[a:b] for a, b in p.records]] for p in ours] == parts


@pytest.mark.parametrize("num", [1, 2, 7, 30, 61])
def test_a_session_reduces_with_the_calls_of_a_plan(num: int) -> None:
    leaf = plans.Leaf("Merge {question}", tokens=60, reply_tokens=10)
    plan = plans.split("lines", 20) | plans.reduce(leaf)
    text = lines(num, 30)
    cell = """
from ramify_plans import Leaf, reduce, split
FINAL(reduce(split(context, tokens=20), Leaf("Merge {question}", tokens=60, reply_tokens=10)))"""
    by_plan, planned = answered(plan, text)
    by_session, free = in_session([cell], text)
    assert by_session.answer == by_plan.answer
    assert prompts(free) == prompts(planned)
    assert len(planned.requests) == plan.cost(text, "openai:gpt-5-mini", QUESTION).calls


MISTAKES = [
    (
        "classify(context, [])",
        "ValueError: classify: the set of labels is empty: give at least one",
    ),
    ("classify(context, 'ham')", "ValueError: classify: labels='ham': give a list of strings"),
    ("classify(context, ['a', 'a'])", "the label 'a' is given twice: give it once"),
    ("classify(None, ['a'], part_tokens='x')", "ValueError: classify: "),
    ("classify(context, ['a'], wrong=1)", "unexpected keyword argument 'wrong'"),
    ("classify([], ['a'])", "ValueError: classify: the context is empty, so there is nothing to"),
    ("classify(5, ['a'])", "classify"),
    ("classify(['y' * 20_000], ['a'])", "item 1 ('yyy"),
    ("classify('y' * 20_000, ['a'])", "the line at line 1 ('yyy"),
    ("classify('y' * 17_000_000, ['a'])", "17,000,000 characters are too many to send at once"),
    ("map(['y' * 20_000], Leaf('?'))", "map leaf: an item has 20,000 bytes, but leaf 'leaf' reads"),
    ("map(str, [1, 2])", "TypeError: map of ramify_plans needs a Leaf('…'), not a list: "),
    ("map(context, Leaf('?'))", "map leaf needs a list, but got text"),
    ("map(['a'], Leaf(''))", "a leaf has an empty prompt: say what to ask"),
    ("map(['a'], Leaf('?', schema={'type': 'nonsense'}))", "the JSON schema is not valid at type"),
    ("map(['a'], Leaf('?', {'pattern': '(?=a)'}))", "RE2 says"),
    ("map(['a'], Leaf('?', {'enum': []}))", "leaf 'leaf' has no labels: give at least one"),
    ("map(['a'], Leaf('?', each=True))", "but text has no records: split by lines"),
    ("filter(['a'], Leaf('?'))", "the predicate must give a boolean, but gives text"),
    ("filter(['a'], Pattern('('))", "the pattern '(?i)(' is not understood"),
    ("filter([1], Pattern('a'))", "a pattern needs text, but got number"),
    ("reduce(['a', 'b'], Leaf('?', tokens=10))", "two of its answers may take"),
    ("split('a', tokens=1)", "ValueError: split: tokens=1: give 16 or more"),
    ("split('a', 'nonsense')", "ValueError: split: by='nonsense'"),
    ("split(5)", "split"),
    ("split({'a': object()})", "TypeError"),
    ("count(None)", "count: the value is None: give a list, or what another function returned"),
    ("count(5)", "ValueError: count needs a list, but got number"),
    ("best(['a'])", "best needs a number, but got text: name a field with one"),
    ("best([{'n': 1}], 'm')", "best needs the field 'm', but the record has n"),
    ("combine([1], 2, 'union')", "combine needs a list, but got number"),
    ("join([{'a': 1}], [{'b': 1}], 'a')", "join needs the field 'a', but the record has b"),
    ("total(['a'], how='sun')", "total: how='sun'"),
    ("search(question=5)", "TypeError: search: question must be a str, not int"),
    ("ask(object(), Leaf('?'))", "TypeError"),
]


def test_a_mistake_is_one_line_that_says_what_to_do_and_no_call() -> None:
    cell = "from ramify_plans import *\nmistakes, lines = iter(%r), []\nfor each in mistakes:\n"
    cell += "    try:\n        lines.append('no error: ' + repr(eval(each)))\n"
    cell += (
        "    except Exception as error:\n        lines.append(f'{type(error).__name__}: {error}')\n"
    )
    cell += "FINAL(lines)"
    result, client = in_session([cell % [call for call, _ in MISTAKES]], lines(3))
    assert len(client.requests) == 1
    for (call, expected), line in zip(MISTAKES, result.answer, strict=True):
        assert expected in line, (call, line)
        assert "\n" not in line
        assert not line.startswith("no error"), call
        assert len(line) < 500


def test_forged_requests_are_refused() -> None:
    host = "import ramify_plans as rp\nask = rp._prelude.ask_host\n"
    forged = [
        "'nonsense', {'of': 'context'}, {}, None",
        "'count', 5, {}, None",
        "'count', {'of': 'parts', 'parts': [['a', 'b', '0 9', '']]}, {}, None",
        "'count', {'of': 'parts', 'parts': [['a', 'b', '1 0', '']]}, {}, None",
        "'count', {'of': 'parts', 'parts': [['a', 'b', '-1 x', '']]}, {}, None",
        "'count', {'of': 'parts', 'parts': 5}, {}, None",
        "'count', {'of': 'value', 'value': []}, [], None",
        "'count', {'of': 'value', 'value': []}, {}, 5",
        "'map', {'of': 'value', 'value': ['a']}, {'leaf': {'by': 'leaf', 'prompt': 5}}, None",
        "'map', {'of': 'value', 'value': ['a']}, {'leaf': {'by': 'nonsense'}}, None",
        "'map', {'of': 'value', 'value': ['a']}, {'leaf': 5}, None",
        "['count'], {'of': 'value', 'value': []}, {}, None",
        "'count'",
    ]
    cells = [
        host + f"try:\n    print('no error', ask('tool', 'ramify_plans', {each}))\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
        for each in forged
    ]
    result, client = in_session(cells, lines(3), limits=Limits(max_turns=30))
    assert len(printed(result).splitlines()) == len(forged)
    assert "no error" not in printed(result)
    assert [call.kind for call in result.trajectory.calls] == ["rlm"]
    assert len(client.requests) == len(forged) + 1


def test_a_leaf_that_violates_its_schema_fails_alone_and_is_said() -> None:
    def leaf(messages: Sequence[Message]) -> str:
        return "I will not." if "\n1: 12 " in messages[0].content else reply(messages)

    cell = "from ramify_plans import classify\n"
    cell += "labels = classify(context, ['ham', 'spam'], part_tokens=200)"
    result, client = in_session([cell, "FINAL(labels)"], lines(30), leaf)
    assert result.answer == ["spam", "ham", "ham"] * 4 + [None] * 12 + ["spam", "ham", "ham"] * 2
    assert printed(result).startswith(
        "classify: 1 of 3 leaves failed, so the answer does not cover"
    )
    assert len(client.requests) == 2 + 2 + 3  # each reply that does not fit is asked for twice more


def test_a_plan_whose_leaves_all_fail_raises_in_the_session() -> None:
    cell = """
from ramify_plans import classify
try:
    classify(context, ["ham", "spam"])
except SubcallError as error:
    print(error.kind, error.results, error)"""
    result, _ = in_session([cell], lines(3), lambda _: "no")
    assert printed(result).startswith("error [None] classify: map label: the leaf failed; ")
    plan = result.trajectory.calls[1]
    assert (plan.id, plan.stop) == ("0.0", Stop.ERROR)


def test_a_plan_beyond_what_is_left_is_refused_before_any_call() -> None:
    cell = "from ramify_plans import classify\nclassify(context, ['ham', 'spam'], part_tokens=200)"
    result, client = in_session([cell], lines(100), limits=Limits(max_calls=7))
    error = "ValueError: classify: the plan may take 9 calls, and 5 calls of the run's max_calls are left"
    assert error in printed(result)
    assert len(client.requests) == 2


def test_a_limit_during_a_plan_gives_what_there_is() -> None:
    """Retries are not among the calls that a plan may take, so a limit may be met on the way."""
    cell = """
from ramify_plans import classify
try:
    classify(context, ["ham", "spam"], part_tokens=200)
except SubcallError as error:
    print([error.kind, *error.results])"""
    asked: set[str] = set()

    def wrong_at_first(messages: Sequence[Message]) -> Any:
        prompt = messages[0].content
        if prompt in asked:
            return reply(messages[:1])
        asked.add(prompt)
        return "neither"

    limits = Limits(max_calls=8, max_concurrency=1)
    result, client = in_session([cell], lines(60), wrong_at_first, limits=limits)
    labels = ["spam", "ham", "ham"] * 12
    assert printed(result) == f"{['limit', labels + [None] * 24]}\n"
    assert len(client.requests) == result.usage.calls == 8


def test_paid_answers_outlive_the_error_of_a_cell() -> None:
    cells = [
        "from ramify_plans import classify, count\ncount([1])\n"
        "labels = classify(context, ['ham', 'spam'])[1 / 0]",
        "FINAL(last_replies)",
    ]
    result, _ = in_session(cells, lines(3))
    assert result.answer == [["spam", "ham", "ham"]]


def test_children_run_plans_over_their_own_context() -> None:
    child = "from ramify_plans import classify\nFINAL(classify(context, ['ham', 'spam']))"
    cells = ["FINAL([rlm_query('label', context=c) for c in (context[:200], context[200:])])"]

    def script(messages: Sequence[Message]) -> Any:
        if messages[0].role == "system" and "Question: label" in messages[1].content:
            return f"```repl\n{child}\n```"
        return session_script(cells)(messages)

    with RLM(ScriptedClient(script), scaffold="plans", sandbox="inprocess") as rlm:
        result = rlm.completion(lines(12), QUESTION, direct=False)
    assert [len(labels) for labels in result.answer] == [5, 8]
    assert {call.id: call.depth for call in leaves(result)} == {"0.0.0.0": 3, "0.1.0.0": 3}
    asked = [call.turns[0].prompt[-1].content for call in leaves(result)]
    assert all(text.startswith("Question: label") for text in asked)


def test_a_frozen_prompt_says_nothing_and_has_the_module() -> None:
    for name in ("tiny", "bare", "retool"):
        frozen = SCAFFOLDS[name]
        sent = []
        for plans_are_on in (False, True):
            code = "from ramify_plans import count; FINAL(count([1, 1]))"
            said = f"<code>\n{code}\n</code>" if name == "retool" else code
            client = ScriptedClient([said, "\\\\boxed{1}", "x", "x"])
            scaffold = msgspec.structs.replace(frozen, plans=plans_are_on)
            limits = Limits(max_turns=1)
            with RLM(client, scaffold=scaffold, sandbox="inprocess", limits=limits) as rlm:
                result = rlm.completion("text", QUESTION)
            sent.append(client.requests[0].messages)
        assert sent[0] == sent[1]
        if name != "retool":
            assert result.answer == {"1": 2}


def test_a_run_that_is_killed_anywhere_resumes_and_pays_no_leaf_twice(tmp_path: Path) -> None:
    """The journal is cut after each request and each reply, as a kill cuts it."""
    cells = [
        "from ramify_plans import *\nparts = split(context, tokens=200)\n"
        "some = filter(parts, Leaf('Is it?', schema=bool))\nlabels = classify(some, ['ham', 'spam'])",
        "print(llm_query('one more'))",
        "FINAL([len(labels), count(labels)])",
    ]
    store, limits = Store(tmp_path), Limits(max_concurrency=2)
    whole, client = in_session(cells, lines(24), store=store, limits=limits)
    assert whole.answer == [24, {"ham": 16, "spam": 8}]
    num = len(client.requests)
    assert num == 3 + 2 + 2 + 1
    (journal,) = (tmp_path / "runs").glob("*.jsonl")
    recorded = journal.read_bytes().splitlines(keepends=True)
    options: dict[str, Any] = {"store": store, "limits": limits, "sandbox": "inprocess"}
    with RLM(ScriptedClient([]), scaffold="plans", **options) as rlm:
        assert rlm.replay(whole.run_id).answer == whole.answer
        for at, line in enumerate(recorded, 1):
            if b'"type":"Replied"' not in line and b'"type":"Requested"' not in line:
                continue
            journal.write_bytes(b"".join(recorded[:at]))
            num_paid = sum(b'"type":"Replied"' in each for each in recorded[:at])
            after = ScriptedClient(session_script(cells))
            with RLM(after, scaffold="plans", **options) as again:
                result = again.resume(whole.run_id)
            assert (result.answer, result.stop) == (whole.answer, Stop.FINAL)
            assert num_paid + len(after.requests) == num
    journal.write_bytes(b"".join(recorded[:10]))
    with (
        RLM(ScriptedClient([]), **options) as rlm,
        pytest.raises(ReplayDiverged, match="plans=True"),
    ):
        rlm.resume(whole.run_id)


def test_no_leaf_is_paid_twice_when_a_session_dies() -> None:
    cells = [
        "from ramify_plans import *\nlabels = classify(context, ['ham', 'spam'], part_tokens=200)",
        "import os; os._exit(3)",
        "FINAL([len(labels), count(labels)])",
    ]
    result, client = in_session(cells, lines(30), sandbox="process")
    assert result.answer == [30, {"ham": 20, "spam": 10}]
    assert len(client.requests) == 3 + 3


@pytest.mark.parametrize("sandbox", ["jail", "process"])
def test_sessions_in_other_processes_import_the_module(sandbox: str) -> None:
    cell = """
import ramify_plans
from ramify_plans import classify
FINAL([classify(["a ham b", "a spam b"], ["ham", "spam"]), ramify_plans.split("a b")[0].place])"""
    spec = SandboxSpec(sandbox, allow_weaker=True)
    result, _ = in_session([cell], lines(3), sandbox=spec)
    assert result.answer == [["ham", "spam"], "line 1"]
