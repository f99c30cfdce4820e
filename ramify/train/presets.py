"""The defaults of other trainers, for a recipe of ours: ``ramify train RECIPE --preset trl``.

    recipe ── with_preset(run, "trl") ──> rl.algorithm, rl.loss, rl.optim … as TRL sets them
           ── overrides ────────────────> rl.loss.policy=cispo: CISPO as TRL clips it

A preset sets the objective and the optimizer completely. The task, the model, the limits and the
number of items and steps stay those of the recipe. Names that an override chooses afterwards have
the options that they have in the other trainer. ``docs/presets.md`` lists all of it, and
``tests/train/test_presets.py`` compares losses and gradients with the other trainers' code.

Not here: the meaning of an option (see config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError, nearest
from ramify.plugins import Registry
from ramify.train.advantages.by_task import ByTask
from ramify.train.config import CHOICES, CriticSpec, Run
from ramify.train.losses.critic import ValueLoss
from ramify.train.override import Choices
from ramify.train.signals.compose import Hybrid

Options = Mapping[str, Any]


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults of one trainer, in our options."""

    trainer: str
    """The trainer and the version whose defaults these are."""
    algorithm: str
    """Its default estimator."""
    policy: str
    """Its default policy loss."""
    each_algorithm: Options
    """Options of every estimator that has them."""
    algorithms: Mapping[str, Options] = {}
    """Estimator -> further options."""
    policies: Mapping[str, Options]
    """Policy loss -> options."""
    loss: Options = {}
    """Other options of ``rl.loss``."""
    optim: Options
    """Options of ``rl.optim``."""
    critic: Options = {}
    """Options of the critic's optimizer that differ from ``optim``."""
    rollout: Options = {}
    """Options of ``rl.rollout``."""
    minibatches: int = 1
    differences: tuple[str, ...]
    """What stays different, one sentence each."""


