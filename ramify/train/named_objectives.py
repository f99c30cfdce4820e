"""Named training objectives, such as ``grpo`` and ``gspo``.

For example, ``rl.objective=gspo`` sets the advantage estimator, the policy loss with its reduction
and clipping, the unit that counts as a sequence, and the corrections together.

    rl.objective=gspo ──> rl.algorithm  grpo, reduction=call      ┐ as the paper has them, or with
                          rl.loss       gspo, 3e-4 / 4e-4, no KL  ┘ --preset NAME as that trainer
    rl.loss.policy.clip_high=1e-3       single fields are changed after it, in any order

Without a preset, the options are those of the paper. What a paper does not decide stays as in the
recipe: how a tree's reward is divided among its calls (``credit``, ``gamma_tree``), which calls are
trained, and how length is punished. What a paper calls a sequence or response is a call here.

This module maps each name to its options, and decides which policies can use it. What the names
mean in other trainers is defined in ``other_trainer_presets.py``, and the formulas are in
``advantages/`` and ``losses/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.base import needs_of
from ramify.train.losses import POLICY_LOSSES
from ramify.train.losses.total_loss import LossSpec

Options = Mapping[str, Any]

KEPT = (
    "credit", "gamma_tree", "children", "llm_calls", "share",
    "max_rollout_tokens", "overlong_buffer", "length_weight",
)  # fmt: skip
"""Estimator options that no paper prescribes. If an objective replaces the estimator, they keep the
recipe's values."""
PLAIN_LOSS: Options = {"corrections": (), "old": "auto", "kl_beta": 0.0, "entropy": 0.0}
"""Options of ``rl.loss`` that every objective uses unless it sets them itself."""


class PaperObjective(msgspec.Struct, frozen=True, kw_only=True):
    """A training objective as its paper defines it.

    It consists of the advantage estimator, the policy loss and their options.
    """

    title: str
    """Full name of the objective, and its paper."""
    when: str
    """One sentence on when to use the objective."""
    formula: str
    """What is minimized, in the notation of docs/algorithms.md."""
    algorithm: Options
    """The estimator: ``name``, and options that differ from its defaults."""
    policy: Options
    """The policy loss: ``name``, and options that differ from its defaults."""
    loss: Options = {}
    """Options of ``rl.loss`` that differ from ``PLAIN_LOSS``."""
    note: str = ""
    """What the paper leaves open, or which other options the user must set."""


_EVEN: Options = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}
_ON_POLICY: Options = {"name": "importance_sampling"}
_CLIPPED = "-min(r A, clip(r, 1 - low, 1 + high) A)"
_KL_OPEN = "The KL penalty of its experiments is off: `rl.algorithm.kl_reward` sets its weight."

