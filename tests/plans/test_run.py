"""Plans that run: their answers, the calls that they make, failures, limits and resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from ramify import (
    RLM,
    ConfigError,
    Limits,
    MemoryStore,
    Price,
    RamifyError,
    ScriptedClient,
    Stop,
    Store,
    plans,
)
from tests.plans.helpers import LABELS, QUESTION, answered, lines, reply

SMALL = 200
"""Tokens of a part: a dozen lines."""


def ready(name: str) -> plans.Plan:
    options: dict[str, Any] = {"labels": LABELS} if name in ("classify", "aggregate") else {}
    if name == "search":
        options["top"] = 0
    return plans.ready_plan(name, part_tokens=2000, **options)


@pytest.mark.parametrize(
    "name", ["search", "classify", "aggregate", "pairwise", "summarise", "multi-hop"]
)
def test_a_ready_plan_makes_the_calls_that_it_says(name: str) -> None:
    plan, text = ready(name), lines(500)
    cost = plan.cost(text, "openai:gpt-5-mini", QUESTION)
    result, client = answered(plan, text)
    assert result.stop is Stop.FINAL
    assert result.answer is not None
    assert (
        len(client.requests) == cost.calls if cost.is_exact else len(client.requests) <= cost.calls
    )
    assert result.usage.total_tokens <= cost.tokens


def test_labels_are_in_the_order_of_the_records() -> None:
    result, _ = answered(plans.classify(LABELS, SMALL), lines(30))
    assert result.answer == ["spam", "ham", "ham"] * 10


def test_counts_are_those_of_all_records() -> None:
    result, client = answered(plans.aggregate(LABELS, SMALL, answers=False), lines(300))
    assert result.answer == {"ham": 200, "spam": 100}
    assert len(client.requests) == 25


def test_the_calls_of_a_plan_are_leaves_of_the_root() -> None:
    result, _ = answered(plans.classify(LABELS, SMALL), lines(30))
    root, *leaves = result.trajectory.calls
    assert (root.id, root.kind, root.turns) == ("0", "strategy", [])
    assert [call.id for call in leaves] == ["0.0", "0.1", "0.2"]
    assert {call.kind for call in leaves} == {"leaf"}
    assert leaves[1].question == "label: lines 13-24"


STEPS = st.lists(
    st.sampled_from(["filter", "peek", "regex", "map", "reduce", "concat", "ask"]), max_size=5
)


@hypothesis.given(
    names=STEPS,
    num=st.integers(0, 120),
    tokens=st.integers(40, 400),
    reply_tokens=st.integers(16, 60),
    overlap=st.integers(0, 20),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_no_plan_passes_its_bound_and_every_plan_ends(
    names: list[str], num: int, tokens: int, reply_tokens: int, overlap: int
) -> None:
    text = plans.Leaf("Read {question}", None, max(tokens, 4 * reply_tokens + 20), reply_tokens)
    yes = plans.Leaf("Is it?", {"type": "boolean"}, text.tokens, 16)
    steps = {
        "filter": lambda: plans.filter(yes),
        "peek": lambda: plans.peek(30),
        "regex": lambda: plans.filter(plans.Pattern("spam|read 3")),
        "map": lambda: plans.map(text),
        "reduce": lambda: plans.reduce(text),
        "concat": plans.concat,
        "ask": lambda: plans.ask(text),
    }
    context = lines(num) + "end of the text\n"
    try:
        plan = plans.split("lines", tokens, overlap=overlap)
        for name in names:
            plan |= steps[name]()
        cost = plan.cost(context, "openai:gpt-4.1-mini", QUESTION)
    except ConfigError:
        hypothesis.reject()  # refused before any call
    result, client = answered(plan, context, limits=Limits(max_calls=100_000))
    assert result.stop is Stop.FINAL
    assert len(client.requests) <= cost.calls
    assert not cost.is_exact or len(client.requests) == cost.calls
    assert result.usage.total_tokens <= cost.tokens
    (split, *_) = plan.steps
    num_parts = len(split.parts(context))  # type: ignore[union-attr]
    tree = sum(step.calls for step in cost.steps if step.step.startswith(("reduce", "ask")))
    passes = sum(step.startswith(("map", "filter")) for step in (s.step for s in cost.steps))
    assert len(client.requests) <= passes * num_parts + tree


def test_a_plan_beyond_the_budget_is_refused_before_any_call() -> None:
    client = ScriptedClient(reply, price=Price(10.0, 10.0))
    plan = plans.classify(LABELS, SMALL)
    for limits, message in (
        (Limits(max_calls=3), r"may take 9 calls, and the limit is 3 calls: raise max_calls"),
        (Limits(max_tokens=1000), r"may take [\d,]+ tokens, and the limit is 1,000 tokens"),
        (Limits(max_cost=0.01), r"may take \$0\.\d\d, and the limit is \$0\.01: raise max_cost"),
    ):
        with pytest.raises(ConfigError, match=message):
            answered(plan, lines(100), client, limits=limits)
    with pytest.raises(ConfigError, match=r"the line at line 2 .* has 3,001 bytes.*--cut"):
        answered(plan, "a\n" + "b" * 3000 + "\n", client)
    with pytest.raises(ConfigError, match="cannot be combined with citations"), RLM(client) as rlm:
        rlm.completion("a", QUESTION, strategy=plans.PlanStrategy(plan), cite=True)
    assert client.requests == []


def test_a_leaf_that_keeps_violating_its_schema_fails_alone() -> None:
    def script(messages: Any) -> str:
        return "I will not." if "\n1: 12 " in messages[0].content else reply(messages)

    result, client = answered(plans.classify(LABELS, SMALL), lines(36), script)
    assert result.answer == ["spam", "ham", "ham"] * 4 + [None] * 12 + ["spam", "ham", "ham"] * 4
    assert result.error is not None
    assert result.error.startswith("1 of 3 leaves failed")
    assert "label: lines 13-24: after 3 replies" in result.error
    assert len(client.requests) == 5
    counted, _ = answered(plans.aggregate(LABELS, SMALL, answers=False), lines(36), script)
    assert counted.answer == {"ham": 16, "spam": 8}


def test_a_plan_whose_leaves_all_fail_has_no_answer() -> None:
    with pytest.raises(RamifyError, match="all 3 leaves failed; the first: label: lines 1-12"):
        answered(plans.classify(LABELS, SMALL), lines(36), lambda _: "no")


def test_a_wrong_number_of_labels_is_asked_again() -> None:
    answers = [json.dumps(["spam"]), json.dumps(["spam", "ham"])]
    result, client = answered(plans.classify(LABELS, SMALL), "a\nb\n", answers)
    assert result.answer == ["spam", "ham"]
    assert "there are 1 values, and 2 records" in client.requests[1].messages[-1].content


def test_nothing_found_is_said() -> None:
    result, _ = answered(ready("search"), "ham\n" * 10)
    assert result.answer is None
    assert result.error == "the plan found no answer in the context"


def test_a_limit_ends_the_asking_and_the_rest_is_computed() -> None:
    """Repairs are not in the plan's number of calls, so they can use up the limit."""
    client = ScriptedClient(lambda m: "no" if len(m) == 1 else reply(m[:1]))
    plan = plans.aggregate(LABELS, SMALL, answers=False)
    limits = Limits(max_calls=10, max_concurrency=1)
    result, _ = answered(plan, lines(100), client, limits=limits)
    assert result.stop is Stop.MAX_CALLS
    assert len(client.requests) == 10
    assert sum(result.answer.values()) == 60
    assert result.error is not None
    assert result.error.startswith("4 of 9 leaves failed")


