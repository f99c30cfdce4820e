"""Signals combined into advantages: the worked examples E1 to E4, and properties that hold for
any signals."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import Item
from ramify.train.advantages.base import AssignedRollout, AssignedStep, TokenCredit
from ramify.train.advantages.group_estimators import GRPO, DrGRPO
from ramify.train.advantages.token_arithmetic import early_first, step_index
from ramify.train.data.compile import token_sequences
from ramify.train.losses import PpoClip
from ramify.train.losses.distil_losses import forward_kl, reverse_kl, surrogate
from ramify.train.losses.loss import LossEntries, LossSpec, compute, kl_estimate, per_entry
from ramify.train.signals.base import SignalContext, SignalScore, TopKCandidates
from ramify.train.signals.compose import Hybrid, HybridAlgorithm
from ramify.train.signals.outcome import OutcomeSignal, shaped
from ramify.train.signals.weighted_term import AnnealSchedule, HybridTerm
from ramify.types.message import Message, Reply, ToolCall
from ramify.types.trajectory import Annotation, Call, Cell, Group, Parent, Stop, Trajectory, Turn


def rollout(id: str, *sampled: int, reward: float | None = 0.0, given: int = 2) -> Trajectory:
    """Return a root with one turn per number in ``sampled``: that many sampled tokens after
    ``given`` prompt tokens."""
    turns, before = [], 0
    for num in sampled:
        ids = tuple(range(10, 10 + num))
        reply = Reply(
            Message("assistant", "x"),
            prompt_ids=tuple(range(1, given + 1)),
            token_ids=ids,
            logprobs=(-0.5,) * num,
        )
        turns.append(Turn(0, (Message("user", "go on"),), reply, reused_ids=before))
        before += given + num
    call = Call("0", "rlm", "test:m", 0, "?", turns=turns, stop=Stop.FINAL)
    return Trajectory(
        id, "?", task="t/0", calls=[call], rewards={} if reward is None else {"correct": reward}
    )


def group(*rewards: float | None, sampled: tuple[int, ...] = (2, 1)) -> Group:
    return Group(
        "t/0",
        [rollout(f"r{index}", *sampled, reward=reward) for index, reward in enumerate(rewards)],
    )


def advantages(assigned: AssignedStep) -> dict[str, list[float]]:
    """Return trajectory id -> advantages of all its tokens, in order."""
    return {
        each.trajectory.id: [
            value for place in sorted(each.credits) for value in each.credits[place].advantages
        ]
        for each in assigned.rollouts
    }


def read(outcome: OutcomeSignal, one: Group) -> list[SignalScore]:
    context = SignalContext(step=0, items={"t/0": Item("?", gold="7", id="t/0")})
    return asyncio.run(outcome.read(one, context))


# --- E1 to E4
# --------------------------------------------------------------------------------------------------------


def tool_rollout(id: str, right: bool, num_tools: int) -> Trajectory:
    found = rollout(id, *[1] * (num_tools + 1), reward=float(right))
    turns = found.calls[0].turns
    for index in range(num_tools):
        calls = (ToolCall("c", "python", "{}"),)
        message = Message("assistant", "x", tool_calls=calls)
        turns[index] = msgspec.structs.replace(
            turns[index], reply=msgspec.structs.replace(turns[index].reply, message=message)
        )
    return found


def test_e1_outcome_shaping_and_group_baselines() -> None:
    assert [shaped(True, 9), *(shaped(False, k) for k in (0, 2, 4, 12))] == pytest.approx(
        [1, -1.1, -1, -0.9, -0.6]
    )
    one = Group(
        "t/0", [tool_rollout("a", True, 3), *(tool_rollout(f"{k}", False, k) for k in (0, 4, 12))]
    )
    found = read(OutcomeSignal(), one)
    assert [each.outcome for each in found] == pytest.approx([1, -1.1, -0.9, -0.6])
    readings = {"outcome": {t.id: r for t, r in zip(one.trajectories, found, strict=True)}}
    for algorithm, expected in (
        (GRPO(), [1.464917, -0.732458, -0.523185, -0.209274]),
        (DrGRPO(), [1.4, -0.7, -0.5, -0.2]),
    ):
        assigned = Hybrid(outcome=algorithm).with_readings(readings, 0).assign_advantages([one], {})
        assert [row[0] for row in advantages(assigned).values()] == pytest.approx(
            expected, abs=1e-5
        )
        assert abs(sum(row[0] for row in advantages(assigned).values())) < 1e-12
    equal = Hybrid(outcome=GRPO()).assign_advantages([group(1, 1)], {})
    assert (equal.rollouts, equal.no_signal != "") == ([], True)


def test_e2_step_buckets() -> None:
    process = {"r0": [1, 1], "r1": [-1, 1, -1], "r2": [1, -1]}
    outcomes = {"r0": 1.0, "r1": -1.0, "r2": -1.0}
    rows = [{s: o + p for s, p in enumerate(process[id])} for id, o in outcomes.items()]
    expected = [[1.224744, 1.224744], [-1.224744, 0, 0], [0, -1.224744]]
    assert [list(row.values()) for row in step_index(rows)] == [
        pytest.approx(row, abs=1e-6) for row in expected
    ]
    one = Group(
        "t/0", [rollout(id, *[2] * len(process[id]), reward=outcomes[id]) for id in process]
    )
    readings = {
        "process": {
            id: SignalScore(turns={("0", s): float(p) for s, p in enumerate(row)})
            for id, row in process.items()
        }
    }
    hybrid = Hybrid(
        w_rl=0.0, terms=(HybridTerm(signal="process", norm="step_index", plus_outcome=1.0),)
    )
    found = hybrid.with_readings(readings, 0).assign_advantages([one], {}, every_token=True)
    assert advantages(found)["r0"] == pytest.approx([1.224744] * 4, abs=1e-6)
    assert advantages(found)["r1"] == pytest.approx([-1.224744] * 2 + [0.0] * 4, abs=1e-6)
    # Spans [0,3) and [5,7) of a path of 7, observation at 3 and 4.
    spans = rollout("r0", 3, 2, given=2)
    spans.calls[0].turns[0] = msgspec.structs.replace(
        spans.calls[0].turns[0],
        reply=msgspec.structs.replace(spans.calls[0].turns[0].reply, prompt_ids=(9,)),
    )
    spans.calls[0].turns[1] = msgspec.structs.replace(spans.calls[0].turns[1], reused_ids=4)
    one.trajectories[0] = spans
    spans.rewards = {"correct": 1.0}
    row = token_sequences(
        hybrid.with_readings(readings, 0).assign_advantages([one], {}).rollouts[:1]
    )[0]
    assert row.advantages[1:].tolist() == pytest.approx(
        [1.224744] * 3 + [0, 0] + [1.224744] * 2, abs=1e-6
    )


P_OLD, P_T = np.array([0.5, 0.2, 0.9]), np.array([0.5, 0.8, 0.01])


def test_e3_teacher_hybrid_surrogate_and_kl() -> None:
    gaps = (np.log(P_T) - np.log(P_OLD)).tolist()
    assert gaps == pytest.approx([0, 1.386294, -4.499810], abs=1e-6)
    pair = [rollout("a", 3, reward=0.0), rollout("b", 3, reward=1.0)]
    readings = {
        "teacher": {"a": SignalScore(tokens={("0", 0): gaps}, notes={("0", 0): "w3 needs f7"})}
    }
    hybrid = Hybrid(
        outcome=DrGRPO(), terms=(HybridTerm(signal="teacher", clip=2.0, route="hinted"),)
    )
    found = hybrid.with_readings(readings, 0).assign_advantages([Group("t/0", pair)], {})
    assert advantages(found)["a"] == pytest.approx([-0.5, 0.886294, -2.5], abs=1e-6)
    assert advantages(found)["b"] == pytest.approx([0.5] * 3)
    a = torch.tensor(advantages(found)["a"], dtype=torch.float64)
    old, now = np.log(P_OLD), np.log([0.5, 0.3, 0.45])
    entries = LossEntries(
        torch.tensor(now),
        {
            "sampler_logprobs": torch.tensor(old),
            "advantages": a,
            "rl": torch.ones(3).double(),
            "ref_logprobs": torch.tensor(np.log([0.4, 0.2, 0.9])),
        },
        {"rl": 3.0},
    )
    loss = LossSpec(policy=PpoClip())
    assert (per_entry(loss, entries) * 3).tolist() == pytest.approx([0.5, -1.134457, 2.0], abs=1e-6)
    k3 = kl_estimate("k3", entries.logprobs, entries.streams["ref_logprobs"])
    assert k3.tolist() == pytest.approx([0.023144, 0.072132, 0.306853], abs=1e-6)
    assert float(k3.mean()) == pytest.approx(0.134043, abs=1e-6)
    assert float(compute(loss, entries)[0]) == pytest.approx(0.455181, abs=1e-6)
    assert float(
        compute(LossSpec(policy=PpoClip(), kl_beta=0.01, kl="k3"), entries)[0]
    ) == pytest.approx(0.456521, abs=1e-6)


def test_e4_kl_over_whole_distributions() -> None:
    s, t = (torch.tensor(np.log([p])) for p in ([0.6, 0.3, 0.1], [0.2, 0.7, 0.1]))
    assert float(reverse_kl(t, s)) == pytest.approx(0.404978, abs=1e-6)
    assert float(forward_kl(t, s)) == pytest.approx(0.373386, abs=1e-6)
    assert float(surrogate(t[:, :2], s[:, :2], s[:, :2])) == pytest.approx(0.384234, abs=1e-6)
    # The first two and a bin for the third: the same here, and more than on the two alone.
    assert float(reverse_kl(t[:, :2], s[:, :2])) == pytest.approx(0.404978, abs=1e-6)
    assert 1 - math.comb(13, 8) / math.comb(16, 8) == pytest.approx(0.9)


def test_reverse_kl_has_the_gradient_of_the_whole_vocabulary() -> None:
    """d KL / d z_v = p_v (log p_v - log p_T,v - KL), with all tokens among the candidates."""
    z = torch.tensor([[0.3, -0.2, 0.9, 0.0]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[0.1, 0.5, -1.0, 0.2]], dtype=torch.float64).log_softmax(-1)
    s = z.log_softmax(-1)
    value = reverse_kl(t, s)
    value.sum().backward()
    expected = s.exp() * (s - t - value[:, None])
    assert torch.allclose(z.grad, expected.detach(), atol=1e-7)


def test_surrogate_is_clipped_on_both_sides_and_only_now_has_a_gradient() -> None:
    old = torch.log(torch.tensor([[0.5, 0.5]], dtype=torch.float64)).requires_grad_()
    now = torch.log(torch.tensor([[0.9, 0.2]], dtype=torch.float64)).requires_grad_()
    t = torch.log(torch.tensor([[0.9, 0.001]], dtype=torch.float64))
    value = surrogate(t, old, now, clip=2.0)
    up, down = math.log(0.9 / 0.5) / 2, -2.0 / 2
    assert float(value.detach()) == pytest.approx(-up * 1.28 + -down * 0.8)
    value.sum().backward()
    assert old.grad is None
    assert now.grad is not None and float(now.grad.abs().sum()) == 0  # noqa: PT018


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
    assert (
        weights["r0"] == [1 / 1000] * 2
    )  # the same weight as the outcome's algorithm gives each token


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
    assert [hybrid.wants("teacher", step) for step in (3, 4)] == [True, False]
    assert hybrid.wants("format", 9)  # a signal without a term is read for its metrics


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
    assert early_first([1, 1, 2], 0.5) == [1.5, 1.375, 1.25 * 2]
    assert early_first([0, 0], 0.5) == [0, 0]
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
                AssignedRollout(
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
    assert rows[0].kd.tolist() == pytest.approx([0, 0, 5e-4, 5e-4, 0, 0, 0])
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
    assert isinstance(Hybrid().with_readings({}, 0), HybridAlgorithm)


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
    from ramify.train.signals.judge_calls import put_on_tree

    one = rollout("r0", 2, reward=1)
    turn = one.calls[0].turns[0]
    asked = Call(
        "", "judge", "test:j", 1, "process of turn 0", parent=Parent("0", 0, 0), turns=[turn]
    )
    put_on_tree(
        one,
        {"process": SignalScore(turns={("0", 0): 1.0}, notes={("0", 0): "because"}, calls=[asked])},
    )
    assert [call.id for call in one.calls] == ["0", "0.0"]
    assert one.marks == [Annotation("process", "0", 0, {"process": 1.0}, text="because")]
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
    from ramify.train.signals.judge_calls import put_on_tree

    one = rollout("r0", 2, 2, reward=1)
    teacher = SignalScore(
        tokens={("0", 0): [0.123456, -0.5], ("0", 1): [math.nan, 1.0]},
        notes={("0", 1): "add first"},
    )
    put_on_tree(
        one,
        {
            "teacher": teacher,
            "outcome": SignalScore(outcome=-0.9),
            "process": SignalScore(turns={("0", 0): math.inf}),
        },
    )
    assert one.marks == [
        Annotation(
            "teacher",
            "0",
            0,
            {"mean of its tokens": pytest.approx(-0.188272)},
            {"teacher": [0.1235, -0.5]},
        ),
        Annotation("teacher", "0", 1, text="add first"),
        Annotation("outcome", "0", values={"outcome": -0.9}),
    ]
    assert msgspec.json.decode(msgspec.json.encode(one), type=Trajectory).marks[1:] == one.marks[1:]


def test_tool_use_and_format_signals_score_turns() -> None:
    from ramify.train.signals.outcome import FormatSignal, ToolUseSignal

    one = rollout("r0", 1, 1, 1)
    turns = one.calls[0].turns
    turns[0] = msgspec.structs.replace(turns[0], cells=(Cell("x", error="NameError: x"),))
    turns[1] = msgspec.structs.replace(turns[1], cells=(Cell("1"),))
    context = SignalContext(step=0, items={})
    found = asyncio.run(ToolUseSignal().read(Group("t/0", [one]), context))[0]
    assert found.turns == {("0", 0): -1.0, ("0", 1): 1.0}
    formed = asyncio.run(
        FormatSignal(pattern="^x$", last="boxed").read(Group("t/0", [one]), context)
    )[0]
    assert formed.turns == {("0", 0): 0.0, ("0", 1): 0.0, ("0", 2): -1.0}
    with pytest.raises(ConfigError, match="is not a regular expression"):
        FormatSignal(pattern="(")