OBJECTIVES: Mapping[str, PaperObjective] = {
    "grpo": PaperObjective(
        title="GRPO, group relative policy optimization (DeepSeekMath, 2402.03300)",
        when="The usual baseline to compare with: verifiable rewards, several attempts per item.",
        formula=f"{_CLIPPED} + 0.04 k3, A = (R - mean) / std of the group; mean over each call",
        algorithm={"name": "grpo", "reduction": "call"},
        policy=_EVEN,
        loss={"kl_beta": 0.04, "kl": "k3"},
        note="It keeps a reference policy; without one: `rl.loss.kl_beta=0`.",
    ),
    "dr_grpo": PaperObjective(
        title="Dr.GRPO, GRPO done right (2503.20783)",
        when="The first choice on trees: nothing that depends on a rollout's length divides it.",
        formula=f"{_CLIPPED}, A = R - mean of the group; sum over tokens by a constant",
        algorithm={"name": "dr_grpo", "reduction": "constant"},
        policy=_EVEN,
    ),
    "dapo": PaperObjective(
        title="DAPO, decoupled clip and dynamic sampling policy optimization (2503.14476)",
        when="Long answers whose entropy falls too early: a higher upper bound keeps rare tokens.",
        formula="-min(r A, clip(r, 0.8, 1.28) A), A as in GRPO; mean over all tokens of the step",
        algorithm={"name": "dapo", "drop_zero_variance": True},
        policy={"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        note=(
            "Dynamic sampling needs a limit (`rl.sample.max_items`, such as three times "
            "`rl.sample.items`), and the soft punishment of length a length "
            "(`rl.algorithm.max_rollout_tokens` and `overlong_buffer`)."
        ),
    ),
    "gspo": PaperObjective(
        title="GSPO, group sequence policy optimization (Qwen, 2507.18071)",
        when="Mixtures of experts, and several minibatches per step: one ratio per sequence.",
        formula=(
            "-min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A), s = exp(mean over the call of (l - o)), A "
            "as in GRPO; mean over each call"
        ),
        algorithm={"name": "grpo", "reduction": "call"},
        policy={"name": "gspo"},
        note="It differs from GRPO only with `rl.sample.minibatches` above 1: the paper has 4.",
    ),
    "cispo": PaperObjective(
        title="CISPO, clipped weights of importance sampling (MiniMax-M1, 2506.13585)",
        when="Long reasoning and stale rollouts: no token ever loses its gradient.",
        formula="-sg(min(r, 5)) A l, A as in GRPO; mean over all tokens of the step",
        algorithm={"name": "grpo", "reduction": "token"},
        policy={"name": "cispo", "cap": 5.0},
        note="The paper gives no number for the upper bound: 5 is that of ScaleRL (2510.13786).",
    ),
    "ppo": PaperObjective(
        title="PPO with a critic, proximal policy optimization (1707.06347)",
        when="One attempt per item, or rewards within a rollout: a critic is the baseline.",
        formula=f"{_CLIPPED} + value loss, A by GAE (gamma 1, lambda 0.95), normalised; token mean",
        algorithm={"name": "ppo", "reduction": "token", "lam": 0.95},
        policy=_EVEN,
        note=_KL_OPEN,
    ),
    "rloo": PaperObjective(
        title="RLOO, REINFORCE leave-one-out (2402.14740)",
        when="One optimizer step per rollout: unbiased, with nothing to tune.",
        formula="-rho A, A = R - mean of the others of the group; sum over tokens by a constant",
        algorithm={"name": "rloo", "reduction": "constant", "kl_over": "rollout"},
        policy=_ON_POLICY,
        note=_KL_OPEN,
    ),
    "reinforce_pp": PaperObjective(
        title="REINFORCE++ (2501.03262)",
        when="One attempt per item without a critic: all rollouts of a step are the baseline.",
        formula=f"{_CLIPPED}, A = R - 0.001 · KL to go, normalised over the step; token mean",
        algorithm={"name": "reinforce_pp", "reduction": "token", "kl_reward": 0.001},
        policy=_EVEN,
        note="It keeps a reference policy; without one: `rl.algorithm.kl_reward=0`.",
    ),
    "reinforce_pp_baseline": PaperObjective(
        title="REINFORCE++ with a baseline (2501.03262)",
        when="Like GRPO, without amplifying rare successes: the spread is that of the whole step.",
        formula=f"{_CLIPPED} + 0.001 k2, A = R - mean of the group, normalised over the step",
        algorithm={"name": "reinforce_pp_baseline", "reduction": "token"},
        policy=_EVEN,
        loss={"kl_beta": 0.001, "kl": "k2"},
        note="It keeps a reference policy; without one: `rl.loss.kl_beta=0`.",
    ),
    "maxrl": PaperObjective(
        title="MaxRL, maximum likelihood reinforcement learning (2602.02710)",
        when="Rewards of 0 and 1 with low pass rates, if many attempts should succeed (pass@k).",
        formula="-rho A, A = (R - mean) / mean of the group; sum over tokens by a constant",
        algorithm={"name": "maxrl", "reduction": "constant"},
        policy=_ON_POLICY,
    ),
    "remax": PaperObjective(
        title="ReMax (2310.10505)",
        when="One attempt per item with a baseline for each item: one more, greedy rollout.",
        formula="-rho A, A = R - R of a greedy rollout; sum over tokens by a constant",
        algorithm={"name": "remax", "reduction": "constant"},
        policy=_ON_POLICY,
        note=_KL_OPEN,
    ),
    "opo": PaperObjective(
        title="OPO, on-policy RL with an optimal baseline (2505.23585)",
        when="Rollouts of one item that differ much in length.",
        formula="-rho A, A = R - mean of the group weighted by length; sum by a constant",
        algorithm={"name": "opo", "reduction": "constant"},
        policy=_ON_POLICY,
    ),
    "gdpo": PaperObjective(
        title="GDPO, GRPO with rewards normalised separately (2601.05242)",
        when="Several named rewards of different scale.",
        formula=f"{_CLIPPED}, A = sum of each reward's GRPO advantage, normalised over the step",
        algorithm={"name": "gdpo", "reduction": "token"},
        policy=_EVEN,
    ),
    "rae": PaperObjective(
        title="RAE, role-conditioned advantage estimation (SPIRAL, 2506.24119)",
        when="Self-play, and one attempt per item: each role has its own running baseline.",
        formula="-rho A, A = R(call) - running mean of the role; sum over tokens by a constant",
        algorithm={"name": "rae", "reduction": "constant"},
        policy=_ON_POLICY,
    ),
    "sapo": PaperObjective(
        title="SAPO, soft adaptive policy optimization (Qwen, 2511.20347)",
        when="As GSPO, if its clipping drops too many sequences: a gate that fades.",
        formula="-(4/tau) sigmoid(tau (r - 1)) A, A as in GRPO; mean over each call",
        algorithm={"name": "grpo", "reduction": "call"},
        policy={"name": "sapo"},
    ),
    "gmpo": PaperObjective(
        title="GMPO, geometric-mean policy optimization (2507.20673)",
        when="Outliers among a sequence's ratios: it tolerates a wide clip.",
        formula=(
            "-A exp(mean over the call of the ratios' logarithms, clipped at ±0.4), A as in GRPO; "
            "one value per call"
        ),
        algorithm={"name": "grpo", "reduction": "call"},
        policy={"name": "gmpo"},
    ),
    "dppo": PaperObjective(
        title="DPPO with total variation (2602.04879)",
        when="Engine and trainer disagree on rare tokens, whose ratios are noise.",
        formula="-rho A unless p moved by more than 0.2 in A's direction, A as in GRPO; token mean",
        algorithm={"name": "grpo", "reduction": "token"},
        policy={"name": "dppo_tv", "delta": 0.2, "pull": 0.0},
    ),
    "dppo_kl": PaperObjective(
        title="DPPO with the binary KL (2602.04879)",
        when="As dppo, with a bound that is tighter at probabilities near 0 and 1.",
        formula="-rho A unless the binary KL is above 0.05 in that direction, A as in GRPO",
        algorithm={"name": "grpo", "reduction": "token"},
        policy={"name": "dppo_kl", "delta": 0.05},
    ),
    "decoupled": PaperObjective(
        title="Decoupled PPO (AReaL, 2505.24298)",
        when="Asynchronous runs whose rollouts are several versions old.",
        formula="exp(o - m) ppo_clip(r against o), 0 above 5, A = R normalised over the step",
        algorithm={"name": "reinforce_pp", "reduction": "token"},
        policy={"name": "decoupled", "clip_low": 0.2, "clip_high": 0.2, "cap": 5.0, "drop": True},
        note="The paper has no cap: 5 is that of AReaL's examples.",
    ),
    "rollout_is": PaperObjective(
        title="Double-sided importance sampling (GLM-5, 2602.15763)",
        when="Asynchronous runs without a pass for old log-probabilities.",
        formula="-sg(rho if 0.8 < rho < 1.28, else 0) A l, A as in GRPO; token mean",
        algorithm={"name": "grpo", "reduction": "token"},
        policy={"name": "rollout_is"},
    ),
}
"""Map the name of each objective to its definition."""
ALIASES: Mapping[str, str] = {
    "geo_mean": "gmpo",
    "dppo_tv": "dppo",
    "areal": "decoupled",
    "decoupled_ppo": "decoupled",
}
"""Map other names of objectives, in lower case, to their names in ``OBJECTIVES``. The aliases of
``ALGORITHMS`` apply too."""