def test_a_run_past_its_limit_continues_with_a_higher_one() -> None:
    client = ScriptedClient(lambda m: "no" if len(m) == 1 else reply(m[:1]))
    plan, store = plans.aggregate(LABELS, SMALL, answers=False), MemoryStore()
    strategy = plans.PlanStrategy(plan)
    with RLM(client, store=store, limits=Limits(max_calls=10)) as rlm:
        first = rlm.completion(lines(100), QUESTION, strategy=strategy)
        again = rlm.resume(first.run_id, limits=Limits(max_calls=40))
    assert first.stop is Stop.MAX_CALLS
    assert (again.stop, again.answer) == (Stop.FINAL, {"ham": 66, "spam": 34})
    assert len(client.requests) == 18
    assert again.usage.calls == 18
    assert store.load(first.run_id).answer == again.answer


def test_a_run_that_is_killed_anywhere_resumes_and_pays_no_leaf_twice(tmp_path: Path) -> None:
    """The journal is cut after each of its lines, as a kill cuts it."""
    plan, text = plans.summarise(SMALL, "lines"), lines(50)
    store, limits = Store(tmp_path), Limits(max_concurrency=3)
    client = ScriptedClient(reply)
    with RLM(client, store=store, limits=limits) as rlm:
        whole = rlm.completion(text, QUESTION, strategy=plans.PlanStrategy(plan))
        assert rlm.replay(whole.run_id).answer == whole.answer
    assert len(client.requests) == plan.cost(text, client, QUESTION).calls == 8
    (journal,) = (tmp_path / "runs").glob("*.jsonl")
    recorded = journal.read_bytes().splitlines(keepends=True)
    for num_lines in range(1, len(recorded)):
        journal.write_bytes(b"".join(recorded[:num_lines]))
        num_paid = sum(b'"type":"Replied"' in line for line in recorded[:num_lines])
        after = ScriptedClient(reply)
        with RLM(after, store=store, limits=limits) as rlm:
            result = rlm.resume(whole.run_id)
        assert (result.answer, result.stop) == (whole.answer, Stop.FINAL)
        assert num_paid + len(after.requests) == 8


