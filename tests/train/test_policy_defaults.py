"""Default options that depend on the policy: pretrained checkpoint or model from scratch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer, Qwen3Config

from ramify.engine.limits import Limits
from ramify.errors import ConfigError
from ramify.models.load import from_config, load_policy, save_policy
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import CriticSpec, LoraSpec, PolicySpec, RlSpec, Run, SftSpec
from ramify.train.config_overrides import override
from ramify.train.policy_dependent_defaults import report_policy_defaults, with_policy_defaults
from ramify.train.preflight import warn_missing_chat_template
from ramify.train.stages import with_schedule_defaults
from ramify.types.message import Message
from tests.models.templates import tokenizer_of
from tests.train.small import SHAPE, assemble, small


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``qwen3`` (thinking can be switched on and off) and ``llama3`` (no thinking)."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("qwen3", "llama3"):
        tokenizer = tokenizer_of(name)
        sizes = {name: value for name, value in SHAPE.items() if name != "model_type"} | {
            "max_position_embeddings": 4096
        }
        config = Qwen3Config(
            vocab_size=len(tokenizer), **sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0
        )
        save_policy(from_config(config, tokenizer, 0), root / name)
    return root


def run_of(policy: PolicySpec, **rl: Any) -> Run:
    return small(policy=policy, warmup=None, sft=None, rl=RlSpec(**rl), limits=Limits())


def found(policy: PolicySpec, **rl: Any) -> tuple[Any, ...]:
    run = with_policy_defaults(run_of(policy, **rl))
    assert run.rl is not None
    optim, lora = run.rl.optim, run.policy.lora
    return (
        optim.lr,
        optim.betas,
        with_schedule_defaults("rl", optim, 45).warmup_steps,
        run.limits.max_reply_tokens,
        run.policy.thinking,
        lora and lora.alpha,
    )


def test_defaults_for_each_kind_of_policy(checkpoints: Path) -> None:
    path, lora = str(checkpoints / "qwen3"), LoraSpec(rank=4)
    plain = str(checkpoints / "llama3")
    scratch, usual = (0.9, 0.98), (0.9, 0.999)
    assert found(PolicySpec(shape=SHAPE)) == (3e-4, scratch, 0, 128, None, None)
    assert found(PolicySpec(shape=SHAPE, lora=lora)) == (3e-4, scratch, 0, 128, None, 8.0)
    assert found(PolicySpec(path="tiny")) == (3e-4, scratch, 0, 128, None, None)
    assert found(PolicySpec(path=path)) == (1e-6, usual, 4, 1024, False, None)
    assert found(PolicySpec(path=plain)) == (1e-6, usual, 4, 1024, None, None)
    thinking = PolicySpec(path=path, thinking=True, lora=lora)
    assert found(thinking) == (1e-5, usual, 4, 4096, True, 32.0)
    given = OptimizerSpec(lr=3e-6, betas=(0.8, 0.9), warmup_steps=2)
    assert found(PolicySpec(path=path), optim=given)[:3] == (3e-6, (0.8, 0.9), 2)
    critic = CriticSpec(model="own", optim=OptimizerSpec(weight_decay=0.1))
    run = with_policy_defaults(run_of(PolicySpec(path=plain), critic=critic))
    assert run.rl is not None
    assert run.rl.critic.optim is not None
    assert (run.rl.critic.optim.lr, run.rl.critic.optim.betas) == (1e-6, usual)


def test_policy_defaults_are_idempotent_and_keep_explicit_values() -> None:
    run = with_policy_defaults(small())
    assert with_policy_defaults(run) == run
    explicit = run_of(PolicySpec(shape=SHAPE))
    limits = msgspec.structs.replace(explicit.limits, max_reply_tokens=77)
    changed = with_policy_defaults(msgspec.structs.replace(explicit, limits=limits))
    assert changed.limits.max_reply_tokens == 77


def test_policy_thinking_switches_the_prompt(checkpoints: Path) -> None:
    opened = []
    for thinking in (True, False):
        policy = PolicySpec(path=str(checkpoints / "qwen3"), thinking=thinking)
        run = msgspec.structs.replace(run_of(policy), scaffold="default")
        loaded = assemble(run).policy
        ids = loaded.renderer.prompt([Message("user", "Hm?")])
        opened.append("<think>" in loaded.tokenizer.decode(ids))
    assert opened == [False, True]  # without thinking, the prompt ends with an empty block


@pytest.mark.parametrize("thinking", [True, False])
def test_saved_policy_keeps_its_thinking_setting(
    thinking: bool, checkpoints: Path, tmp_path: Path
) -> None:
    policy = PolicySpec(path=str(checkpoints / "qwen3"), thinking=thinking)
    trained = assemble(msgspec.structs.replace(run_of(policy), scaffold="default"))
    trained.export_initial_policy(tmp_path)
    asked = [Message("user", "Hm?")]
    prompts = {
        switch: load_policy(tmp_path, thinking=switch).renderer.prompt(asked)
        for switch in (None, True, False)
    }
    assert prompts[None] == prompts[thinking] == trained.policy.renderer.prompt(asked)
    assert prompts[True] != prompts[False]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)  # as other programs load it
    wire = [{"role": "user", "content": "Hm?"}]
    found = tokenizer.apply_chat_template(wire, add_generation_prompt=True, return_dict=False)
    assert found == prompts[None]
    later = with_policy_defaults(run_of(PolicySpec(path=str(tmp_path))))
    assert (later.policy.thinking, later.limits.max_reply_tokens) == (
        thinking,
        4096 if thinking else 1024,
    )


def test_applied_defaults_are_logged(checkpoints: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = run_of(PolicySpec(path=str(checkpoints / "llama3")), steps=45)
    given = msgspec.structs.replace(given, sft=SftSpec(demos="ledger", num=4))
    with caplog.at_level(logging.INFO, "ramify.train"):
        report_policy_defaults(given, with_policy_defaults(given))
    assert [record.getMessage() for record in caplog.records] == [
        "set because the recipe does not, as usual for a policy that is a pretrained checkpoint: "
        "limits.max_reply_tokens=1024, "
        "sft.optim.lr=1e-05, sft.optim.betas=[0.9,0.999], "
        "sft.optim.warmup_steps=a tenth of the steps, at most 10, "
        "rl.optim.lr=1e-06, rl.optim.betas=[0.9,0.999], rl.optim.warmup_steps=4"
    ]


@pytest.mark.parametrize(
    ("rate", "lora", "warns"),
    [(9e-6, None, False), (1e-5, None, True), (9e-5, LoraSpec(), False), (1e-3, LoraSpec(), True)],
)
def test_high_learning_rate_gives_a_warning_with_the_usual_rate(
    rate: float, lora: Any, warns: bool, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = PolicySpec(path=str(checkpoints / "llama3"), lora=lora)
    run = with_policy_defaults(run_of(policy, optim=OptimizerSpec(lr=rate)))
    with caplog.at_level(logging.WARNING, "ramify.train"):
        report_policy_defaults(run, run)
    usual = "1e-05 is usual with adapters" if lora else "1e-06 is usual"
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == warns
    assert all(text.endswith(f"checkpoints usually tolerate: {usual}") for text in found)


def test_high_temperature_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = with_policy_defaults(run_of(PolicySpec(shape=SHAPE)))
    for temperature, says in ((1.5, []), (9.0, ["evaluate.temperature=9", "rl.rollout.temp"])):
        changed = override(
            run,
            [f"evaluate.temperature={temperature}", f"rl.rollout.temperature={temperature}"],
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ramify.train"):
            report_policy_defaults(changed, changed)
        found = [record.getMessage() for record in caplog.records]
        assert len(found) == len(says)
        assert all(text.startswith(name) for text, name in zip(found, says, strict=True))


@pytest.mark.parametrize(("rate", "says"), [(2e-2, []), (3e-2, ["100"]), (5.0, ["1.67e+04"])])
def test_high_learning_rate_of_a_policy_from_scratch_gives_a_warning(
    rate: float, says: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = with_policy_defaults(run_of(PolicySpec(shape=SHAPE), optim=OptimizerSpec(lr=rate)))
    with caplog.at_level(logging.WARNING, "ramify.train"):
        report_policy_defaults(run, run)
    assert [record.getMessage() for record in caplog.records] == [
        f"rl.optim.lr={rate:g} is {times} times what policies from scratch usually tolerate: "
        "0.0003 is usual"
        for times in says
    ]


def test_thinking_is_rejected_for_templates_without_it(checkpoints: Path) -> None:
    for policy in (
        PolicySpec(path=str(checkpoints / "llama3"), thinking=True),
        PolicySpec(shape=SHAPE, thinking=False),
    ):
        with pytest.raises(ConfigError, match=r"^policy\.thinking=.*no enable_thinking: remove it"):
            with_policy_defaults(run_of(policy))


def test_missing_chat_template_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The policy is trained in a format that its folder does not describe."""
    policy = from_config(Qwen3Config(**SHAPE, vocab_size=320), tokenizer_of("tiny"), 0)
    with caplog.at_level(logging.WARNING, "ramify.train"):
        warn_missing_chat_template(policy)
        assert not caplog.records
        policy.tokenizer.chat_template = None
        warn_missing_chat_template(policy)
    assert "no chat template: prompts are written in the format scratch" in caplog.text
