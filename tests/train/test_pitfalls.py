"""Known ways in which this kind of training goes wrong without a word, and what stands against each.

 1  entropy and KL rise while reward falls          ``guards.py``: tests/train/test_guards.py; the gap's clip: signals
 2  a gap to the teacher that is not bounded        the clip: signals; what it comes to in the loss: here (E3)
 3  a frozen teacher drags back to where it stood   schedules of weights: signals
 4  a live teacher erodes                           signals
 5  hints that hold the answer                      signals
 6  wrong hints are worse than none                 signals
 7  the longest hint wins                           signals
 8  rollouts grow until they are cut off            ``overlong=mask``: test_estimators.py; the alarm on length: test_guards.py
 9  it gets worse after its best step               patience, the best checkpoint: test_loop_algorithms.py
10  a log-probability of 0 where there is none      here: a component without its teacher is refused, never zeros
11  text made into ids again                        ``Trajectory.path``: tests/train/test_compile.py
12  teacher and student computed by different code  here: the same policy as its own teacher moves nothing
13  a term that is silently off                     here: it is measured; an option of 0 asks for no teacher
14  a group of one keeps its raw reward             here, and test_estimators.py
    a weight that is ignored; bias to short ones    here: what each reduction gives long and short rollouts
15  "it ran" taken for "it is right"                signals
16  made-up tool output, templates applied twice    the agent
17  a sandbox that blocks its loop                  tests/sandbox

Of the worked examples E1 to E4 the first is in test_estimators.py; E2 belongs to signals.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ramify.errors import ConfigError
from ramify.train.algorithms.dr_grpo import DrGRPO
from ramify.train.loss import Entries, Loss, compute
from ramify.train.pack import pack
from ramify.train.policy_losses import PpoClip
from tests.train.backends.small import policy, tree
from tests.train.trees import call, group
from tests.train.trees import tree as rollout


def entries(now: Any, denominators: dict[str, float], **streams: Any) -> Entries:
    given = {name: torch.tensor(np.asarray(each), dtype=torch.float64) for name, each in streams.items()}
    return Entries(torch.tensor(np.asarray(now), dtype=torch.float64, requires_grad=True), given, denominators)


def test_e3_advantages_with_a_clipped_gap_through_the_clipped_loss_and_the_kl() -> None:
    """A = -0.5 + the gap (0, 1.386, -4.500 clipped to -2): losses 0.5, -1.134, 2.0; k3 0.023, 0.072, 0.307 with β = 0.01."""
    p_old, p_teacher, p_now = np.array([0.5, 0.2, 0.9]), np.array([0.5, 0.8, 0.01]), np.array([0.5, 0.3, 0.45])
    advantages = -0.5 + np.clip(np.log(p_teacher / p_old), -2, 2)
    assert advantages == pytest.approx([-0.5, 0.886294, -2.5], abs=1e-6)
    given = entries(
        np.log(p_now), {"rl": 3.0}, advantages=advantages, rl=[1, 1, 1], sampler_logprobs=np.log(p_old),
        old_logprobs=np.log(p_old), ref_logprobs=np.log([0.4, 0.2, 0.9]),
    )  # fmt: skip
    alone, _ = compute(Loss(policy=PpoClip()), given)
    found, tally = compute(Loss(policy=PpoClip(), kl_beta=0.01, kl="k3"), given)
    assert (alone.item(), tally.metrics()["ref_kl"], found.item()) == pytest.approx(
        (0.455181, 0.134043, 0.456521), abs=1e-6
    )


def test_e4_the_forward_kl_over_the_whole_vocabulary() -> None:
    student, teacher = np.array([[0.6, 0.3, 0.1]]), np.array([[0.2, 0.7, 0.1]])
    given = entries([math.log(0.6)], {"kd": 1.0}, kd=[1], teacher_logprobs=np.log(teacher), sampler_logprobs=[0])
    given = given._replace(teacher_ids_logprobs=torch.tensor(np.log(student)))
    assert compute(Loss(), given)[0].item() == pytest.approx(0.373386, abs=1e-6)


def test_10_a_component_without_its_stream_is_refused() -> None:
    for loss, columns, missing in [
        (Loss(), {"kd": [1.0], "sampler_logprobs": [-1.0]}, "teacher_logprobs"),
        (Loss(kl_beta=0.1), {"rl": [1.0], "advantages": [1.0], "sampler_logprobs": [-1.0]}, "ref_logprobs"),
    ]:
        with pytest.raises(ConfigError, match=missing):
            compute(loss, entries([-1.0], dict.fromkeys({"rl", "kd"} & set(columns), 1.0), **columns))


def test_12_a_policy_that_is_its_own_teacher_moves_nothing() -> None:
    """Through the real backend: the teacher's log-probabilities are those of the trainer's own pass, id for id."""
    from ramify.train.backends.single import Single
    from ramify.train.pack import attach

    rows, backend = tree(), Single(policy())
    for row in rows:
        row.kd, row.ce, row.rl = (row.rl != 0).astype(np.float32), None, np.zeros_like(row.rl)
    batches = pack(rows)
    (logprobs,) = backend.logprobs(batches)
    attach(rows, batches, "teacher_logprobs", [logprobs])
    for row in rows:
        row.sampler_logprobs = row.streams["teacher_logprobs"].copy()
    measured = backend.forward_backward(pack(rows), Loss())
    gradient = max(float(each.grad.abs().max()) for each in backend._model.parameters() if each.grad is not None)
    assert (measured["loss"], measured["teacher_gap"], gradient) == pytest.approx((0, 0, 0), abs=1e-5)


def test_13_whether_a_term_acts_is_measured() -> None:
    given = entries([-1.0, -2.0], {"kd": 2.0}, kd=[1, 1], teacher_logprobs=[-0.5, -1.0], sampler_logprobs=[-1.0, -2.0])
    found, tally = compute(Loss(), given)
    assert tally.metrics()["teacher_gap"] == pytest.approx(0.75)
    assert found.item() == pytest.approx(-0.75)


def test_14_one_alone_gets_nothing_and_length_buys_nothing() -> None:
    assert DrGRPO().stamp([group(rollout(call("0", 3), reward=1))], {}).rollouts == []
    batch = [group(rollout(call("0", 2), reward=1), rollout(call("0", 8), reward=0))]

    def masses(**options: Any) -> list[float]:
        found = DrGRPO(**options).stamp(batch, {}).rollouts
        return [sum(stamp.rl) for each in found for stamp in each.stamps.values()]

    assert masses() == pytest.approx([1, 1])  # a token of the short one weighs four times as much: the bias of a mean
    assert masses(reduction="token") == pytest.approx([2, 8])
    assert masses(reduction="constant", max_rollout_tokens=10) == pytest.approx([0.2, 0.8])
