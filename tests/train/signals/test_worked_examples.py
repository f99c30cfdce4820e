"""The worked examples E1 to E4 of the composition, and the gradients of its losses."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from ramify.train.advantages.group_estimators import GRPO, DrGRPO
from ramify.train.advantages.token_arithmetic import normalise_by_step
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.losses import PpoClip
from ramify.train.losses.distil_losses import clipped_ppo_surrogate, forward_kl, reverse_kl
from ramify.train.losses.total_loss import (
    BatchLossInputs,
    LossSpec,
    compute,
    kl_estimate,
    loss_per_entry,
)
from ramify.train.signals.base import SignalScore
from ramify.train.signals.outcome import OutcomeSignal, tool_count_shaped_reward
from ramify.train.signals.signal_composition import Hybrid
from ramify.train.signals.signal_term import HybridTerm
from ramify.types.message import Message, ToolCall
from ramify.types.trajectory import Group, Trajectory
from tests.train.signals.compose_parts import advantages, group, read, rollout

P_OLD, P_T = np.array([0.5, 0.2, 0.9]), np.array([0.5, 0.8, 0.01])


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
    assert [
        tool_count_shaped_reward(True, 9),
        *(tool_count_shaped_reward(False, k) for k in (0, 2, 4, 12)),
    ] == pytest.approx([1, -1.1, -1, -0.9, -0.6])
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
    assert [list(row.values()) for row in normalise_by_step(rows)] == [
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
    entries = BatchLossInputs(
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
    assert (loss_per_entry(loss, entries) * 3).tolist() == pytest.approx(
        [0.5, -1.134457, 2.0], abs=1e-6
    )
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
    assert float(clipped_ppo_surrogate(t[:, :2], s[:, :2], s[:, :2])) == pytest.approx(
        0.384234, abs=1e-6
    )
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
    value = clipped_ppo_surrogate(t, old, now, clip=2.0)
    up, down = math.log(0.9 / 0.5) / 2, -2.0 / 2
    assert float(value.detach()) == pytest.approx(-up * 1.28 + -down * 0.8)
    value.sum().backward()
    assert old.grad is None
    assert now.grad is not None and float(now.grad.abs().sum()) == 0  # noqa: PT018