def test_a_strategy_of_the_user_is_given_again() -> None:
    async def strategy(calls: Any) -> Any:
        return await plans.PlanStrategy(plans.classify(LABELS, SMALL))(calls)

    store = MemoryStore()
    with RLM(ScriptedClient(reply), store=store) as rlm:
        first = rlm.completion(lines(12), QUESTION, strategy=strategy)
        assert rlm.replay(first.run_id, strategy=strategy).answer == first.answer
        with pytest.raises(ConfigError, match="pass the same strategy= again"):
            rlm.replay(first.run_id)


def test_the_answer_has_the_type_that_was_asked_for() -> None:
    strategy = plans.PlanStrategy(plans.classify(LABELS, SMALL))
    with RLM(ScriptedClient(reply)) as rlm:
        result = rlm.completion(lines(3), QUESTION, strategy=strategy, answer_type=tuple[str, ...])
        assert result.answer == ("spam", "ham", "ham")
        with pytest.raises(RamifyError, match="does not fit the requested type"):
            rlm.completion(lines(3), QUESTION, strategy=strategy, answer_type=int)


def test_leaves_run_at_the_concurrency_of_the_run() -> None:
    _, client = answered(
        plans.classify(LABELS, SMALL),
        lines(240),
        ScriptedClient(reply, latency_s=0.01),
        limits=Limits(max_concurrency=5),
    )
    assert client.most_in_flight == 5


def test_the_sub_model_answers_leaves() -> None:
    small = ScriptedClient(reply, name="scripted:small")
    result, root = answered(plans.classify(LABELS, SMALL), lines(3), [], sub_model=small)
    assert (len(root.requests), len(small.requests)) == (0, 1)
    assert result.trajectory.calls[1].model == "scripted:small"


def test_a_filter_by_bm25_keeps_the_best_parts() -> None:
    pytest.importorskip("tantivy")
    text = lines(200) + "the launch code is 4711 spam\n" + lines(200)
    leaf = plans.Leaf("Answer: {question}", None, SMALL, 100)
    plan = plans.split("lines", SMALL) | plans.filter(plans.Relevance(2)) | plans.map(leaf)
    question = "What is the launch code?"
    assert plan.cost(text, "openai:gpt-5-mini", question).calls == 1
    _, client = answered(plan, text, question=question)
    assert "launch code is 4711" in client.requests[0].messages[0].content


def test_a_leaf_gets_its_question_and_peeks_only_in_filters() -> None:
    yes = plans.Leaf("Is it for {question}", {"type": "boolean"}, SMALL, 16, label="yes")
    text = plans.Leaf("Read for {question}", None, SMALL, 50, label="read")
    plan = plans.split("lines", SMALL) | plans.peek(20) | plans.filter(yes) | plans.map(text)
    _, client = answered(plan, lines(12), question="{question} {0}?")
    first, second = (request.messages[0].content for request in client.requests)
    assert first.startswith("Is it for {question} {0}?\n\n[lines 1-12]\n0 spam")
    assert first.count("\nThe answer must") == 1
    assert "11 ham" not in first
    assert "11 ham" in second


def test_an_answer_is_bounded_also_as_json() -> None:
    """Counts have texts as keys, where a quote takes two bytes."""
    leaf = plans.Leaf("Say it.", None, SMALL, 20, label="say")
    last = plans.Leaf("Combine.", None, 200, 20, label="last")
    plan = plans.split("lines", SMALL) | plans.map(leaf) | plans.count() | plans.top(3)
    _, client = answered(plan | plans.ask(last), lines(20), lambda _: 70 * '"')
    (counted,) = (r for r in client.requests if r.messages[0].content.startswith("Combine."))
    assert counted.messages[0].content == 'Combine.\n\n{"' + 57 * '\\"' + '…":2}'


def test_a_reply_that_is_cut_names_the_bound_of_its_leaf() -> None:
    leaf = plans.Leaf("Say it.", None, SMALL, 20, label="say")
    plan = plans.split("lines", SMALL) | plans.map(leaf)
    with pytest.raises(
        RamifyError, match=r"cut at its limit of 20 tokens.*reply_tokens of the leaf"
    ):
        answered(plan, lines(3), lambda _: "word " * 100)
