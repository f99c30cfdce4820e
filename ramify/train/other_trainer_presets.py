"""Apply the defaults of another RL trainer to a Ramify recipe, as in ``ramify train RECIPE --preset
trl``.

    recipe ── with_preset(run, "trl") ──> rl.algorithm, rl.loss, rl.optim … as TRL sets them
           ── overrides ────────────────> rl.objective=gspo: GSPO as TRL's code has it
                                          rl.loss.policy=cispo: only the loss, as TRL clips it

A preset sets the objective and the optimizer completely. The task, the model, the limits and the
number of items and steps stay those of the recipe. If an override later chooses an objective or a
loss by name, its options are those of the other trainer too; an objective is set exactly as the
trainer's code computes it.

This module defines what a preset is and how it changes a run. The numbers of each trainer are in
``extras/studies/other_trainer_presets.py``, or in a plug-in of the group ``ramify.presets``. The
options themselves are defined in ``config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import PluginRegistry, is_object_location
from ramify.train.advantages import ALGORITHMS
from ramify.train.config import CHOICES, CriticSpec, Run
from ramify.train.config_overrides import Choices
from ramify.train.losses import POLICY_LOSSES
from ramify.train.named_objectives import (
    OBJECTIVES,
    PLAIN_LOSS,
    Options,
    canonical_objective_name,
    replace_estimator,
)


class ForeignTrainerObjective(msgspec.Struct, frozen=True):
    """Another trainer's variant of a training objective, expressed in Ramify's options."""

    name: str
    """Name of the objective in the other trainer's configuration."""
    algorithm: Options
    """The estimator, and options that differ from those of
    ``OtherTrainerDefaults.each_algorithm``."""
    policy: Options
    """The policy loss."""
    loss: Options = {}
    """Options of ``rl.loss`` that differ from those of the preset."""
    note: str = ""


class OtherTrainerDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults of another trainer, expressed in Ramify's options."""

    trainer: str
    """Name and version of the trainer that these defaults come from."""
    algorithm: str
    """The trainer's default estimator."""
    policy: str
    """The trainer's default policy loss."""
    each_algorithm: Options
    """Options that apply to every estimator that has them."""
    algorithms: Mapping[str, Options] = {}
    """Further options for individual estimators, by estimator name."""
    policies: Mapping[str, Options]
    """Options for individual policy losses, by name of the loss."""
    loss: Options = {}
    """Other options of ``rl.loss``."""
    objectives: Mapping[str, ForeignTrainerObjective]
    """Map the name of each objective that the trainer offers to the trainer's form of it."""
    optim: Options
    """Options of ``rl.optim``."""
    critic: Options = {}
    """Options of the critic's optimizer that differ from ``optim``."""
    rollout: Options = {}
    """Options of ``rl.rollout``."""
    minibatches: int = 1
    differences: tuple[str, ...]
    """Differences that no option removes, one sentence each."""


PRESETS = PluginRegistry("preset", "ramify.presets", {})
"""Map the name of each preset to its ``OtherTrainerDefaults``."""
ALIASES = {"prime_rl": "prime", "prime-rl": "prime"}
"""Map other names, in lower case, to the names of presets."""


class NamedConfigBuilder(msgspec.Struct, frozen=True):
    """Builds configuration objects by name, using the options that a preset sets for each name.

    An example of a name is ``gspo``, for a policy loss.
    """

    registry: PluginRegistry
    each: Options
    options: Mapping[str, Options]

    def build(self, value: Any) -> Any:
        """Build the object that a configuration value describes.

        A name gets the options of the preset. Any other value is built without them.
        """
        if not isinstance(value, str):
            return self.registry.build(value)
        known = _fields(self.registry.resolve(value))
        chosen = {**self.each, **self.options.get(self.registry.canonical(value), {})}
        options = {name: option for name, option in chosen.items() if name in known}
        return self.registry.build({"name": value, **options})


def preset_named(name: str) -> OtherTrainerDefaults:
    """Return the preset with the given name, or the one at a location ``module:name`` or
    ``file.py:name``.

    Raises ConfigError, which suggests the nearest name, if there is none.
    """
    found = name if is_object_location(name) else ALIASES.get(name.lower(), name.lower())
    preset = PRESETS.resolve(found)
    if not isinstance(preset, OtherTrainerDefaults):
        raise ConfigError(f"preset '{name}' is not a Preset of ramify.train.other_trainer_presets")
    return preset


