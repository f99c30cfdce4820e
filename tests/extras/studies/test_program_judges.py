"""Rule-based judges of programs: hints from errors that a rollout saw, votes per turn, and the
shuffled control."""

from __future__ import annotations

import asyncio
from typing import Any

from ramify.extras.studies.hindsight_hints import HindsightHints, HintAcceptanceRules
from ramify.extras.studies.programs.judges import (
    OracleJudge,
    ProgramErrorJudge,
    RuleHintJudge,
    ShuffledHints,
)
from ramify.extras.studies.programs.toy_program_language import (
    IMPORTED,
    NUM_CHECKED,
    NUM_WORDS,
    ProgramWritingExercise,
    generate_word_functions,
)
from ramify.tasks.base import Item, task_of
from ramify.train.signals.base import JudgeVerdict, JudgeView, SignalContext, build_judge_view
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Cell, Group, Stop, Trajectory, Turn

RIGHT = dict(enumerate(generate_word_functions().right))


def trajectory(item: Item, *rounds: tuple[str, str, bool]) -> Trajectory:
    """Return a trajectory of (reply, observation, raised) rounds and a final reply."""
    turns, prompt = [], item.question
    for reply, shown, raised in [*rounds, ("FINAL(1)", "", False)]:
        cell = Cell(reply, error=shown) if raised else Cell(reply, value=shown)
        turns.append(
            Turn(
                2 * len(turns),
                (Message("user", prompt),),
                Reply(Message("assistant", reply)),
                (cell,),
            )
        )
        prompt = shown
    call = Call("0", "rlm", "m", 0, item.question, turns=turns, stop=Stop.FINAL)
    return Trajectory(
        f"t/{item.id}",
        item.question,
        task=item.id,
        calls=[call],
        rewards={"correct": 0.0},
        stop=Stop.FINAL,
    )


def judged(judge: Any, found: Trajectory, item: Item, turn: int | None = None) -> JudgeVerdict:
    view: JudgeView = build_judge_view(found, found.root, turn, item)
    return asyncio.run(judge.judge(view))  # type: ignore[no-any-return]


def checked_problem(index: int = 0) -> tuple[Item, str, int]:
    """Return an item, a program with the wrong function for one checked word, and that word."""
    for item in task_of("programs").splits["train"][index : index + 100]:
        problem = ProgramWritingExercise.parse(item.question)
        assert problem is not None
        word = next(
            (w for w, _ in problem.steps if w < NUM_CHECKED and RIGHT[w] not in IMPORTED), None
        )
        if word is not None and not {RIGHT[w] for w, _ in problem.steps} & set(IMPORTED):
            wrong = next(f for f in range(NUM_WORDS) if f != RIGHT[word] and f not in IMPORTED)
            return item, problem.program_for_meanings({**RIGHT, word: wrong}).text, word
    raise AssertionError


def test_rule_judge_hints_at_the_function_named_in_the_error() -> None:
    item, code, word = checked_problem()
    error = f"TypeError: not @w{word}@f0 but @w{word}@f{RIGHT[word]}"
    failed = trajectory(item, (code, error, True))
    verdict = judged(RuleHintJudge(), failed, item)
    assert (verdict.accept, verdict.hint) == (True, f"use @w{word}@f{RIGHT[word]}")
    assert not HintAcceptanceRules(min_chars=5).rejects(verdict.hint, item, item.question)
    assert judged(OracleJudge(), failed, item).hint == verdict.hint
    assert not judged(
        RuleHintJudge(), trajectory(item, (code, "17", False)), item
    ).accept  # no error was shown


def test_oracle_judge_finds_mistakes_that_raised_no_error() -> None:
    item, code, word = checked_problem()
    without_error = trajectory(item, (code, "17", False))
    assert judged(OracleJudge(), without_error, item).hint == f"use @w{word}@f{RIGHT[word]}"


def test_step_rules_vote_on_each_turn() -> None:
    item, code, _ = checked_problem()
    found = trajectory(item, (code, "TypeError: not …", True), (code, "17", False))
    assert [judged(ProgramErrorJudge(), found, item, turn).votes for turn in range(3)] == [
        (-1,),
        (1,),
        (1,),
    ]
    alone = trajectory(item)
    assert judged(ProgramErrorJudge(), alone, item, 0).votes == (
        -1,
    )  # an answer without any evidence


def test_shuffled_hints_come_from_another_problem() -> None:
    (item, code, word), (other, _, _) = checked_problem(), checked_problem(200)
    error = f"TypeError: not @w{word}@f0 but @w{word}@f{RIGHT[word]}"
    group = Group(
        item.id, [trajectory(item, (code, error, True)), trajectory(item, (code, "17", False))]
    )
    source = HindsightHints(judge=RuleHintJudge(), filter=HintAcceptanceRules(min_chars=5))
    context = SignalContext(step=3, items={item.id: item, other.id: other})
    first, second = asyncio.run(ShuffledHints(source).hints(group, context))
    (hint,) = first.at["0", 0]
    assert hint.startswith("use @w")
    about = int(hint.removeprefix("use @w").partition("@")[0])
    assert about in {w for w, _ in ProgramWritingExercise.parse(other.question).steps}  # type: ignore[union-attr]
    assert first.reading.notes == {("0", 0): hint}  # on the turn that raised
    assert not second.at
    again, _ = asyncio.run(ShuffledHints(source).hints(group, context))
    assert again.at == first.at
