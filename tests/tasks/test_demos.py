"""Ledger demonstrations: the demonstrator's replies, its accuracy, and agreement with the
engine."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator

import pytest

from ramify import RLM, Limits, SandboxSpec
from ramify.engine.prompt_scaffold import TINY
from ramify.tasks.base import Item, score_trajectory
from ramify.tasks.ledger.ledger_rows import KINDS
from ramify.tasks.ledger.scripted_demonstrator import (
    EXPERT,
    NOISY,
    LedgerCallDemonstration,
    LedgerDemonstrator,
    LedgerMistakeRates,
    demonstrations,
    simulate_demonstration,
)
from ramify.tasks.ledger.task import documents_of, ledger
from ramify.train.data.sft_data import prompt_format
from ramify.types.trajectory import Trajectory

TEXTS = prompt_format(TINY)
SINGLE, SEVERAL = ledger(), ledger(multi=1.0)


def items(task: object, num: int, split: str = "train") -> list[Item]:
    return list(itertools.islice(task.splits[split], num))  # type: ignore[attr-defined]


def of_kind(task: object, kind: str) -> Item:
    return next(item for item in task.splits["test"] if item.kind == kind)  # type: ignore[attr-defined]


def contents(conversation: LedgerCallDemonstration) -> list[str]:
    return [message.content for message in conversation.messages]


def test_expert_demonstration_over_one_document() -> None:
    item = of_kind(SINGLE, "sum")
    (root,) = simulate_demonstration(item, EXPERT, 0, TEXTS)
    label = item.question.split("'")[1]
    first, look, shown, code, result, final = contents(root)
    assert (first, look, shown) == (
        f"{item.question}\nlen {len(item.context)}",
        "print(context[:70])",
        item.context[:70].rstrip("\n"),
    )
    assert f"=='{label}')\nprint(r)" in code
    assert (result, final, root.answer, root.correct) == (
        str(item.gold),
        "FINAL(r)",
        item.gold,
        True,
    )


def test_expert_demonstration_over_several_documents() -> None:
    item = of_kind(SEVERAL, "multi max")
    root, *children = simulate_demonstration(item, EXPERT, 0, TEXTS)
    mark, sub_question = item.metadata["mark"], item.question.removesuffix(" in all docs")
    assert contents(root)[3] == (
        f"P=context[4:].split('\\n{mark}\\n')\nA=rlm_query_batched([\"{sub_question}\"]*len(P),P)\nr=max(A)\nprint(r)"
    )
    parts = item.context[4:].split(f"\n{mark}\n")
    assert [child.call for child in children] == [f"0.{index}" for index in range(len(parts))]
    assert [contents(child)[0] for child in children] == [
        f"{sub_question}\nlen {len(part)}" for part in parts
    ]
    assert max(child.answer for child in children) == root.answer == item.gold


@pytest.mark.parametrize("task", [SINGLE, SEVERAL], ids=["single", "several"])
def test_expert_is_always_right(task: object) -> None:
    for split in task.splits:  # type: ignore[attr-defined]
        for calls in demonstrations(items(task, 60, split), EXPERT, 0, TEXTS):
            assert all(call.correct for call in calls), calls[0].item


@pytest.mark.parametrize("is_on", [True, False])
def test_demonstrations_restore_garbage_collection(is_on: bool) -> None:
    """Between demonstrations, after the last one, and after a failure."""

    def failing() -> Iterator[Item]:
        yield from items(SEVERAL, 2)
        raise OSError("no more items")

    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        shown = demonstrations(items(SINGLE, 3), EXPERT, 0, TEXTS)
        found = [(gc.isenabled(), len(calls)) for calls in shown]
        assert (found, gc.isenabled()) == ([(is_on, 1)] * 3, is_on)
        with pytest.raises(OSError, match="no more items"):
            list(demonstrations(failing(), EXPERT, 0, TEXTS))
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_noisy_demonstrator_has_the_expected_accuracy() -> None:
    """Right for a third of single documents and rarely for several; both occur in every kind."""

    def right(task: object) -> list[tuple[str, bool]]:
        asked = items(task, 1500)
        played = demonstrations(asked, NOISY, 0, TEXTS)
        return [(item.kind, calls[0].correct) for item, calls in zip(asked, played, strict=True)]

    single, several = right(SINGLE), right(SEVERAL)
    assert 0.28 < sum(ok for _, ok in single) / len(single) < 0.40
    assert 0.01 < sum(ok for _, ok in several) / len(several) < 0.10
    for kind, outcomes in itertools.groupby(sorted(single), key=lambda each: each[0]):
        share = [ok for _, ok in outcomes]
        assert 0.15 < sum(share) / len(share) < 0.6, kind


@pytest.mark.parametrize("kind", KINDS)
def test_code_for_every_kind_names_the_columns_in_the_same_place(kind: str) -> None:
    """So that learning to read a format for one kind helps for all kinds; see "the count collapse"
    in the log."""
    for item in items(ledger(kinds=(kind,)), 30):
        (document,) = documents_of(item)
        code = contents(simulate_demonstration(item, EXPERT, 0, TEXTS)[0])[3]
        names = ",".join("ulq"[field] for field in document.format.field_order)
        assert f"R=[l.split('{document.format.separator}') for l in context.splitlines()" in code
        assert f" for {names} in R" in code


def test_demonstrations_depend_only_on_item_and_seed() -> None:
    asked = items(SEVERAL, 5)
    again = list(demonstrations(reversed(asked), NOISY, 3, TEXTS))[::-1]
    assert again == list(demonstrations(asked, NOISY, 3, TEXTS))
    assert again != list(demonstrations(asked, NOISY, 4, TEXTS))


# --- comparison with the engine


def run_in_engine(item: Item, habits: LedgerMistakeRates, seed: int) -> Trajectory:
    async def run() -> Trajectory:
        spec = SandboxSpec(provider="process", allow_weaker=True)
        model = LedgerDemonstrator(item, habits, seed)
        async with RLM(model, scaffold="tiny", limits=Limits(max_turns=8), sandbox=spec) as rlm:
            start = await SINGLE.prepare(item)
            return (await rlm.start(start, item.question).result()).trajectory

    return asyncio.run(run())


def sample() -> Iterator[tuple[Item, LedgerMistakeRates]]:
    """Yield items for each strategy, with and without errors."""
    yield from ((item, NOISY) for item in items(SINGLE, 6))
    yield from ((item, NOISY) for item in items(SEVERAL, 10))
    yield of_kind(SEVERAL, "multi sum"), EXPERT
    yield (
        of_kind(SEVERAL, "multi count"),
        LedgerMistakeRates(recurses=0.0, delegates_whole=1.0),
    )


@pytest.mark.parametrize(
    ("item", "habits"), list(sample()), ids=lambda each: each.id if isinstance(each, Item) else ""
)
def test_played_demonstration_matches_the_engine(item: Item, habits: LedgerMistakeRates) -> None:
    """Same messages in every call, same answers, and call rewards that agree with ``play``."""
    trajectory = score_trajectory(SINGLE, item, run_in_engine(item, habits, 0))
    played = simulate_demonstration(item, habits, 0, TEXTS)
    assert [call.id for call in trajectory.walk()] == [each.call for each in played]
    for call, each in zip(trajectory.walk(), played, strict=True):
        assert tuple(trajectory.conversation(call)) == each.messages
        assert call.answer == each.answer
    assert trajectory.rewards == {"correct": float(played[0].correct)}
    known = {id: bool(rewards["correct"]) for id, rewards in trajectory.call_rewards.items()}
    assert known == {each.call: each.correct for each in played if each.call in known}
    assert all(not each.correct for each in played if each.call not in known)
