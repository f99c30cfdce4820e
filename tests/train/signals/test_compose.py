"""Signals combined into advantages: the worked examples E1 to E4, and properties that hold for
any signals."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError, TrainError
from ramify.train.advantages.base import RolloutAdvantages, TokenCredit
from ramify.train.advantages.group_estimators import GRPO, DrGRPO
from ramify.train.advantages.token_arithmetic import weight_early_tokens
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.signals.base import SignalContext, SignalScore, TopKCandidates
from ramify.train.signals.signal_composition import BoundHybridAlgorithm, Hybrid
from ramify.train.signals.signal_term import AnnealSchedule, HybridTerm
from ramify.types.trajectory import Call, CallSite, Cell, Group, RunAnnotation, Trajectory
from tests.train.signals.compose_parts import advantages, group, rollout

# --- properties for any signals

WITH_TEACHER = Hybrid(terms=(HybridTerm(signal="teacher", clip=2.0),))


def teacher_score(*values: float, turn: int = 0, note: str = "a hint") -> SignalScore:
    return SignalScore(
        tokens={("0", turn): list(values)}, notes={("0", turn): note} if note else {}
    )


def test_permuting_a_group_permutes_its_advantages() -> None:
    one = group(1, 0, 0, 0.5)
    readings = {"teacher": {"r1": teacher_score(0.5, -3.0), "r3": teacher_score(1.0, turn=1)}}
    before = advantages(WITH_TEACHER.with_readings(readings, 0).assign_advantages([one], {}))
    random.Random(1).shuffle(one.trajectories)
    after = advantages(WITH_TEACHER.with_readings(readings, 0).assign_advantages([one], {}))
    assert before == after
    assert before["r1"] == pytest.approx([-0.375 + 0.5, -0.375 - 2, -0.375])


def test_prompt_tokens_get_zero_and_unscored_rollouts_get_their_outcome() -> None:
    readings = {"teacher": {"r0": teacher_score(0.5, -3.0)}}
    assigned = WITH_TEACHER.with_readings(readings, 0).assign_advantages([group(1, 0)], {})
    rows = token_sequences(assigned.rollouts)
    assert [row.advantages[~row.mask].tolist() for row in rows] == [[0.0] * 4] * 2
    assert advantages(assigned)["r1"] == [-0.5] * 3
    alone = advantages(DrGRPO().assign_advantages([group(1, 0)], {}))
    assert (
        advantages(Hybrid().assign_advantages([group(1, 0)], {})) == alone
    )  # without terms: exactly the wrapped algorithm


def test_zero_variance_group_with_a_signal_is_kept() -> None:
    groups = [group(1, 1), Group("t/1", [rollout("s0", 2, reward=1), rollout("s1", 2, reward=0)])]
    alone = DrGRPO().assign_advantages(groups, {})
    with_signal = WITH_TEACHER.with_readings(
        {"teacher": {"r0": teacher_score(1.0, 0.0)}}, 0
    ).assign_advantages(groups, {})
    assert (len(alone.rollouts), alone.denominators) == (2, {"rl": 2.0})
    assert (len(with_signal.rollouts), with_signal.denominators) == (3, {"rl": 4.0})
    assert advantages(with_signal)["r0"] == [1.0, 0.0]
    weights = {each.trajectory.id: each.credits["0", 0].rl for each in with_signal.rollouts}
    # The same weight as the outcome's algorithm gives each token: the first step divides by its own
    # mean, here of rollouts of 3, 3, 2 and 2 tokens.
    assert weights["r0"] == pytest.approx([1 / 2.5] * 2)


def test_weights_follow_their_schedule_and_signals_with_zero_weight_are_skipped() -> None:
    anneal = AnnealSchedule(1.0, 0.0, steps=4)
    assert [anneal.at(step) for step in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    assert [
        round(AnnealSchedule(2.0, 1.0, steps=4, after=2, shape="cosine").at(s), 6)
        for s in (0, 2, 4, 6)
    ] == [
        2,
        2,
        1.5,
        1,
    ]
    hybrid = Hybrid(terms=(HybridTerm(signal="teacher", weight=anneal),))
    readings = {"teacher": {"r0": teacher_score(1.0, 1.0)}}
    found = [
        advantages(hybrid.with_readings(readings, step).assign_advantages([group(1, 0)], {}))["r0"][
            0
        ]
        for step in (0, 2, 4)
    ]
    assert found == [1.5, 1.0, 0.5]
    assert [hybrid.needs_signal("teacher", step) for step in (3, 4)] == [True, False]
    assert hybrid.needs_signal("format", 9)  # a signal without a term is read for its metrics


@pytest.mark.parametrize(
    ("route", "acted"),
    [("all", ["r0", "r1", "r2"]), ("failed", ["r1", "r2"]), ("hinted", ["r0", "r1"])],
)
def test_route_selects_rollouts_that_a_term_acts_on(route: Any, acted: list[str]) -> None:
    readings = {
        "teacher": {
            "r0": teacher_score(1.0, 1.0),
            "r1": teacher_score(1.0, 1.0),
            "r2": teacher_score(1.0, 1.0, note=""),
        }
    }
    hybrid = Hybrid(w_rl=0.0, terms=(HybridTerm(signal="teacher", route=route),))
    found = hybrid.with_readings(readings, 0).assign_advantages([group(1, 0, 0)], {})
    assert sorted(advantages(found)) == acted
    assert found.metrics["teacher/acts_on"] == pytest.approx(len(acted) / 3)


def test_early_tokens_weigh_more() -> None:
    assert weight_early_tokens([1, 1, 2], 0.5) == [1.5, 1.375, 1.25 * 2]
    assert weight_early_tokens([0, 0], 0.5) == [0, 0]
    hybrid = Hybrid(w_rl=0.0, terms=(HybridTerm(signal="teacher", early=0.5),))
    found = hybrid.with_readings(
        {"teacher": {"r0": teacher_score(1.0, -1.0)}}, 0
    ).assign_advantages([group(1, 1)], {})
    assert advantages(found)["r0"] == [1.5, -1.25]


def test_non_finite_signal_is_left_out_and_its_rollout_named() -> None:
    one = group(1, 0, 0)
    readings = {
        "teacher": {"r0": teacher_score(math.nan, 1.0), "r1": teacher_score(1.0, 1.0)},
        "process": {"r2": SignalScore(turns={("0", 1): math.inf})},
    }
    hybrid = Hybrid(
        terms=(HybridTerm(signal="teacher"), HybridTerm(signal="process", norm="step_index"))
    )
    found = hybrid.with_readings(readings, 0).assign_advantages([one], {})
    assert (found.metrics["teacher/not_finite"], found.metrics["process/not_finite"]) == (1, 1)
    assert one.trajectories[0].errors == [
        "signal 'teacher' gave nan for a token of call 0, turn 0: the rollout is used without it"
    ]
    assert "inf for call 0, turn 1" in one.trajectories[2].errors[0]
    assert advantages(found)["r1"] == pytest.approx([2 / 3, 2 / 3, -1 / 3])


def test_missing_and_nan_rewards_are_left_out_of_their_group() -> None:
    one = group(1, None, math.nan, 0)
    found = advantages(DrGRPO().assign_advantages([one], {}))
    assert found == {"r0": [0.5] * 3, "r3": [-0.5] * 3}


def test_stream_of_wrong_length_is_rejected_with_both_lengths() -> None:
    with pytest.raises(
        TrainError, match="signal 'teacher', trajectory r0, call 0, turn 0: 3 numbers for 2 sampled"
    ):
        WITH_TEACHER.with_readings(
            {"teacher": {"r0": teacher_score(1.0, 1.0, 1.0)}}, 0
        ).assign_advantages([group(1, 0)], {})
    with pytest.raises(
        ValueError,
        match="trajectory r0, call 0, turn 1: a credit stream of 4 numbers for 1 sampled tokens",
    ):
        token_sequences(
            [
                RolloutAdvantages(
                    rollout("r0", 2, 1), {("0", 1): TokenCredit(advantages=[1.0] * 4, rl=[1.0] * 4)}
                )
            ]
        )


def test_teacher_whose_term_is_zero_everywhere_raises() -> None:
    with pytest.raises(TrainError, match="scored 2 hinted tokens and its term is 0 on all"):
        WITH_TEACHER.with_readings(
            {"teacher": {"r0": teacher_score(0.0, 0.0)}}, 0
        ).assign_advantages([group(1, 0)], {})


def test_metrics_show_process_reward_that_contradicts_the_outcome() -> None:
    readings = {
        "process": {
            f"r{i}": SignalScore(turns={("0", 0): p}) for i, p in enumerate((-1.0, 1.0, 1.0))
        }
    }
    found = (
        Hybrid(terms=(HybridTerm(signal="process", weight=0.3),))
        .with_readings(readings, 0)
        .assign_advantages([group(1, 0, 0)], {})
    )
    assert found.metrics["process/outcome_correlation"] == pytest.approx(-1)
    assert found.metrics["process/mean_abs"] == 1


def test_teacher_scores_become_loss_streams_with_into_loss() -> None:
    """Candidates become streams, with zeros for rollouts without any; the weights are those of the
    policy gradient."""
    top = TopKCandidates(
        [[5, 6], [6, 7]], [[-0.1, -3.0], [-0.2, -2.0]], [[-0.3, -2.0], [-0.4, -1.0]]
    )
    readings = {
        "teacher": {"r0": SignalScore(logprobs={("0", 0): [-0.1, -0.2]}, top={("0", 0): top})}
    }
    hybrid = Hybrid(terms=(HybridTerm(signal="teacher", weight=0.5, into="loss"),))
    assigned = hybrid.with_readings(readings, 0).assign_advantages([group(1, 0)], {})
    assert assigned.denominators == {"rl": 2.0, "kd": 2.0}
    rows = token_sequences(assigned.rollouts)
    assert rows[0].kd is not None
    assert rows[0].kd.tolist() == pytest.approx([0, 0, 0.5 / 3, 0.5 / 3, 0, 0, 0])
    assert rows[0].streams["teacher_ids"].tolist() == [[0, 0]] * 2 + [[5, 6], [6, 7]] + [[0, 0]] * 3
    assert rows[0].streams["student_logprobs"][3].tolist() == pytest.approx([-0.4, -1.0])
    assert not rows[1].streams["teacher_ids"].any()
    assert advantages(assigned)["r0"] == [0.5] * 3
    sampled = {"teacher": {"r0": SignalScore(logprobs={("0", 0): [-0.1, -0.2]})}}
    row = token_sequences(
        hybrid.with_readings(sampled, 0).assign_advantages([group(1, 0)], {}).rollouts
    )[0]
    assert row.streams["teacher_logprobs"].tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, 0, 0])


def test_observe_trains_on_observed_tokens_but_not_on_the_question() -> None:
    assigned = Hybrid(observe=0.1).assign_advantages([group(1, 0)], {})
    assert assigned.denominators == {"rl": 2.0, "ce": 4.0}
    row = token_sequences(assigned.rollouts)[0]  # given 2, sampled 2, given 2, sampled 1
    assert row.ce is not None
    assert row.ce.tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0])


def test_unknown_terms_and_algorithms_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match="unknown signal 'proces' in a term: did you mean 'process'"
    ):
        Hybrid(terms=(HybridTerm(signal="proces"),)).check({"process": 1, "teacher": 2})
    with pytest.raises(ConfigError, match="unknown algorithm 'gpro': did you mean 'grpo'"):
        Hybrid(outcome="gpro")
    with pytest.raises(ConfigError, match="clip=0 must be positive"):
        HybridTerm(signal="teacher", clip=0)
    assert isinstance(Hybrid(outcome={"name": "grpo", "credit": "root"}).outcome, GRPO)
    assert isinstance(Hybrid().with_readings({}, 0), BoundHybridAlgorithm)


def test_reference_logprobs_from_a_signal_become_the_ref_stream() -> None:
    """Rows of one rollout have the stream; the trainer computes it for the other."""
    one = group(1, 0, sampled=(2, 1))
    known = {("0", 0): [-0.25, -0.5], ("0", 1): [-1.0]}
    found = (
        Hybrid()
        .with_readings({"teacher": {"r1": SignalScore(reference=known)}}, 0)
        .assign_advantages([one], {})
    )
    first, second = token_sequences(found.rollouts)
    assert "ref_logprobs" not in first.streams
    assert second.streams["ref_logprobs"].tolist() == [0, 0, -0.25, -0.5, 0, 0, -1.0]
    known["0", 0].pop()
    with pytest.raises(
        TrainError,
        match="'reference', trajectory r1, call 0, turn 0: 1 numbers for 2 sampled tokens",
    ):
        Hybrid().with_readings(
            {"teacher": {"r1": SignalScore(reference=known)}}, 0
        ).assign_advantages([one], {})


def test_judge_calls_are_never_trained_on() -> None:
    from ramify.train.advantages.sft import SFT
    from ramify.train.signals.judge_calls import attach_signals_to_tree

    one = rollout("r0", 2, reward=1)
    turn = one.calls[0].turns[0]
    asked = Call(
        "", "judge", "test:j", 1, "process of turn 0", parent=CallSite("0", 0, 0), turns=[turn]
    )
    attach_signals_to_tree(
        one,
        {"process": SignalScore(turns={("0", 0): 1.0}, notes={("0", 0): "because"}, calls=[asked])},
    )
    assert [call.id for call in one.calls] == ["0", "0.0"]
    assert one.marks == [RunAnnotation("process", "0", 0, {"process": 1.0}, text="because")]
    found = SFT(llm_calls=True).assign_advantages([Group("t/0", [one])], {})
    assert list(found.rollouts[0].credits) == [("0", 0)]
    with_signal = Group("t/0", [one, rollout("r1", 2, reward=0)])
    assert {
        place
        for each in DrGRPO(llm_calls=True).assign_advantages([with_signal], {}).rollouts
        for place in each.credits
    } == {("0", 0)}


def test_signal_scores_are_annotated_on_the_calls_and_turns_they_concern() -> None:
    """A teacher's gaps are put on the tokens, its hint on the turn, a reward on the root;
    non-finite numbers are dropped."""
    from ramify.train.signals.judge_calls import attach_signals_to_tree

    one = rollout("r0", 2, 2, reward=1)
    teacher = SignalScore(
        tokens={("0", 0): [0.123456, -0.5], ("0", 1): [math.nan, 1.0]},
        notes={("0", 1): "add first"},
    )
    attach_signals_to_tree(
        one,
        {
            "teacher": teacher,
            "outcome": SignalScore(outcome=-0.9),
            "process": SignalScore(turns={("0", 0): math.inf}),
        },
    )
    assert one.marks == [
        RunAnnotation(
            "teacher",
            "0",
            0,
            {"mean of its tokens": pytest.approx(-0.188272)},
            {"teacher": [0.1235, -0.5]},
        ),
        RunAnnotation("teacher", "0", 1, text="add first"),
        RunAnnotation("outcome", "0", values={"outcome": -0.9}),
    ]
    assert msgspec.json.decode(msgspec.json.encode(one), type=Trajectory).marks[1:] == one.marks[1:]


def test_tool_use_and_format_signals_score_turns() -> None:
    from ramify.train.signals.outcome import FormatSignal, ToolErrorSignal

    one = rollout("r0", 1, 1, 1)
    turns = one.calls[0].turns
    turns[0] = msgspec.structs.replace(turns[0], cells=(Cell("x", error="NameError: x"),))
    turns[1] = msgspec.structs.replace(turns[1], cells=(Cell("1"),))
    context = SignalContext(step=0, items={})
    found = asyncio.run(ToolErrorSignal().read(Group("t/0", [one]), context))[0]
    assert found.turns == {("0", 0): -1.0, ("0", 1): 1.0}
    formed = asyncio.run(
        FormatSignal(pattern="^x$", last="boxed").read(Group("t/0", [one]), context)
    )[0]
    assert formed.turns == {("0", 0): 0.0, ("0", 1): 0.0, ("0", 2): -1.0}
    with pytest.raises(ConfigError, match="is not a regular expression"):
        FormatSignal(pattern="(")