def canonical_objective_name(name: str) -> str:
    """Return the canonical name of an objective, given its name or an alias in upper or lower case.

    Raises ConfigError for an unknown name, and suggests the nearest one.
    """
    lower = name.lower()
    found = ALIASES.get(lower, ALGORITHMS.canonical(lower))
    if found not in OBJECTIVES and ALGORITHMS.canonical(lower) in ALGORITHMS:
        raise ConfigError(
            f"objective '{name}' does not exist, but an estimator of that name does: set "
            f"rl.algorithm={ALGORITHMS.canonical(lower)}"
        )
    if found not in OBJECTIVES:
        raise ConfigError(f"unknown objective '{name}': {did_you_mean(name, OBJECTIVES)}")
    return found


def build_advantage_estimator(objective: PaperObjective, recipe: Any) -> Any:
    """Return the advantage estimator of ``objective``.

    Options that no paper prescribes (``KEPT``) are copied from ``recipe``, the estimator that the
    recipe had before. Groups with equal rewards count in the denominators unless the paper drops
    them.
    """
    built = ALGORITHMS.build({"drop_zero_variance": False, **objective.algorithm})
    fields = {*built.__struct_fields__} & {*getattr(recipe, "__struct_fields__", ())}
    kept = {name: getattr(recipe, name) for name in KEPT if name in fields}
    return msgspec.structs.replace(built, **kept)


