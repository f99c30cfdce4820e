"""Saving and loading policies, compared with transformers, and errors for unsuitable folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config

from ramify.errors import ConfigError, StoreError
from ramify.models.dense import DenseModel
from ramify.models.load import (
    Policy,
    SamplingDefaults,
    from_config,
    load_into,
    load_policy,
    save_policy,
)
from ramify.models.weights import fingerprint, write_weights
from tests.models.templates import tokenizer_of
from tests.models.test_dense import packed

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
GPT2 = GPT2Config(
    vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=3, eos_token_id=3
)


def made(config: Any = None, seed: int = 0) -> Policy:
    return from_config(
        config or Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
        tokenizer_of("tiny"),
        seed,
    )


def logits(policy: Policy, ids: list[int]) -> Tensor:
    model = policy.model
    with torch.no_grad():
        if not isinstance(model, DenseModel):
            found: Tensor = model(input_ids=torch.tensor([ids])).logits[0]
            return found
        return model.logits(
            model.hidden(torch.tensor(ids), torch.arange(len(ids)), packed([len(ids)]))
        )


IDS = [1, 20, 30, 40, 2, 50, 3]


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
        Qwen2Config(**SIZES, tie_word_embeddings=False),
        GPT2,
    ],
    ids=["tied", "untied", "module"],
)
def test_saved_policy_is_loaded_by_us_and_by_transformers(config: Any, tmp_path: Path) -> None:
    policy = made(config)
    policy.defaults = SamplingDefaults(temperature=0.0)
    save_policy(policy, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_policy(tmp_path, device="cpu")
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(ours, IDS), expected, rtol=0, atol=1e-5)
    assert fingerprint(ours.model) == fingerprint(policy.model) == fingerprint(theirs)
    assert (ours.defaults, ours.window, ours.renderer.name, ours.renderer.stop_ids) == (
        SamplingDefaults(0.0),
        64,
        "scratch",
        (3,),
    )
    assert theirs.generation_config.eos_token_id == [3]
    assert ours.num_parameters == policy.num_parameters == theirs.num_parameters()


def test_half_precision_on_disk_becomes_fp32_on_cpu(tmp_path: Path) -> None:
    policy = made()
    save_policy(policy, tmp_path, torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    assert (
        load_policy(tmp_path, device="cpu").dtype,
        load_policy(tmp_path, torch.bfloat16, "cpu").dtype,
    ) == (
        torch.float32,
        torch.bfloat16,
    )


def test_unknown_device_is_refused(tmp_path: Path) -> None:
    save_policy(made(), tmp_path)
    with pytest.raises(
        ConfigError, match="this machine has no device 'moon': Expected one of cpu, "
    ):
        load_policy(tmp_path, device="moon")


def test_sharded_checkpoint_with_an_index_is_loaded(tmp_path: Path) -> None:
    policy = made()
    save_policy(policy, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: whole[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(load_policy(tmp_path, device="cpu").model) == fingerprint(policy.model)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(StoreError, match=r"names b\.safetensors, which is missing"):
        load_policy(tmp_path)


def test_initial_weights_of_a_layer_depend_only_on_the_seed() -> None:
    one, same, other = made(seed=3), made(seed=3), made(seed=4)
    assert fingerprint(one.model) == fingerprint(same.model) != fingerprint(other.model)
    deeper = made(
        Qwen3Config(**{**SIZES, "num_hidden_layers": 3}, head_dim=8, tie_word_embeddings=True),
        seed=3,
    )
    theirs = deeper.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.model.state_dict().items())


def test_initial_weights_have_the_expected_standard_deviation() -> None:
    state = made(
        Qwen3Config(**{**SIZES, "hidden_size": 256, "intermediate_size": 512}, head_dim=64)
    ).model.state_dict()
    spread = {
        name.removeprefix("model.layers.1."): float(each.std())
        for name, each in state.items()
        if each.dim() == 2
    }
    expected = {
        "self_attn.q_proj.weight": 256**-0.5,
        "self_attn.o_proj.weight": 0.5 * 256**-0.5,
        "mlp.gate_proj.weight": 256**-0.5,
        "mlp.down_proj.weight": 0.5 * 512**-0.5,
        "model.embed_tokens.weight": 0.02,
        "lm_head.weight": 0.02,
    }
    assert {name: spread[name] for name in expected} == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            SamplingDefaults(0.6, 0.95, 20),
        ),
        ({"temperature": 1, "eos_token_id": [3, 7]}, SamplingDefaults(1.0)),
    ],
)
def test_sampling_defaults_are_read_from_generation_config(
    stored: dict[str, Any], expected: SamplingDefaults, tmp_path: Path
) -> None:
    save_policy(made(), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    policy = load_policy(tmp_path, device="cpu")
    assert policy.defaults == expected
    assert policy.renderer.stop_ids == ((3, 7) if "eos_token_id" in stored else (3,))


def test_weights_are_replaced_in_place(tmp_path: Path) -> None:
    policy, other = made(seed=0), made(seed=1)
    save_policy(other, tmp_path)
    pointers = [parameter.data_ptr() for parameter in policy.model.parameters()]
    load_into(policy, tmp_path)
    assert fingerprint(policy.model) == fingerprint(other.model)
    assert pointers == [parameter.data_ptr() for parameter in policy.model.parameters()]


# --- unsuitable checkpoints


def test_mismatched_configuration_error_names_the_first_difference(tmp_path: Path) -> None:
    policy = made()
    save_policy(
        made(Qwen3Config(**{**SIZES, "hidden_size": 64}, head_dim=8, tie_word_embeddings=True)),
        tmp_path,
    )
    with pytest.raises(
        ConfigError, match="a different configuration: hidden_size: 32 here, 64 there"
    ):
        load_into(policy, tmp_path)
    save_policy(made(GPT2), tmp_path / "other")
    with pytest.raises(ConfigError, match="model_type: 'qwen3' here, 'gpt2' there"):
        load_into(policy, tmp_path / "other")


def _damage(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    match how:
        case "missing":
            del weights["model.layers.1.mlp.up_proj.weight"]
        case "extra":
            weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
        case "shape":
            weights["model.norm.weight"] = torch.zeros(31)
        case "broken":
            path.write_bytes(path.read_bytes()[:100])
            return
        case "none":
            path.unlink()
            return
        case "tokenizer":
            (folder / "tokenizer.json").write_text('{"version": "1.0"}')
            return
        case "config":
            (folder / "config.json").unlink()
            return
        case "architecture":
            (folder / "config.json").write_text('{"model_type": "nonsense"}')
            return
        case "generation":
            (folder / "generation_config.json").write_text("{")
            return
    save_file(weights, path)


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("missing", ConfigError, r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        ("extra", ConfigError, r"a tensor 'model\.layers\.2\.mlp\.up_proj\.weight' that the model"),
        ("shape", ConfigError, r"'model\.norm\.weight' is 31, but 32 in the configuration"),
        ("broken", StoreError, "cannot be read as safetensors"),
        ("none", StoreError, r"neither model\.safetensors nor"),
        ("config", ConfigError, r"not a model: it has no config\.json"),
        ("tokenizer", ConfigError, "the tokenizer cannot be loaded"),
        ("architecture", ConfigError, r"config\.json cannot be read: .*nonsense"),
        ("generation", ConfigError, "is not JSON"),
    ],
)
def test_incomplete_or_damaged_folder_is_refused(
    how: str, kind: type[Exception], says: str, tmp_path: Path
) -> None:
    save_policy(made(), tmp_path)
    _damage(tmp_path, how)
    with pytest.raises(kind, match=says):
        load_policy(tmp_path, device="cpu")


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    small = Qwen3Config(**{**SIZES, "vocab_size": 300}, head_dim=8)
    with pytest.raises(
        ConfigError, match="the tokenizer has 320 tokens but the configuration has 300"
    ):
        made(small)


@pytest.mark.parametrize("name", ["/no/such/folder", "maker/not-downloaded"])
def test_missing_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"found no folder '{name}'"):
        load_policy(name)


def test_folder_of_adapters_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds adapters without their base model: merge them"):
        load_policy(tmp_path)


def test_saving_shows_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_policy(made(GPT2), tmp_path)
    load_policy(tmp_path)
    assert "%|" not in capfd.readouterr().err


def test_fingerprint_detects_one_bit_and_the_order_of_rows() -> None:
    policy = made()
    before = fingerprint(policy.model)
    weight = policy.model.get_parameter("model.layers.0.self_attn.q_proj.weight").data
    weight[[0, 1]] = weight[[1, 0]]
    swapped = fingerprint(policy.model)
    weight[[0, 1]] = weight[[1, 0]]
    assert fingerprint(policy.model) == before != swapped
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    assert fingerprint(policy.model) not in (before, swapped)


def test_weights_can_be_written_without_the_rest_of_a_policy(tmp_path: Path) -> None:
    policy = made()
    write_weights(policy.model, tmp_path, torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {
        torch.float16
    }
