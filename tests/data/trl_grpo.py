"""Losses and gradients of TRL's own ``GRPOTrainer._compute_loss`` over a small batch of logits:
``trl_grpo.json``.

Run this file with an environment that has TRL (``benchmarks/requirements-trl.txt``) to rewrite
it:

    benchmarks/.venv-trl/bin/python tests/data/trl_grpo.py

The trainer is made without its constructor, which wants a checkpoint and a data set: the loss reads
a few of its fields. The model is a table of logits, so that the gradient is that of the loss by the
logits. All in fp64.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import GRPOTrainer

PATH = Path(__file__).with_suffix(".json")
ROLLOUTS, PROMPT, LENGTH, VOCAB, MOST = 4, 2, 4, 6, 8
"""Sizes of the batch. The second rollout has 3 sampled tokens, and the third has a tool's token in the
middle."""

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_kl": {"beta": 0.04},
    "two_sided": {"delta": 1.5},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},
    "sapo": {"loss_type": "sapo"},
    "opsm": {"off_policy_mask_threshold": 0.3},
    "token_tis": {"use_vllm": True},
}


class Table(torch.nn.Module):
    """A model whose logits are its parameters."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        logprobs = self.logits.log_softmax(-1)
        here = logprobs[:, :-1].gather(-1, input_ids[:, 1:, None])[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return SimpleNamespace(
            log_probs=torch.nn.functional.pad(here, (1, 0)),
            entropy=torch.nn.functional.pad(entropy[:, :-1], (1, 0)),
        )


def trainer(model: Table, **changes: Any) -> Any:
    given = {
        "beta": 0.0,
        "delta": None,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
    } | changes
    made = object.__new__(GRPOTrainer)
    made.args = SimpleNamespace(
        delta=given.pop("delta"),
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
        report_to=[],
    )
    made.accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        autocast=nullcontext,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        is_main_process=False,
    )
    fields = {
        "model": model.train(),
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": MOST,
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)},
        **given,
    }
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shape = (ROLLOUTS, LENGTH)
    completion = torch.ones(shape, dtype=torch.long)
    completion[1, 3:] = 0
    tool = torch.ones(shape, dtype=torch.long)
    tool[2, 1] = 0
    logits = torch.randn(ROLLOUTS, PROMPT + LENGTH, VOCAB, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (ROLLOUTS, PROMPT + LENGTH))
    now = logits.log_softmax(-1)[:, PROMPT - 1 : -1].gather(-1, ids[:, PROMPT:, None])[..., 0]

    def near(scale: float) -> torch.Tensor:
        return now + scale * torch.randn(shape, dtype=torch.float64)

    old = near(0.4)
    sampler = old + 0.5 * torch.randn(shape, dtype=torch.float64)
    return {
        "logits": logits,
        "ids": ids,
        "completion_mask": completion,
        "tool_mask": tool,
        "old": old,
        "ref": near(0.6),
        "sampler": sampler,
        "advantages": torch.tensor([1.5, -0.5, 0.75, -1.75], dtype=torch.float64),
    }


def measured(given: dict[str, torch.Tensor], changes: dict[str, Any]) -> dict[str, Any]:
    model = Table(given["logits"].clone())
    inputs = {
        "prompt_ids": given["ids"][:, :PROMPT],
        "prompt_mask": torch.ones(ROLLOUTS, PROMPT, dtype=torch.long),
        "completion_ids": given["ids"][:, PROMPT:],
        "completion_mask": given["completion_mask"],
        "tool_mask": given["tool_mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["ref"],
        "sampling_per_token_logps": given["sampler"],
        "importance_sampling_ratio": (given["old"] - given["sampler"]).exp().clamp(max=2.0),
        "num_items_in_batch": (given["completion_mask"] * given["tool_mask"]).sum(),
    }
    loss = trainer(model, **changes)._compute_loss(model, inputs)  # noqa: SLF001 (TRL's)
    loss.backward()
    gradient = model.logits.grad
    assert gradient is not None
    return {"loss": loss.item(), "gradient": gradient.flatten().tolist()}


def main() -> None:
    given = batch()
    found = {name: measured(given, changes) for name, changes in CASES.items()}
    whole = {
        "trl": trl.__version__,
        "torch": torch.__version__.partition("+")[0],
        "prompt": PROMPT,
        "most": MOST,
        "batch": {name: each.tolist() for name, each in given.items()},
        "cases": found,
    }
    PATH.write_text(json.dumps(whole, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