_ADAMW = {"kind": "adamw", "lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "max_grad_norm": 1.0}
_FLAT: Options = {"schedule": "constant", "warmup_steps": 0, "num_steps": None}
_TOKEN_MEAN: Options = {"credit": "root", "reduction": "token", "drop_zero_variance": False}
_EVEN_CLIP: Options = {"clip_low": 0.2, "clip_high": 0.2}
_CLIPPED: Mapping[str, Options] = dict.fromkeys(
    ("ppo_clip", "dual_clip", "gspo", "clip_cov"), _EVEN_CLIP
)
_DECAY = "Its weight decay also applies to norms, biases and embeddings; here these do not decay."
_MINIBATCH = (
    "It divides each minibatch by the tokens of that minibatch; here by those of the step over "
    "the number of minibatches."
)

PRESETS: Mapping[str, Preset] = {
    "trl": Preset(
        trainer="TRL 1.16.0, GRPOTrainer with vLLM",
        algorithm="grpo",
        policy="ppo_clip",
        each_algorithm=_TOKEN_MEAN,
        algorithms={
            "grpo": {"epsilon": 1e-4},
            "gdpo": {"epsilon": 1e-4},
            "dr_grpo": {"reduction": "constant", "rollout_tokens": 512},
        },
        policies={**_CLIPPED, "cispo": {"clip_low": 1.0, "clip_high": -0.8}},
        loss={"corrections": [{"name": "sequence_mask", "high": 3.0}], "kl": "k3"},
        optim={
            **_ADAMW,
            "weight_decay": 0.0,
            "schedule": "linear",
            "warmup_steps": 0,
            "num_steps": None,
            "final_fraction": 0.0,
        },
        rollout={"group": 8, "temperature": 1.0, "top_p": None, "top_k": None},
        differences=(
            "Each call of a tree is a separate sequence for the correction; there, a rollout is "
            "one sequence.",
            "CISPO has an upper bound alone, which is 0.2 unless it is set: its help recommends "
            "5, here `rl.loss.policy.clip_high=4`.",
            "A KL penalty, off by default, is multiplied there by the ratio to the old policy "
            "(`use_bias_correction_kl`).",
            "Its default batch is one item per device, and replies have at most 512 tokens; here "
            "the recipe says so (`rl.sample.items`, `limits.max_reply_tokens`).",
        ),
    ),
    "skyrl": Preset(
        trainer="SkyRL at a956457 (2026-08-21)",
        algorithm="grpo",
        policy="ppo_clip",
        each_algorithm={**_TOKEN_MEAN, "kl_reduction": "rollout"},
        policies={
            **_CLIPPED,
            "rollout_is": _EVEN_CLIP,
            "cispo": {"clip_low": 1.0, "clip_high": 4.0},
            "kl_cov": {"share": 0.2},
        },
        loss={
            "corrections": (),
            "old": "pass",
            "kl_beta": 1e-3,
            "kl": "k3",
            "value": ValueLoss(weight=1.0),
        },
        optim={**_ADAMW, **_FLAT, "weight_decay": 0.01},
        critic={"lr": 5e-6},
        rollout={"group": 5, "temperature": 1.0, "top_p": None, "top_k": None},
        minibatches=4,
        differences=(
            _MINIBATCH,
            _DECAY,
            "Its default batch is 1,024 items, in minibatches of 256; here the recipe says how "
            "many (`rl.sample.items`).",
            "With a critic, it averages the value loss by rollout and not by token.",
        ),
    ),
    "prime": Preset(
        trainer="prime-rl at 559b447 (2026-08-21)",
        algorithm="dr_grpo",
        policy="dppo_tv",
        each_algorithm={**_TOKEN_MEAN, "drop_zero_variance": "calls"},
        policies={"dppo_tv": {"delta": 0.2, "pull": 1e-3}},
        loss={"corrections": ()},
        optim={**_ADAMW, **_FLAT, "weight_decay": 0.01},
        rollout={"temperature": 1.0, "top_p": None, "top_k": None},
        differences=(
            "Its default group of one rollout has nothing to compare; here the recipe says how "
            "many (`rl.rollout.group`).",
            "It is always asynchronous and drops rollouts of weights more than 8 steps old; here "
            "`rl.sample.max_staleness` says how far rollouts run ahead.",
            "In a conversation that branches, each trace counts in the mean of its group there; "
            "here each rollout.",
            _DECAY,
        ),
    ),
    "verl": Preset(
        trainer="verl at 1dda039 (0.10.0.dev, 2026-08-22)",
        algorithm="ppo",
        policy="dual_clip",
        each_algorithm=_TOKEN_MEAN,
        algorithms={"gdpo": {"over": "tokens"}},
        policies={
            **_CLIPPED,
            "dual_clip": {**_EVEN_CLIP, "bound": 3.0},
            "cispo": _EVEN_CLIP,
            "gmpo": _EVEN_CLIP,
            "kl_cov": {"beta": 0.1},
        },
        loss={
            "corrections": (),
            "old": "pass",
            "kl": "k3",
            "value": ValueLoss(weight=1.0, clip=0.5),
        },
        optim={**_ADAMW, **_FLAT, "weight_decay": 0.01},
        critic={"lr": 1e-5},
        rollout={"group": 1, "temperature": 1.0, "top_p": None, "top_k": None},
        minibatches=4,
        differences=(
            "Its configuration begins with PPO and a critic; for GRPO with its options: "
            "`rl.algorithm=grpo rl.rollout.group=8`.",
            "DPPO caps the ratio at 20 there.",
            _MINIBATCH,
            _DECAY,
            "Its default batch is 1,024 items, in minibatches of 256; here the recipe says how "
            "many (`rl.sample.items`).",
        ),
    ),
}
"""Name -> preset."""


class PresetChoices(msgspec.Struct, frozen=True):
    """What the names of a field stand for under a preset."""

    registry: Registry
    each: Options
    options: Mapping[str, Options]

    def build(self, value: Any) -> Any:
        """As ``Registry.build``, with the preset's options for a name."""
        if not isinstance(value, str):
            return self.registry.build(value)
        known = getattr(self.registry.of(value), "__struct_fields__", ())
        chosen = {**self.each, **self.options.get(value, {})}
        options = {name: option for name, option in chosen.items() if name in known}
        return self.registry.build({"name": value, **options})


def preset_named(name: str) -> Preset:
    """The preset called ``name``. Raises ConfigError with the nearest name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}': {nearest(name, PRESETS)}")
    return PRESETS[name]


def choices(name: str | None) -> Choices:
    """What overrides may choose by name, with the options of the preset ``name``."""
    if name is None:
        return CHOICES
    preset = preset_named(name)
    return {
        "rl.algorithm": PresetChoices(
            CHOICES["rl.algorithm"], preset.each_algorithm, preset.algorithms
        ),
        "rl.loss.policy": PresetChoices(CHOICES["rl.loss.policy"], {}, preset.policies),
    }


def with_preset(run: Run, name: str) -> Run:
    """``run`` with the defaults of another trainer (``trl``, ``skyrl``, ``prime`` or ``verl``) in
    its stage ``rl``. Raises ConfigError for an unknown name, or a run without that stage.

    Example:
        return train.with_preset(run, "trl")      # in a recipe; --preset trl on the command line
    """
    preset = preset_named(name)
    rl = run.rl
    if rl is None:
        raise ConfigError(f"preset {name}: run '{run.name}' has no rl stage, which it would set")
    named = choices(name)
    outcome = named["rl.algorithm"].build(preset.algorithm)
    # What wraps others keeps what the recipe chose, around or beside the preset's algorithm.
    algorithm = outcome
    if isinstance(rl.algorithm, Hybrid):
        algorithm = msgspec.structs.replace(rl.algorithm, outcome=outcome)
    elif isinstance(rl.algorithm, ByTask):
        algorithm = msgspec.structs.replace(rl.algorithm, other=outcome)
    plain = {"old": "auto", "kl_beta": 0.0, "entropy": 0.0}
    fields = {
        "algorithm": algorithm,
        "loss": msgspec.structs.replace(
            rl.loss, policy=named["rl.loss.policy"].build(preset.policy), **{**plain, **preset.loss}
        ),
        "optim": msgspec.convert(preset.optim, type(rl.optim)),
        "rollout": msgspec.structs.replace(rl.rollout, **preset.rollout),
        "sample": msgspec.structs.replace(rl.sample, minibatches=preset.minibatches),
    }
    if preset.critic:
        optim = msgspec.convert({**preset.optim, **preset.critic}, type(rl.optim))
        fields["critic"] = CriticSpec(model="own", optim=optim)
    return msgspec.structs.replace(run, rl=msgspec.structs.replace(rl, **fields))
