"""The built-in policy losses, one formula per file.

``POLICY_LOSSES`` maps names to classes. A recipe can also name its own class as ``module:name``, or
register one:

    @POLICY_LOSSES.register("mine")
    class Mine(LossFormula, frozen=True, kw_only=True, tag="mine"): …
"""

from ramify.plugins import Registry
from ramify.train.losses.base import LossFormula, LossTokens, PolicyLoss, ratio
from ramify.train.losses.cispo import Cispo
from ramify.train.losses.cov import ClipCov, KlCov
from ramify.train.losses.critic import CriticOnlyLoss
from ramify.train.losses.decoupled import Decoupled, ProxApprox
from ramify.train.losses.dppo import DppoKl, DppoTv
from ramify.train.losses.gmpo import Gmpo
from ramify.train.losses.gspo import Gspo
from ramify.train.losses.importance_sampling import ImportanceSampling
from ramify.train.losses.ppo_clip import DualClip, PpoClip
from ramify.train.losses.rollout_is import RolloutIs
from ramify.train.losses.sapo import Sapo

__all__ = [
    "POLICY_LOSSES",
    "Cispo",
    "ClipCov",
    "CriticOnlyLoss",
    "Decoupled",
    "DppoKl",
    "DppoTv",
    "DualClip",
    "Gmpo",
    "Gspo",
    "ImportanceSampling",
    "KlCov",
    "LossFormula",
    "LossTokens",
    "PolicyLoss",
    "PpoClip",
    "ProxApprox",
    "RolloutIs",
    "Sapo",
    "ratio",
]

POLICY_LOSSES = Registry(
    "policy loss",
    "ramify.policy_losses",
    {
        "ppo_clip": PpoClip,
        "dual_clip": DualClip,
        "gspo": Gspo,
        "gmpo": Gmpo,
        "cispo": Cispo,
        "rollout_is": RolloutIs,
        "sapo": Sapo,
        "dppo_tv": DppoTv,
        "dppo_kl": DppoKl,
        "clip_cov": ClipCov,
        "kl_cov": KlCov,
        "decoupled": Decoupled,
        "prox_approx": ProxApprox,
        "importance_sampling": ImportanceSampling,
        "critic": CriticOnlyLoss,
    },
    structs=True,
)
"""Name -> class. In a configuration: ``{"name": "ppo_clip", "clip_high": 0.3}``.

Example:
    rl.loss.policy=gspo                     # in a recipe, by name
"""
