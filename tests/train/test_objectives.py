"""Objectives by name: what they set, what stays, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec
import pytest

from ramify import train
from ramify.errors import ConfigError
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.base import with_reduction
from ramify.train.config import CHOICES, Run, to_plain_data
from ramify.train.config_overrides import override
from ramify.train.named_objectives import OBJECTIVES
from ramify.train.other_trainer_presets import PRESETS, choices_by_field, with_preset
from ramify.train.preflight import check_objective
from tests.train.small import small

BASE = Run(policy=train.PolicySpec(path="tiny"), rl=train.RlSpec(steps=7))


def rl_of(*overrides: str, preset: str | None = None, run: Run = BASE) -> train.RlSpec:
    base = run if preset is None else with_preset(run, preset)
    rl = override(base, overrides, choices_by_field(preset)).rl
    assert rl is not None
    return rl


def test_objective_sets_estimator_loss_reduction_clipping_and_sequence_together() -> None:
    rl = rl_of("rl.objective=gspo")
    assert rl.objective == "gspo"
    assert rl.algorithm == train.GRPO(reduction="call", drop_zero_variance=False)
    assert rl.loss == train.LossSpec(policy=train.Gspo(clip_low=3e-4, clip_high=4e-4))
    assert (rl.loss.sequence, rl.loss.reduction) == ("call", "call")
    assert rl.steps == 7


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_stored_and_restored(name: str) -> None:
    rl = rl_of(f"rl.objective={name}")
    run = msgspec.structs.replace(BASE, rl=rl)
    stored = msgspec.convert(to_plain_data(run), Run)
    assert stored.rl is not None
    assert stored.rl.objective == name
    assert stored.rl.loss == rl.loss
    algorithm = dict(stored.rl.algorithm)
    assert msgspec.convert(algorithm, ALGORITHMS.resolve(algorithm.pop("name"))) == rl.algorithm


def test_single_fields_are_changed_after_the_objective_in_any_order() -> None:
    words = ["rl.objective=gspo", "rl.loss.policy.clip_high=1e-3", "rl.algorithm.credit=root"]
    rl = rl_of(*words)
    assert rl == rl_of(*reversed(words))
    assert rl.loss.policy == train.Gspo(clip_high=1e-3)
    assert rl.algorithm.credit == "root"
    assert rl_of("rl.objective=gspo", "rl.algorithm=rloo").algorithm == train.RLOO()


def test_objective_keeps_what_no_paper_decides() -> None:
    given = train.RLOO(credit="hierarchical", gamma_tree=0.5, llm_calls=True, length_weight=0.1)
    loss = train.LossSpec(kl_beta=0.5, kd_clip=2.0, corrections=("icepop",))
    run = msgspec.structs.replace(BASE, rl=train.RlSpec(algorithm=given, loss=loss))
    rl = rl_of("rl.objective=dapo", run=run)
    kept = {"credit": "hierarchical", "gamma_tree": 0.5, "llm_calls": True, "length_weight": 0.1}
    assert rl.algorithm == train.DAPO(**kept)
    assert rl.loss == train.LossSpec(policy=train.PpoClip(), kd_clip=2.0)


def test_hybrid_keeps_its_terms_around_the_objective() -> None:
    hybrid = train.Hybrid(outcome=train.RLOO(), terms=(train.HybridTerm(signal="tools"),))
    signals = {"tools": train.ToolErrorSignal()}
    run = msgspec.structs.replace(BASE, rl=train.RlSpec(algorithm=hybrid, signals=signals))
    rl = rl_of("rl.objective=dr_grpo", run=run)
    assert rl.algorithm.terms == hybrid.terms
    assert isinstance(rl.algorithm.outcome, train.DrGRPO)


def test_objective_in_a_recipe_sets_the_fields_that_are_not_given() -> None:
    rl = train.RlSpec(objective="dapo", algorithm=train.RLOO())
    assert rl.algorithm == train.RLOO()
    assert rl.loss.policy == train.PpoClip(clip_high=0.28)
    assert train.RlSpec(objective="dapo").algorithm == rl_of("rl.objective=dapo").algorithm
    assert train.with_objective(BASE, "dapo").rl == rl_of("rl.objective=dapo")
    assert train.RlSpec().algorithm == train.DrGRPO()
    assert train.RlSpec().loss == train.LossSpec()


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("DAPO", "dapo"),
        ("drgrpo", "dr_grpo"),
        ("Dr.GRPO", "dr_grpo"),
        ("reinforce++", "reinforce_pp"),
        ("REINFORCE++-baseline", "reinforce_pp_baseline"),
        ("geo_mean", "gmpo"),
        ("areal", "decoupled"),
    ],
)
def test_aliases_of_objectives(alias: str, name: str) -> None:
    assert rl_of(f"rl.objective={alias}") == rl_of(f"rl.objective={name}")


def test_aliases_of_estimators_and_losses() -> None:
    assert rl_of("rl.algorithm=reinforce++").algorithm == train.ReinforcePP()
    assert rl_of("rl.algorithm=drgrpo").algorithm == train.DrGRPO()
    assert rl_of("rl.algorithm=dapo").algorithm == train.DAPO(reduction="token", overlong="mask")
    assert rl_of("rl.loss.policy=dppo").loss.policy == train.DppoTv()
    trl = rl_of("rl.algorithm=DrGRPO", preset="trl").algorithm
    assert (trl.reduction, trl.rollout_tokens) == ("constant", 512)


def test_names_of_another_kind_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"algorithm 'gspo': .* set rl\.objective=gspo"):
        rl_of("rl.algorithm=gspo")
    with pytest.raises(ConfigError, match=r"policy loss 'dapo': .* set rl\.objective=dapo"):
        rl_of("rl.loss.policy=dapo")
    with pytest.raises(ConfigError, match=r"rl\.objective=GSOP: .*did you mean 'gspo'"):
        rl_of("rl.objective=GSOP")
    without = Run(policy=train.PolicySpec(path="tiny"), sft=train.SftSpec(demos="ledger"))
    for preset in (None, "trl"):
        with pytest.raises(ConfigError, match="has no rl stage to set an objective for"):
            override(without, ["rl.objective=gspo"], choices_by_field(preset))


def test_objective_under_a_preset_is_as_that_trainer_has_it() -> None:
    verl = rl_of("rl.objective=gspo", preset="verl")
    assert verl.loss.policy == train.Gspo(clip_low=0.2, clip_high=0.2)
    assert (verl.algorithm.reduction, verl.loss.reduction) == ("rollout", "rollout")
    rloo = rl_of("rl.objective=rloo", preset="trl")
    assert (rloo.algorithm.kl_reward, rloo.algorithm.kl_over) == (0.05, "rollout")
    assert rl_of("rl.objective=dppo", preset="skyrl").loss.policy == train.DppoTv(pull=0.0)
    areal = rl_of("rl.objective=decoupled", preset="areal").loss.policy
    assert (areal.cap, areal.drop) == (5.0, True)
    assert rl_of("rl.loss.policy=cispo", preset="trl").loss.policy == train.Cispo(cap=0.2)


def test_loss_alone_averages_per_sequence_where_the_trainer_does() -> None:
    assert rl_of("rl.loss.policy=gspo", preset="verl").loss.reduction == "rollout"
    for preset in ("trl", "skyrl", "areal"):
        assert rl_of("rl.loss.policy=gspo", preset=preset).loss.reduction is None
    assert rl_of("rl.loss.policy=gspo").loss.reduction == "call"


def test_objective_that_a_trainer_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match="prime-rl has no objective gspo, only dppo, grpo, maxrl"):
        rl_of("rl.objective=gspo", preset="prime_rl")
    assert rl_of(preset="prime_rl") == rl_of(preset="PRIME")
    for name, preset in PRESETS.items():
        for objective in preset.objectives:
            assert rl_of(f"rl.objective={objective}", preset=name).objective == objective


def test_group_of_one_is_refused_with_objectives_that_need_none() -> None:
    run = override(BASE, ["rl.objective=grpo", "rl.rollout.group=1"], CHOICES)
    with pytest.raises(ConfigError, match=r"rollout\.group=1 has one: set .*=8, or .*reinforce_pp"):
        check_objective(run)
    for name in ("ppo", "reinforce_pp", "remax", "rae"):
        check_objective(override(run, [f"rl.objective={name}"], CHOICES))


def test_backend_without_a_critic_is_refused() -> None:
    run = override(BASE, ["rl.objective=ppo"], CHOICES)
    backend = f"{__name__}:NoCritic"
    compute = train.TrainerComputeSpec(backend=backend)
    with pytest.raises(ConfigError, match=r"objective=ppo needs a critic, .*as reinforce_pp"):
        check_objective(msgspec.structs.replace(run, compute=compute))


class NoCritic:
    """A plug-in's backend that cannot have a critic."""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rl.loss.policy=gspo", "rl.algorithm.reduction=token"), "reduction=token has no effect"),
        (("rl.objective=sapo", "rl.loss.policy.sequence_mean=false"), None),
        (
            ("rl.objective=sapo", "rl.loss.policy.sequence_mean=false", "rl.algorithm=grpo"),
            "paper of sapo, which averages over sequences",
        ),
        (("rl.objective=gspo", "rl.loss.policy=ppo_clip"), "rl.objective=gspo has the loss gspo"),
        (("rl.objective=gspo",), None),
        (("rl.loss.policy=gmpo",), None),
    ],
)
def test_another_reduction_or_loss_than_the_papers_warns(
    overrides: tuple[str, ...], message: str | None
) -> None:
    run = override(BASE, overrides, CHOICES)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_objective(run)
    assert len(found) == (message is not None)
    assert message is None or message in str(found[0].message)


def test_a_losses_reduction_reaches_all_estimators_but_imitation() -> None:
    by_task = train.PerTaskAlgorithm(
        tasks={"a": train.RLOO(), "b": train.SFT()}, other=train.GRPO()
    )
    found = with_reduction(by_task, train.LossSpec(policy="gspo").reduction)
    assert (found.tasks["a"].reduction, found.other.reduction) == ("call", "call")
    assert found.tasks["b"] == train.SFT()
    assert (
        with_reduction(train.Hybrid(outcome=train.RLOO()), "rollout").outcome.reduction == "rollout"
    )
    assert with_reduction(by_task, train.LossSpec().reduction) is by_task


def test_a_run_with_an_objective_trains_with_its_reduction(tmp_path: Path) -> None:
    base = override(small(), ["rl.steps=1"])
    run = override(base, ["rl.objective=gspo", "rl.loss.sequence=rollout"], CHOICES)
    train.train(run, tmp_path / "run")
    steps = [each for each in train.read_metrics(tmp_path / "run") if each.stage == "rl"]
    assert any(each.values.get("grad_norm", 0.0) > 0 for each in steps)
