"""Compute the loss weight of each sampled token.

The module implements the reductions by which RL trainers average a loss: over tokens, rollouts,
calls or groups.

The gradient of the mean reward over trees is a plain sum over all sampled tokens. So by default
(``constant``) every token counts the same, and nothing that depends on the size of a tree divides
it. Two rollouts, of 4 tokens (one call) and of 12 (three calls of 4), which form one group:

    reduction   token of the first   of the second   the loss is divided by
    constant    1/L                  1/L             2   rollouts                     (Dr.GRPO)
    token       1                    1               16  tokens                       (DAPO)
    rollout     1/4                  1/12            2   rollouts
    call        1/4                  1/4             4   calls: each has one vote
    group       1/8                  1/24            1   group of weight 1
    prompt      1/16                 1/16            1   group of weight 1, by token  (ScaleRL)
    sum         1                    1               1   (not divided)

Biases, all measured in ``benchmarks/credit.py``:

- ``rollout`` and ``group`` divide the root's decision to spawn children by the tokens that these
  children wrote, so wide trees learn less from their success and their failure.
- ``call`` gives wide trees more votes, and divides by the calls of this step. It does not divide a
  call by what others wrote, so a loss over sequences is averaged like this (``LossSpec.sequence``).
- ``token`` and ``prompt`` divide by the tokens of this step or group, which depend on what is
  learnt from: less biased the more rollouts there are.
- ``share="call"`` gives each token of a long call less weight than one of a short call.

Other libraries call them ``token_mean`` (token), ``seq_mean_token_mean`` (rollout),
``seq_mean_token_sum_norm`` (constant), ``prompt_mean`` (prompt) and ``token_sum`` (sum); these
names are accepted, too.

``share`` says how a rollout's weight is divided: ``token`` divides it evenly among its tokens,
``call`` evenly among its calls and then among each call's tokens. Only tokens that carry loss are
counted. All counts are of the whole optimizer step, so loss and gradient do not depend on how the
step is cut into batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Reduction = Literal[
    "rollout",
    "call",
    "token",
    "constant",
    "group",
    "prompt",
    "sum",
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "token_sum",
]
ALSO = {
    "token_mean": "token",
    "seq_mean_token_mean": "rollout",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "prompt",
    "token_sum": "sum",
}
"""Map the name of a reduction in other libraries to its name in Ramify."""
Share = Literal["token", "call"]
Counts = Mapping[str, float]
"""Map the id of each call of a rollout to the number of its tokens that carry loss. In a forked
rollout, a token counts with the fraction of the rollout's weight that its turn has.
"""
Weights = dict[str, float]
"""Map the id of each call to the loss weight of one of its tokens."""


def weights(
    groups: Sequence[Sequence[Counts]],
    reduction: Reduction = "constant",
    share: Share = "token",
    rollout_tokens: float = 1.0,
) -> tuple[list[list[Weights]], float]:
    """Return the loss weight of each sampled token of a step, and the divisor of the step's loss.

    The weights are nested by group, rollout and call id. All tokens of a call weigh the same, and
    rollouts without tokens are not counted.

    ``rollout_tokens`` is L, the tokens per rollout that ``reduction="constant"`` divides by.
    """
    name = ALSO.get(reduction, reduction)
    sizes = [_size(group) for group in groups]
    num_rollouts = sum(size.rollouts for size in sizes)
    num_groups = sum(1 for size in sizes if size.tokens)
    num_calls = sum(1 for group in groups for counts in group for num in counts.values() if num)
    denominators = {
        "rollout": num_rollouts,
        "call": num_calls,
        "constant": num_rollouts,
        "group": num_groups,
        "prompt": num_groups,
        "token": sum(size.tokens for size in sizes),
        "sum": 1,
    }
    by_group = []
    for group, size in zip(groups, sizes, strict=True):
        by_group.append(
            [_rollout_weights(rollout, name, share, size, rollout_tokens) for rollout in group]
        )
    return by_group, float(denominators[name])


StepWeights = tuple[list[list[Weights]], float]
"""The result of ``weights``: the nested token weights and the divisor of the loss."""


def relative_call_weights(other: StepWeights, base: StepWeights) -> list[list[Weights]]:
    """Return how much more each call's tokens count in the loss under ``other`` than under
    ``base``.

    For each call, return the factor by which one of its tokens counts more in the loss under
    ``other`` than under ``base``. The factor is 1 if both count the token the same.
    """
    scale = base[1] / other[1] if other[1] else 0.0
    return [
        [
            {id: of_other[id] / weight * scale for id, weight in of_base.items() if weight}
            for of_other, of_base in zip(*groups, strict=True)
        ]
        for groups in zip(other[0], base[0], strict=True)
    ]


_SLOWEST = 0.1
"""Smallest weight that the latest step can have in the running mean of tokens per rollout, reached
after ten steps.
"""


class RolloutTokenDivisor(NamedTuple):
    """A running mean of the tokens per rollout, by which ``reduction="constant"`` divides the loss.

    The mean of the earlier steps is used, so that one step with unusually long rollouts does not
    change the divisor. Only the first step is divided by its own mean. The mean is a plain average
    for the first ten steps, and an exponential moving average after that.

    For example, if the first steps have 100 and 300 tokens per rollout, both are divided by 100,
    and the third by 200.
    """

    value: float = 1.0
    steps: int = 0
    """Number of steps in the mean. If it is 0, ``value`` has no meaning."""

    @classmethod
    def from_saved_state(cls, memory: Mapping[str, float]) -> RolloutTokenDivisor:
        steps = int(memory.get("rollout_tokens_steps", 0))
        return cls(memory["rollout_tokens"], steps) if steps else cls()

    def saved_state(self) -> dict[str, float]:
        return {"rollout_tokens": self.value, "rollout_tokens_steps": float(self.steps)}

    def divisor(self, groups: Sequence[Sequence[Counts]]) -> float:
        """Return the divisor for the loss of the next step, in tokens per rollout.

        ``groups`` holds the rollouts of that step, which are used only if it is the first.
        """
        return self.value if self.steps else self.updated_with_step(groups).value

    def updated_with_step(self, groups: Sequence[Sequence[Counts]]) -> RolloutTokenDivisor:
        """Return the running mean after one more step, whose rollouts are ``groups``."""
        sizes = [_size(group) for group in groups]
        num = sum(size.rollouts for size in sizes)
        if not num:
            return self
        steps = self.steps + 1
        latest = sum(size.tokens for size in sizes) / num
        rate = max(1 / steps, _SLOWEST)
        return RolloutTokenDivisor(self.value + rate * (latest - self.value), steps)


class _Size(NamedTuple):
    """The size of a rollout group: its numbers of rollouts and of tokens that contribute to the
    loss.

    Rollouts without such a token are not counted.
    """

    rollouts: int
    tokens: float


def _size(group: Sequence[Counts]) -> _Size:
    totals = [sum(counts.values()) for counts in group]
    return _Size(sum(1 for total in totals if total), sum(totals))


def _rollout_weights(
    counts: Counts, reduction: str, share: Share, group: _Size, rollout_tokens: float
) -> Weights:
    total = sum(counts.values())
    calls = sum(1 for count in counts.values() if count)
    if not total:
        return dict.fromkeys(counts, 0.0)
    if reduction == "call":
        return {id: 1 / count if count else 0.0 for id, count in counts.items()}
    mass = {
        "rollout": 1.0,
        "group": 1.0 / group.rollouts,
        "prompt": total / group.tokens,
        "token": float(total),
        "constant": total / rollout_tokens,
        "sum": float(total),
    }[reduction]
    if share == "call":
        return {id: mass / calls / count if count else 0.0 for id, count in counts.items()}
    return {id: mass / total if count else 0.0 for id, count in counts.items()}
