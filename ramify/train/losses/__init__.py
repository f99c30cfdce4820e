"""The built-in policy losses, with one formula per file.

``POLICY_LOSSES`` maps names to classes. A recipe can also name its own class as ``module:name``, or
register one:

    @POLICY_LOSSES.register("mine")
    class Mine(BaseLossFormula, frozen=True, kw_only=True, tag="mine"): …
"""

from ramify.plugins import PluginRegistry
from ramify.train.losses.base import BaseLossFormula, PolicyLoss, PolicyLossInputs, importance_ratio
from ramify.train.losses.cispo import Cispo
from ramify.train.losses.covariance_losses import ClipCov, KlCov
from ramify.train.losses.critic import CriticOnlyLoss
from ramify.train.losses.decoupled_ppo import Decoupled, DecoupledGspo, ProxApprox
from ramify.train.losses.dppo import DppoCapped, DppoKl, DppoTv
from ramify.train.losses.gmpo import Gmpo
from ramify.train.losses.gspo import Gspo
from ramify.train.losses.importance_sampling import ImportanceSamplingLoss
from ramify.train.losses.masked_importance_sampling import MaskedImportanceSamplingLoss
from ramify.train.losses.ppo_clip import DualClip, PpoClip
from ramify.train.losses.sapo import Sapo
from ramify.train.losses.sequence_ratio_clip import SequenceClip

__all__ = [
    "POLICY_LOSSES",
    "SEQUENCE_MEANS",
    "BaseLossFormula",
    "Cispo",
    "ClipCov",
    "CriticOnlyLoss",
    "Decoupled",
    "DecoupledGspo",
    "DppoCapped",
    "DppoKl",
    "DppoTv",
    "DualClip",
    "Gmpo",
    "Gspo",
    "ImportanceSamplingLoss",
    "KlCov",
    "MaskedImportanceSamplingLoss",
    "PolicyLoss",
    "PolicyLossInputs",
    "PpoClip",
    "ProxApprox",
    "Sapo",
    "SequenceClip",
    "importance_ratio",
]

POLICY_LOSSES = PluginRegistry(
    "policy loss",
    "ramify.policy_losses",
    {
        "ppo_clip": PpoClip,
        "dual_clip": DualClip,
        "gspo": Gspo,
        "gmpo": Gmpo,
        "cispo": Cispo,
        "rollout_is": MaskedImportanceSamplingLoss,
        "sapo": Sapo,
        "dppo_tv": DppoTv,
        "dppo_kl": DppoKl,
        "dppo_capped": DppoCapped,
        "clip_cov": ClipCov,
        "kl_cov": KlCov,
        "decoupled": Decoupled,
        "decoupled_gspo": DecoupledGspo,
        "prox_approx": ProxApprox,
        "importance_sampling": ImportanceSamplingLoss,
        "sequence_clip": SequenceClip,
        "critic": CriticOnlyLoss,
    },
    structs=True,
    aliases={"dppo": "dppo_tv", "geo_mean": "gmpo", "ppo": "ppo_clip"},
    elsewhere={
        name: f"it is an estimator, and as an objective also a loss: set rl.objective={name}"
        for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "maxrl", "remax", "opo")
    },
)
"""Map the name of each policy loss to its class. A configuration gives the name and options, as in
``{"name": "ppo_clip", "clip_high": 0.3}``.

Example:
    rl.loss.policy=gspo                     # in a recipe, by name
"""
SEQUENCE_MEANS = ("gspo", "gmpo", "sapo", "sequence_clip")
"""Policy losses whose papers average over sequences."""
