"""The work in one training step: the number of tokens and the FLOPs that each one costs.

In a forward pass, a token costs 2 FLOP per weight that multiplies it. Attention costs 4 FLOP for
each pair of tokens and each element of the heads. A backward pass costs twice as much as a forward
pass, and recomputation of layers costs another forward pass. How long the work takes is estimated
in ``step_time_estimate.py`` and ``trainer_mesh_estimates.py``.
"""

from __future__ import annotations

import msgspec

from ramify.extras.cluster.model_and_device_specs import ModelParameterCounts
from ramify.train.advantages.base import needs_of
from ramify.train.config import Run


class StepTokenCounts(msgspec.Struct, frozen=True):
    """The number of prompt tokens and sampled tokens in one training step.

    Both are sums over all rollouts.
    """

    sampled: float
    given: float
    """Prompt tokens. A prefix shared with the previous turn counts once."""
    rollouts: float
    why: str
    """Explanation of how the token counts were obtained."""

    @property
    def num_learnt_tokens(self) -> float:
        return self.sampled + self.given

    @property
    def tokens_per_rollout(self) -> float:
        return self.num_learnt_tokens / max(self.rollouts, 1)

    @classmethod
    def assumed(cls, run: Run, window: int) -> StepTokenCounts:
        """Return an assumed number of tokens per training step, for planning before any run exists.

        Each rollout takes half of its allowed turns. Each reply has half of the maximum length,
        limited by the context window, and each prompt is as long as its reply.
        """
        rl = run.rl
        if rl is None:
            return cls(0, 0, 0, "no reinforcement learning")
        rollouts = rl.sample.items * (rl.rollout.group + needs_of(rl.algorithm).greedy)
        turns = max(1.0, run.limits.max_turns / 2)
        reply = min(run.limits.max_reply_tokens / 2, window / (2 * turns))
        why = (
            f"assumed: {rollouts} rollouts of {turns:g} turns, each of {reply:g} tokens after as "
            "many prompt tokens"
        )
        return cls(rollouts * turns * reply, rollouts * turns * reply, rollouts, why)


def forward_pass_equivalents(run: Run) -> float:
    """Return the compute of a training step as a multiple of one forward pass over its tokens.

    A forward and a backward pass together count as three. Recomputed activations and extra
    log-probabilities add more.
    """
    return 3.0 + run.compute.recompute + _more_passes(run)


def _more_passes(run: Run) -> int:
    """Return how many additional forward passes a training step needs for log-probabilities.

    Those of the reference model and those of the policy before the update take one pass each.
    """
    if run.rl is None:
        return 0
    streams = needs_of(run.rl.algorithm).streams
    return bool(run.rl.loss.kl_beta or "ref_logprobs" in streams) + (run.rl.loss.old == "pass")


def forward_flop_per_token(shape: ModelParameterCounts, length: float) -> float:
    """Return the FLOPs of one token's forward pass in a sequence of ``length`` tokens.

    On average, half of the sequence precedes the token.
    """
    return 2 * shape.products + 4 * shape.layers * shape.heads * shape.head_size * length / 2