def loss_of(objective: PaperObjective, recipe: LossSpec) -> LossSpec:
    """Return the loss of ``objective`` for use in a recipe.

    The options for the critic, for distillation and for expert routing are copied from the recipe's
    loss.
    """
    policy = POLICY_LOSSES.build(objective.policy)
    options = {**PLAIN_LOSS, "sequence": "call", **objective.loss}
    return msgspec.structs.replace(recipe, policy=policy, **options)


def replace_estimator(algorithm: Any, inner: Any) -> Any:
    """Return the training algorithm with ``inner`` as its advantage estimator.

    If the algorithm wraps estimators, the rest is unchanged: a hybrid keeps its other terms, and
    ``by_task`` keeps the estimators of the tasks that it lists.
    """
    for field in ("outcome", "other"):
        if field in getattr(algorithm, "__struct_fields__", ()):
            return msgspec.structs.replace(algorithm, **{field: inner})
    return inner


def advantage_estimator_of(algorithm: Any) -> Any:
    """Return the advantage estimator of a recipe's algorithm.

    A hybrid or ``by_task`` contains the estimator in a field. Any other algorithm is an estimator
    itself.
    """
    for field in ("outcome", "other"):
        if field in getattr(algorithm, "__struct_fields__", ()):
            return getattr(algorithm, field)
    return algorithm


def training_impossible_reason(name: str, algorithm: Any, group: int, *, has_critic: bool) -> str:
    """Return the reason why a policy cannot be trained with an objective, and what works instead.

    The reason may be that groups have only one rollout, or that the critic is missing. Returns an
    empty string if training is possible. ``has_critic`` is True if the backend supports a critic.
    """
    if group == 1 and algorithm.has_group_baseline:
        return group_of_one_problem(f"rl.objective={name}")
    if needs_of(algorithm).values and not has_critic:
        return (
            f"rl.objective={name} needs a critic, which this compute.backend does not have: set "
            "compute.backend=single, or an objective without a critic, as reinforce_pp or grpo"
        )
    return ""


def group_of_one_problem(option: str) -> str:
    """Return an error message saying that ``option`` cannot learn from groups of one rollout.

    The message also says what works instead. An example of an option is ``rl.objective=grpo``.
    """
    return (
        f"{option} compares the rollouts of a group, and rl.rollout.group=1 has one: set "
        "rl.rollout.group=8, or an objective without groups: "
        f"rl.objective={' or '.join(_single_rollout_objectives())}"
    )


def _single_rollout_objectives() -> list[str]:
    """Return the names of all objectives that work with one rollout per task item."""
    built = {name: ALGORITHMS.build(each.algorithm) for name, each in OBJECTIVES.items()}
    return [name for name, each in built.items() if not each.has_group_baseline]
