"""Token weights: how much each sampled token counts in the loss.

By default every rollout of a step has the same total weight, however many calls and tokens it has:
a tree with more children does not weigh more. Two rollouts, of 4 tokens (one call) and of 12 (three
calls of 4), which form one group:

    reduction   token of the first   of the second   the loss is divided by
    rollout     1/4                  1/12            2   rollouts
    token       1                    1               16  tokens                       (DAPO)
    constant    1/max_tokens         1/max_tokens    2   rollouts                     (Dr.GRPO)
    group       1/8                  1/24            1   group of weight 1
    prompt      1/16                 1/16            1   group of weight 1, by token  (ScaleRL)
    sum         1                    1               1   (not divided)

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
"""A reduction's name in other libraries -> its name here."""
Share = Literal["token", "call"]
Counts = Mapping[str, int]
"""Call id -> number of its tokens that carry loss, for one rollout."""
Weights = dict[str, float]
"""Call id -> weight of each of these tokens."""


def weights(
    groups: Sequence[Sequence[Counts]],
    reduction: Reduction = "rollout",
    share: Share = "token",
    max_tokens: int = 1,
) -> tuple[list[list[Weights]], float]:
    """(weights by group, rollout and call; the denominator of the step). Rollouts without tokens do
    not count.

    ``max_tokens`` is the constant length for ``reduction="constant"``."""
    name = ALSO.get(reduction, reduction)
    sizes = [_size(group) for group in groups]
    num_rollouts = sum(size.rollouts for size in sizes)
    num_groups = sum(1 for size in sizes if size.tokens)
    denominators = {
        "rollout": num_rollouts,
        "constant": num_rollouts,
        "group": num_groups,
        "prompt": num_groups,
        "token": sum(size.tokens for size in sizes),
        "sum": 1,
    }
    by_group = []
    for group, size in zip(groups, sizes, strict=True):
        by_group.append(
            [_rollout_weights(rollout, name, share, size, max_tokens) for rollout in group]
        )
    return by_group, float(denominators[name])


class _Size(NamedTuple):
    """Rollouts and tokens of a group that carry loss."""

    rollouts: int
    tokens: int


def _size(group: Sequence[Counts]) -> _Size:
    totals = [sum(counts.values()) for counts in group]
    return _Size(sum(1 for total in totals if total), sum(totals))


def _rollout_weights(
    counts: Counts, reduction: str, share: Share, group: _Size, max_tokens: int
) -> Weights:
    total = sum(counts.values())
    calls = sum(1 for count in counts.values() if count)
    if not total:
        return dict.fromkeys(counts, 0.0)
    mass = {
        "rollout": 1.0,
        "group": 1.0 / group.rollouts,
        "prompt": total / group.tokens,
        "token": float(total),
        "constant": total / max_tokens,
        "sum": float(total),
    }[reduction]
    if share == "call":
        return {id: mass / calls / count if count else 0.0 for id, count in counts.items()}
    return {id: mass / total if count else 0.0 for id, count in counts.items()}
