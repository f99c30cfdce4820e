"""Assembling runs: invalid configurations are rejected before training, recipes are loaded, and
stored runs are read back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.actors.launcher import add_to_exit_stack
from ramify.errors import ConfigError, TrainError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.advantages.group_estimators import GRPO
from ramify.train.advantages.sft import SFT
from ramify.train.backends.base import FsdpSpec, OptimizerSpec
from ramify.train.checkpoint import CheckpointedProgress, CheckpointStore, read_state
from ramify.train.config import (
    CriticSpec,
    EvaluateSpec,
    InductionWarmUpSpec,
    LoraSpec,
    PolicySpec,
    RlSpec,
    Run,
    SftSpec,
    TaskSpec,
    to_plain_data,
)
from ramify.train.execute import train
from ramify.train.lineage import check_changes
from ramify.train.losses.total_loss import LossSpec
from ramify.train.policy_dependent_defaults import with_policy_defaults
from ramify.train.recipe import load_recipe, load_stored_run
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.trained_policy_settings import PolicyRolloutSettings, read_policy_settings
from tests.shown import heard
from tests.train.small import SHAPE, assemble, small

RECIPES = Path(__file__).parents[2] / "recipes"
LATE = OptimizerSpec(schedule="linear", warmup_steps=30)
"""Its learning rate warms up for longer than any stage of the small run lasts."""


def of_another_task(task: Any, num: int, seed: int, scaffold: Any) -> list[Any]:
    return [item.metadata["colour"] for item in task.splits["train"][:num]]


def changed(part: str, **fields: Any) -> Run:
    run = small()
    return msgspec.structs.replace(
        run, **{part: msgspec.structs.replace(getattr(run, part), **fields)}
    )


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            changed("task", name="tests.train.small:wrong"),
            "item wrong/train/0: the right answer 1.0 scores 0.5 and not 1",
        ),
        (changed("task", name="ledgre"), "unknown task 'ledgre': did you mean 'ledger'?"),
        (
            changed("evaluate", final=("tset",)),
            "task 'even' has no split 'tset': did you mean 'test'?",
        ),
        (
            changed("policy", shape={**SHAPE, "max_position_embeddings": 9}),
            "does not fit the policy: its prompt has",
        ),
        (
            changed("policy", tokenizer="nowhere"),
            "policy.tokenizer=nowhere: nowhere does not exist",
        ),
        (
            changed("sft", demos="tests.train.test_assembly:of_another_task"),
            "cannot demonstrate the task 'ledger': KeyError('colour') at ",
        ),
        (changed("sft", demos="ledgr"), "unknown demos 'ledgr': did you mean 'ledger'?"),
        (
            changed(
                "sft", algorithm=msgspec.structs.replace(small().sft.algorithm, min_reward=9.0)
            ),
            "none of 30 trajectories",
        ),
        (changed("policy", device="cuda:99"), "policy.device=cuda:99: this machine has"),
        (
            changed("compute", shard=FsdpSpec(ranks=2)),
            "ranks=2, but compute.backend=single trains in one process",
        ),
        (
            changed("warmup", optim=LATE),
            "warmup.optim.schedule=linear needs more steps than the 30 of warm-up, but has 2",
        ),
        (changed("sft", optim=LATE), "sft.optim.schedule=linear needs more steps than"),
        (changed("rl", optim=LATE), "lower rl.optim.warmup_steps"),
        (
            changed("rl", critic=CriticSpec(model="own", optim=LATE)),
            "rl.critic.optim.schedule=linear needs more steps than the 30 of warm-up, but has 8",
        ),
        (
            msgspec.structs.replace(small(), sft=None),
            "a model trained from scratch needs a tokenizer, or demonstrations",
        ),
    ],
)
def test_invalid_run_is_rejected_before_training(run: Run, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(run, tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_torchrun_with_several_processes_needs_fsdp(tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"torchrun started 2 processes, .*: set compute\.backend=fsdp"
    ):
        train(small(), tmp_path / "out")


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none"])
def test_unwritable_run_folder_is_rejected_first(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot write to the run's folder .*: give another one with --out"
    ):
        train(small(), tmp_path / place)


def test_checkpoint_of_another_architecture_is_rejected_before_engines_start(
    tmp_path: Path,
) -> None:
    from ramify.models.load import save_policy

    other = assemble(changed("policy", shape={**SHAPE, "hidden_size": 48}))
    run = small(inference=InferenceSpec())
    CheckpointStore(tmp_path).save(
        CheckpointedProgress(step=1, config=to_plain_data(run)),
        {"policy": lambda folder: save_policy(other.policy, folder)},
    )
    with pytest.raises(
        ConfigError, match=r"tensor 'model\.embed_tokens\.weight' is \d+x48, but \d+x32 in"
    ):
        train(run, tmp_path, resume=tmp_path)
    assert not (tmp_path / "inference").exists()


def test_policy_without_its_templates_special_tokens_is_rejected(tmp_path: Path) -> None:
    from ramify.models.load import save_policy

    made = assemble(small())
    save_policy(made.policy, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / name
        path.write_text(path.read_text().replace("<|a|>", "<|b|>"))
    with pytest.raises(ConfigError, match=r"<\|a\|>"):
        assemble(changed("policy", path=str(tmp_path), shape={}))


def test_packaged_policy_is_found_by_name() -> None:
    from ramify.models.load import load_policy
    from ramify.models.weights import fingerprint
    from tests.packaged import TINY

    made = assemble(changed("policy", path="tiny", shape={}))
    assert fingerprint(made.policy.model) == fingerprint(load_policy(TINY, device="cpu").model)


def test_saved_policy_names_its_scaffold_and_its_limits(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from ramify.engine.prompt_scaffold import TINY\n")
    limits = {"max_turns": 2, "max_reply_tokens": 8}
    for scaffold, named in (("tiny", "tiny"), (f"{own}:TINY", None)):
        assemble(small(scaffold=scaffold)).export_initial_policy(tmp_path / "policy")
        card = read_policy_settings(tmp_path / "policy")
        expected = PolicyRolloutSettings(
            named, **limits, is_from_scratch=True, task=small().task.name
        )
        assert card == expected


def test_demonstrations_longer_than_the_window_are_left_out_with_a_warning() -> None:
    messages: list[str] = []
    with heard(messages.append):
        made = assemble(changed("policy", shape={**SHAPE, "max_position_embeddings": 200}))
    assert max(map(len, made.rows)) <= 200
    assert "demonstration sequences are left out: the longest has" in messages[0]


def test_group_of_one_is_refused_without_a_named_objective() -> None:
    with pytest.raises(
        ConfigError,
        match=r"rl\.algorithm=\w+ compares the rollouts of a group, .*set rl\.rollout\.group=8, or .*"
        r"rl\.objective=.*reinforce_pp",
    ):
        assemble(changed("rl", rollout=RolloutOptions(group=1)))


def test_k1_kl_gives_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"rl\.loss\.kl=k1: the gradient of k1 does not depend on the reference"
    ):
        assemble(changed("rl", loss=LossSpec(kl_beta=0.1, kl="k1")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assemble(small())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(policy=PolicySpec(), sft=None), "give path"),
        (lambda: PolicySpec(shape={"hidden_size": 3}), "has no model_type"),
        (lambda: SftSpec(), "nothing to learn from"),
        (lambda: SftSpec(demos="ledger", epochs=0), r"sft\.epochs=0 must be at least 1$"),
        (lambda: LoraSpec(rank=0), "must be at least 1"),
        (
            lambda: RlSpec(steps=-5),
            r"rl\.steps=-5 must be at least 1; for no reinforcement learning set rl to null",
        ),
        (
            lambda: InductionWarmUpSpec(steps=0),
            r"warmup\.steps=0 must be at least 1; for no warm-up set warmup to null",
        ),
        (lambda: EvaluateSpec(num=0), r"evaluate\.num=0 must be at least 1$"),
        (lambda: EvaluateSpec(validation=0), r"evaluate\.validation=0 must be at least 1$"),
        (lambda: EvaluateSpec(temperature=0.0), r"evaluate\.temperature=0 must be above 0$"),
        (lambda: Run(policy=PolicySpec(path="x")), "has no stage"),
    ],
)
def test_meaningless_specs_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_recipes_are_loaded_with_overrides() -> None:
    run = load_recipe(RECIPES / "tiny.py", ["rl.algorithm=grpo", "rl.optim.lr=1e-5", "seed=3"])
    assert run.rl is not None
    assert (run.rl.algorithm, run.rl.optim.lr, run.seed) == (GRPO(), 1e-5, 3)
    with pytest.raises(ConfigError, match="no field 'optm'"):
        load_recipe(RECIPES / "tiny.py", ["rl.optm.lr=1"])
    recursive = load_recipe(RECIPES / "tiny_recursive.py")
    assert recursive.task == TaskSpec(name="ledger", options={"multi": 1.0, "long": 0.05})


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_recipes_have_time_limits_that_a_busy_machine_does_not_reach(path: Path) -> None:
    """Only a stuck process would reach that limit, and a stuck run ends earlier with an error
    (``stall_s``)."""
    if path.stem == "rl_loop":  # a standalone script
        assert "max_seconds=86_400" in path.read_text()
        return
    run = load_recipe(path)
    assert run.limits.max_seconds == 86_400 > 10 * run.stall_s
    staleness = 2 if path.stem == "qwen3_8b_8gpu_async" else 0
    assert run.rl is None or (run.rl.sample.max_staleness, run.rl.sample.straggler_factor) == (
        staleness,
        None,
    )


def test_files_that_are_not_recipes_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "no_run.py").write_text("x = 1")
    (tmp_path / "other.py").write_text("def run(): return 4")
    for name in ("no_run.py", "other.py"):
        with pytest.raises(ConfigError, match=r"has no `def run\(\) -> Run`"):
            load_recipe(tmp_path / name)
    with pytest.raises(ConfigError, match=r"missing\.py is not a recipe: the file does not exist"):
        load_recipe(tmp_path / "missing.py")


def test_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    run = small(warmup=None, rl=None)
    train(run, tmp_path)
    resume = re.escape(f"already contains a run: resume it with ramify train --resume {tmp_path}, ")
    resume += f"give another folder, or remove this one to start again: rm -r {tmp_path}$"
    with pytest.raises(ConfigError, match=resume):
        train(run, tmp_path)
    again = load_stored_run(tmp_path)
    assert again == with_policy_defaults(run)
    other = msgspec.structs.replace(run, seed=4)
    with pytest.raises(ConfigError, match="has a different config: seed was 0 and is now 4"):
        train(other, tmp_path, resume=tmp_path)
    with pytest.raises(ConfigError, match="nothing to resume"):
        train(run, tmp_path / "new", resume=tmp_path / "new")
    shutil.rmtree(tmp_path / "policy")
    train(run, tmp_path, resume=tmp_path)  # the run was complete: only the report is redone
    assert (tmp_path / "policy/model.safetensors").is_file()


def test_stored_runs_round_trip(tmp_path: Path) -> None:
    for algorithm in (GRPO(credit="root"), SFT(min_reward=1.0)):
        run = changed("rl", algorithm=algorithm)
        CheckpointStore(tmp_path).save(CheckpointedProgress(step=1, config=to_plain_data(run)), {})
        assert load_stored_run(tmp_path, ["seed=2"]) == msgspec.structs.replace(run, seed=2)
    CheckpointStore(tmp_path).save(
        CheckpointedProgress(step=2, config={**to_plain_data(run), "colour": 1}), {}
    )
    with pytest.raises(ConfigError, match="give the recipe that made it"):
        load_stored_run(tmp_path)


def test_stored_config_contains_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users cannot read the file either. Resuming needs the recipe, whose secrets may have
    changed."""
    monkeypatch.setenv("SOME_TOKEN", "tok-0123456789abc")

    def run(key: str) -> Run:
        options = {"api_key": key, "url": f"https://me:{key}@host/v1?rows=3&key={key}", "rows": 3}
        args = ("--api-key", key, f"--token={key}", "--max-tokens", "5")
        return small(
            task=TaskSpec(options=options),
            inference=InferenceSpec(args=args),
            tracker_options={
                "wandb": {"token": key, "project": "mine", "note": "tok-0123456789abc"}
            },
        )

    path = CheckpointStore(tmp_path).save(
        CheckpointedProgress(step=1, config=to_plain_data(run("sk-first"))), {}
    )
    state, text = read_state(path), (path / "state.json").read_text()
    assert "sk-first" not in text
    assert "tok-0123456789abc" not in text
    assert (path / "state.json").stat().st_mode & 0o077 == 0
    assert state.config["task"]["options"] == {
        "api_key": "«redacted»",
        "url": "https://«redacted»@host/v1?rows=3&key=«redacted»",
        "rows": 3,
    }
    assert state.config["inference"]["args"] == [
        "--api-key",
        "«redacted»",
        "--token=«redacted»",
        "--max-tokens",
        "5",
    ]
    assert state.config["tracker_options"] == {
        "wandb": {"token": "«redacted»", "project": "mine", "note": "«redacted SOME_TOKEN»"}
    }
    check_changes(state, to_plain_data(run("sk-second")))
    with pytest.raises(
        ConfigError, match=r"does not contain task\.options\.api_key, since it may be a secret"
    ):
        load_stored_run(tmp_path)


def test_every_part_is_closed_even_if_others_fail() -> None:
    """The first error is raised, and the others are logged."""
    closed: list[str] = []
    messages: list[str] = []

    async def engine() -> None:
        closed.append("engine")
        raise OSError("the line is down")

    def ranks() -> None:
        closed.append("ranks")
        raise TrainError("rank 1 is lost")

    parts = {"engine": engine, "ranks": ranks, "hosts": lambda: closed.append("hosts")}

    async def block(error: BaseException | None) -> None:
        with heard(messages.append):
            async with contextlib.AsyncExitStack() as stack:
                for part, close in reversed(parts.items()):
                    add_to_exit_stack(stack, part, close)
                if error is not None:
                    raise error

    with pytest.raises(OSError, match="the line is down"):
        asyncio.run(block(None))
    assert messages == ["ranks could not be closed: TrainError: rank 1 is lost"]
    messages.clear()
    with pytest.raises(ZeroDivisionError, match="first"):
        asyncio.run(block(ZeroDivisionError("first")))
    assert messages == [
        "engine could not be closed: OSError: the line is down",
        "ranks could not be closed: TrainError: rank 1 is lost",
    ]
    assert closed == ["engine", "ranks", "hosts"] * 2
