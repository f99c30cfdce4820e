"""Presets: the options they set, and the same loss and gradients as the other trainers on random
batches in fp64. ``benchmarks/objectives_table.py`` has the other trainers' formulas."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import msgspec
import pytest

from ramify import train
from ramify.cli.parser import UsageError
from ramify.cli.train import train as train_command
from ramify.errors import ConfigError
from ramify.train.config import Run
from ramify.train.config_overrides import override
from ramify.train.named_objectives import OBJECTIVES
from ramify.train.other_trainer_presets import PRESETS, choices_by_field, with_preset
from tests.docs.pages import ROOT, script

BATCHES = range(4)
WITH_TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
BASE = Run(policy=train.PolicySpec(path="tiny"), rl=train.RlSpec(steps=7))


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("objectives_table")
    finally:
        sys.path.pop(0)


def rl_with_preset(preset: str, *overrides: str) -> train.RlSpec:
    rl = override(with_preset(BASE, preset), overrides, choices_by_field(preset)).rl
    assert rl is not None
    return rl


@pytest.mark.parametrize("name", PRESETS)
def test_preset_matches_loss_and_gradients_of_the_other_trainer(
    name: str, peers: ModuleType
) -> None:
    for seed in BATCHES:
        batch = peers.random_batch(seed)
        assert peers.apart(peers.ours(name, batch), peers.theirs(name, batch)) <= 1e-6


CELLS = [("", each) for each in OBJECTIVES] + [
    (name, each) for name, preset in PRESETS.items() for each in preset.objectives
]


@pytest.mark.parametrize(("preset", "objective"), CELLS, ids=lambda each: each or "paper")
def test_objective_matches_the_formula_of_its_paper_or_trainer(
    preset: str, objective: str, peers: ModuleType
) -> None:
    assert (preset, objective) in list(peers.cells())
    for seed in (0, 9):
        assert peers.difference(preset, objective, peers.random_batch(seed)) <= 1e-6


@pytest.mark.parametrize("preset", ["", *PRESETS])
def test_random_batches_distinguish_the_objectives(preset: str, peers: ModuleType) -> None:
    """Otherwise an objective that is another one by mistake would not be noticed."""
    # Normalised over the step, a factor of n / (n - 1) makes no difference.
    same = {
        "prime": [{"grpo", "dppo"}],
        "areal": [{"grpo", "decoupled"}, {"dr_grpo", "rloo"}],
    }
    names = [each for name, each in peers.cells() if name == preset]
    batches = [peers.random_batch(seed) for seed in (0, 1, 9)]
    found = {
        each: [peers.ours(preset, batch, *peers.words(preset, each)) for batch in batches]
        for each in names
    }
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            pairs = zip(found[one], found[other], strict=True)
            if {one, other} not in same.get(preset, []):
                assert max(peers.apart(*pair) for pair in pairs) > 1e-4, (one, other)


@WITH_TRL
@pytest.mark.filterwarnings("ignore::FutureWarning")  # its configuration
@pytest.mark.parametrize("objective", PRESETS["trl"].objectives)
def test_objective_under_the_trl_preset_matches_the_installed_trl(
    objective: str, peers: ModuleType
) -> None:
    for seed in BATCHES:
        batch = peers.random_batch(seed)
        ours = peers.ours("trl", batch, f"rl.objective={objective}")
        assert peers.apart(ours, peers.trl_cell(objective, batch)) <= 1e-6


@WITH_TRL
@pytest.mark.filterwarnings("ignore::FutureWarning")  # its configuration
@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ((), {}),
        (("rl.loss.policy=cispo",), {"loss_type": "cispo"}),
        (("rl.loss.policy=gspo",), {"importance_sampling_level": "sequence"}),
        (("rl.loss.policy=sapo",), {"loss_type": "sapo"}),
    ],
    ids=lambda each: "+".join(each) if isinstance(each, tuple) else "",
)
def test_loss_alone_under_the_trl_preset_matches_the_installed_trl(
    overrides: tuple[str, ...], changes: dict[str, Any], peers: ModuleType
) -> None:
    for seed in BATCHES:
        batch = peers.random_batch(seed)
        ours, theirs = peers.ours("trl", batch, *overrides), peers.trl_installed(batch, **changes)
        assert peers.apart(ours, theirs) <= 1e-6


@WITH_TRL
@pytest.mark.filterwarnings("ignore::FutureWarning")  # its configuration
def test_trl_preset_has_the_installed_trl_optimizer_defaults() -> None:
    from trl import GRPOConfig

    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[])
    rl = rl_with_preset("trl")
    assert (rl.optim.lr, rl.optim.betas) == (
        args.learning_rate,
        (args.adam_beta1, args.adam_beta2),
    )
    assert (rl.optim.eps, rl.optim.weight_decay) == (args.adam_epsilon, args.weight_decay)
    assert (rl.optim.max_grad_norm, rl.optim.schedule) == (
        args.max_grad_norm,
        args.lr_scheduler_type,
    )
    assert (rl.rollout.group, rl.rollout.temperature) == (args.num_generations, args.temperature)


def test_preset_keeps_the_recipes_task_policy_and_steps() -> None:
    recipe = msgspec.structs.replace(
        BASE,
        rl=msgspec.structs.replace(
            BASE.rl, algorithm=train.RLOO(gamma_tree=0.5), loss=train.LossSpec(entropy=0.1)
        ),
    )
    run = with_preset(recipe, "trl")
    assert run.rl is not None
    assert (run.task, run.policy, run.rl.steps) == (BASE.task, BASE.policy, 7)
    assert run.rl.algorithm == train.GRPO(
        credit="root", reduction="token", drop_zero_variance=False, epsilon=1e-4
    )
    assert run.rl.loss == train.LossSpec(
        policy=train.PpoClip(clip_high=0.2),
        corrections=(train.SequenceMask(high=3.0),),
        kl="k3",
        sequence="rollout",
    )


def test_preset_keeps_signals_of_a_hybrid_algorithm() -> None:
    terms = (train.HybridTerm(signal="tools"),)
    hybrid = train.Hybrid(outcome=train.RLOO(), terms=terms)
    signals = {"tools": train.ToolErrorSignal()}
    rl = train.RlSpec(algorithm=hybrid, signals=signals)
    run = with_preset(msgspec.structs.replace(BASE, rl=rl), "skyrl")
    assert run.rl is not None
    assert run.rl.algorithm.terms == terms
    assert run.rl.algorithm.outcome == rl_with_preset("skyrl").algorithm


def test_named_choices_get_the_other_trainers_options() -> None:
    assert rl_with_preset("skyrl", "rl.loss.policy=cispo").loss.policy == train.Cispo(
        clip_low=1.0, clip_high=4.0
    )
    assert rl_with_preset("verl", "rl.algorithm=grpo").algorithm == train.GRPO(
        credit="root", reduction="token", drop_zero_variance=False
    )
    assert rl_with_preset(
        "verl", "rl.algorithm=gdpo", "rl.algorithm.over=rollouts"
    ).algorithm == train.GDPO(credit="root", reduction="token", drop_zero_variance=False)


def test_unknown_preset_and_run_without_rl_are_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'slyrl': did you mean 'skyrl'"):
        with_preset(BASE, "slyrl")
    without = Run(policy=train.PolicySpec(path="tiny"), sft=train.SftSpec(demos="ledger"))
    with pytest.raises(ConfigError, match="preset trl: run 'run' has no rl stage"):
        with_preset(without, "trl")
    with pytest.raises(UsageError, match="--preset trl needs the recipe: a resumed run keeps"):
        train_command([], resume="runs/x", preset="trl")


def test_algorithms_page_is_up_to_date() -> None:
    page = script("algorithms_page")
    for path, tables in page.PAGES:
        text = path.read_text(encoding="utf-8")
        assert page.written(text, tables) == text, "run: scripts/algorithms_page.py"