def choices_by_field(name: str | None) -> Choices:
    """Return the functions that build values chosen by name, keyed by configuration field.

    Overrides such as ``rl.objective=grpo`` choose such a value. With a preset, the named objects
    get the options of the preset.
    """
    if name is None:
        return CHOICES
    return {
        "rl.objective": lambda run, objective: with_preset_objective(run, name, objective),
        **_builders_by_field(preset_named(name)),
    }


def _builders_by_field(preset: OtherTrainerDefaults) -> dict[str, NamedConfigBuilder]:
    return {
        "rl.algorithm": NamedConfigBuilder(ALGORITHMS, preset.each_algorithm, preset.algorithms),
        "rl.loss.policy": NamedConfigBuilder(POLICY_LOSSES, {}, preset.policies),
    }


def with_preset_objective(run: Run, name: str, objective: str) -> Run:
    """Return ``run`` with an objective that is computed as in the trainer of the preset ``name``.

    Raises ConfigError, which lists the available objectives, if the trainer does not have this one.
    """
    preset = preset_named(name)
    objective = canonical_objective_name(objective)
    rl = run.rl
    if rl is None:
        raise ConfigError(f"run '{run.name}' has no rl stage to set an objective for: set rl")
    if objective not in preset.objectives:
        raise ConfigError(
            f"{preset.trainer.split()[0]} has no objective {objective}, only "
            f"{', '.join(sorted(preset.objectives))}: choose one of them, or remove --preset "
            f"{name} to use {objective} as in its paper"
        )
    theirs = preset.objectives[objective]
    kind = ALGORITHMS.resolve(theirs.algorithm["name"])
    each = {key: value for key, value in preset.each_algorithm.items() if key in _fields(kind)}
    algorithm = replace_estimator(rl.algorithm, ALGORITHMS.build({**each, **theirs.algorithm}))
    policy = POLICY_LOSSES.build(theirs.policy)
    loss = msgspec.structs.replace(
        rl.loss, policy=policy, **{**PLAIN_LOSS, **preset.loss, **theirs.loss}
    )
    rl = msgspec.structs.replace(rl, objective=objective, algorithm=algorithm, loss=loss)
    return msgspec.structs.replace(run, rl=rl)


def known_policy_losses(objective: str) -> list[str]:
    """Return the names of the policy losses used for an objective in its paper and by other
    trainers."""
    presets = [preset_named(name) for name in sorted(PRESETS.ours)]
    theirs = [each.objectives[objective] for each in presets if objective in each.objectives]
    policies = [OBJECTIVES[objective].policy, *(each.policy for each in theirs)]
    return list(dict.fromkeys(str(policy["name"]) for policy in policies))


def _fields(kind: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    return fields


def with_preset(run: Run, name: str) -> Run:
    """Return ``run`` with the defaults of another trainer in its ``rl`` stage.

    ``name`` is ``trl``, ``skyrl``, ``prime``, ``verl`` or ``areal``. Raises ConfigError if the name
    is unknown or the run has no such stage.

    Example:
        return train.with_preset(run, "trl")      # in a recipe; --preset trl on the command line
    """
    preset = preset_named(name)
    rl = run.rl
    if rl is None:
        raise ConfigError(f"preset {name}: run '{run.name}' has no rl stage to set it for: set rl")
    named = _builders_by_field(preset)
    # What wraps others keeps what the recipe chose, around or beside the preset's algorithm.
    algorithm = replace_estimator(rl.algorithm, named["rl.algorithm"].build(preset.algorithm))
    fields = {
        "objective": "",
        "algorithm": algorithm,
        "loss": msgspec.structs.replace(
            rl.loss,
            policy=named["rl.loss.policy"].build(preset.policy),
            **{**PLAIN_LOSS, **preset.loss},
        ),
        "optim": msgspec.convert(preset.optim, type(rl.optim)),
        "rollout": msgspec.structs.replace(rl.rollout, **preset.rollout),
        "sample": msgspec.structs.replace(rl.sample, minibatches=preset.minibatches),
    }
    if preset.critic:
        optim = msgspec.convert({**preset.optim, **preset.critic}, type(rl.optim))
        fields["critic"] = CriticSpec(model="own", optim=optim)
    return msgspec.structs.replace(run, rl=msgspec.structs.replace(rl, **fields))
