"""Losses that TRL also has: same loss and gradient to 1e-6 for the same logits and batch.

``tests/data/trl_grpo.json`` holds the results of TRL's ``GRPOTrainer._compute_loss``, written by
``tests/data/trl_grpo.py`` (TRL 1.16.0, torch 2.13.0). Ours goes through packing, the head and
``loss.compute``. A loss type of TRL is a formula and a reduction here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.models.training_forward import LmHeadRequest, compute_logprobs_and_entropies
from ramify.train.advantages.token_loss_weights import Reduction, weights
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.losses import Cispo, DualClip, Gspo, PpoClip, Sapo
from ramify.train.losses.corrections import Opsm, TokenTis
from ramify.train.losses.total_loss import BatchLossInputs, LossSpec, compute
from ramify.types.training_sequences import Batch, TokenSequence

GOLDEN = json.loads((Path(__file__).parents[1] / "data/trl_grpo.json").read_text())
GIVEN = {name: np.array(each) for name, each in GOLDEN["batch"].items()}
PROMPT = GOLDEN["prompt"]

CASES: dict[str, tuple[LossSpec, Reduction]] = {
    "grpo": (LossSpec(policy=PpoClip()), "seq_mean_token_mean"),
    "grpo_kl": (LossSpec(policy=PpoClip(), kl_beta=0.04, kl="k3"), "rollout"),
    "two_sided": (LossSpec(policy=DualClip(bound=1.5)), "rollout"),
    "bnpo": (LossSpec(policy=PpoClip()), "token"),
    "dapo": (LossSpec(policy=PpoClip()), "token_mean"),
    "dr_grpo": (LossSpec(policy=PpoClip()), "seq_mean_token_sum_norm"),
    "gspo": (LossSpec(policy=Gspo(clip_low=0.1, clip_high=0.1)), "rollout"),
    "cispo": (LossSpec(policy=Cispo(clip_low=1.0)), "token"),
    "sapo": (LossSpec(policy=Sapo()), "rollout"),
    "opsm": (LossSpec(policy=PpoClip(), corrections=(Opsm(delta=0.3),)), "rollout"),
    "token_tis": (LossSpec(policy=PpoClip(), corrections=(TokenTis(cap=2.0),)), "rollout"),
}


def packed(reduction: Reduction) -> Batch:
    ids, mask = GIVEN["ids"], GIVEN["completion_mask"] * GIVEN["tool_mask"]
    counts = [{"0": int(each.sum())} for each in mask]
    (found,), denominator = weights([counts], reduction, rollout_tokens=GOLDEN["most"])

    def column(values: Any) -> Any:
        return np.concatenate([np.zeros(PROMPT), values]).astype(np.float32)

    rows = [
        TokenSequence(
            name=f"{index}",
            token_ids=ids[index],
            mask=column(mask[index]) > 0,
            sampler_logprobs=column(GIVEN["sampler"][index]),
            advantages=column(mask[index] * GIVEN["advantages"][index]),
            rl=column(mask[index] * found[index]["0"]),
            streams={
                "old_logprobs": column(GIVEN["old"][index]),
                "ref_logprobs": column(GIVEN["ref"][index]),
            },
        )
        for index in range(len(ids))
    ]
    (batch,) = pack(rows, PackingSpec(share=False), {"rl": denominator})
    return batch


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_loss_and_gradient_match_trl(name: str) -> None:
    loss, reduction = CASES[name]
    batch = packed(reduction)
    logits = torch.tensor(GIVEN["logits"], requires_grad=True)
    rows, places = torch.tensor(batch.owners).T
    asked = LmHeadRequest(torch.tensor(batch.targets)[:, None])
    logprobs, _ = compute_logprobs_and_entropies(
        logits[rows, places - 1], lambda h: h, asked, logits.shape[-1], 1 << 20
    )
    streams = {key: torch.tensor(each, dtype=torch.float64) for key, each in batch.streams.items()}
    found, _ = compute(
        loss,
        BatchLossInputs(logprobs[:, 0], streams, batch.denominators, sequences=(rows, len(logits))),
    )
    found.backward()
    wanted = GOLDEN["cases"][name]
    assert found.item() == pytest.approx(wanted["loss"], abs=1e-6)
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.flatten(), wanted["gradient"], atol=1e-6)


def test_batch_distinguishes_the_loss_formulas() -> None:
    """No two cases have the same loss except for two that TRL reduces in the same way; otherwise
    the test above would prove little."""
    losses = {name: round(each["loss"], 6) for name, each in GOLDEN["cases"].items()}
    assert losses.pop("bnpo") == losses["dapo"]
    assert len(set(losses.values())) == len(losses)
    assert GOLDEN["trl"] == "1.16.0"


def test_opsm_case_masks_by_the_sampler_but_not_by_the_old_policy() -> None:
    """This makes the ``opsm`` case conclusive: at its bound the sampler's log-probabilities mask
    the last sequence, the old ones none."""
    logprobs, ids = (
        torch.tensor(GIVEN["logits"]).log_softmax(-1),
        torch.tensor(GIVEN["ids"])[:, PROMPT:],
    )
    now = logprobs[:, PROMPT - 1 : -1].gather(-1, ids[..., None])[..., 0].numpy()
    mask = GIVEN["completion_mask"] * GIVEN["tool_mask"]

    def masked(then: Any) -> list[bool]:
        moved = (mask * (then - now)).sum(1) / mask.sum(1)
        return [bool(each) for each in (moved > 0.3) & (GIVEN["advantages"] < 0)]

    assert masked(GIVEN["sampler"]) == [False, False, False, True]
    assert masked(GIVEN["old"]) == [False] * 4
