"""``DenseModel`` against transformers: the same logits, keys and gradients, whatever else is packed
with a document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ramify.errors import ConfigError
from ramify.models.dense import CausalAttentionKernel, DenseModel, DenseModelConfig
from tests.models.configs import configs

NAMES = list(configs())


def packed(lengths: list[int]) -> CausalAttentionKernel:
    """Naive causal attention within each of several concatenated documents."""

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float) -> Tensor:
        done, start = [], 0
        for length in lengths:
            q, k, v = (
                each[start : start + length].transpose(0, 1) for each in (q_THd, k_TKd, v_TKd)
            )
            k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], 0) for each in (k, v))
            scores = (q @ k.transpose(1, 2)) * scale
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            done.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
            start += length
        return torch.cat(done)

    return attend


def pair(config: Any) -> tuple[Any, DenseModel]:
    """Return a transformers module with random parameters (norms and biases too), and ours with the
    same parameters."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0)
                )
    ours = DenseModel(config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_packed_documents_match_transformers(name: str) -> None:
    config = configs()[name]
    theirs, ours = pair(config)
    lengths = [5, 1, 70, 23]
    ids_T = torch.randint(config.vocab_size, (sum(lengths),))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        logits_TV = ours.logits(ours.hidden(ids_T, positions_T, packed(lengths)))
        expected_TV = torch.cat([theirs(ids[None]).logits[0] for ids in ids_T.split(lengths)])
    assert logits_TV.shape == (99, 97)
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_keys_match_transformers(name: str) -> None:
    theirs, ours = pair(configs()[name])
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in theirs.state_dict().items()
    }
    assert [key for key, _ in ours.named_parameters()] == [
        key for key, _ in theirs.named_parameters()
    ]
    again = AutoModelForCausalLM.from_config(configs()[name])
    again.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-biases"])
def test_gradients_match_transformers(name: str) -> None:
    config = configs()[name]
    theirs, ours = pair(config)
    ids_T = torch.randint(config.vocab_size, (40,))
    for logits_TV in (
        ours.logits(ours.hidden(ids_T, torch.arange(40), packed([40]))),
        theirs(ids_T[None]).logits[0],
    ):
        torch.nn.functional.cross_entropy(logits_TV[:-1], ids_T[1:]).backward()
    expected = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[key].grad, rtol=1e-5, atol=1e-6, msg=key
        )


def test_second_half_with_cached_keys_matches_the_whole_document() -> None:
    """Positions may start anywhere: only the position and the cached keys of a token count."""
    _, ours = pair(configs()["qwen3"])
    ids_T = torch.randint(97, (30,))
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def remember(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float) -> Tensor:
        kept[layer] = k_TKd, v_TKd
        return packed([18])(layer, q_THd, k_TKd, v_TKd, scale)

    def attend_with_cache(
        layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        k, v = torch.cat([kept[layer][0], k_TKd]), torch.cat([kept[layer][1], v_TKd])
        padding = torch.zeros(18, *q_THd.shape[1:])
        return packed([30])(layer, torch.cat([padding, q_THd]), k, v, scale)[18:]

    with torch.no_grad():
        ours.hidden(ids_T[:18], torch.arange(18), remember)
        late_TD = ours.hidden(ids_T[18:], torch.arange(18, 30), attend_with_cache)
        whole_TD = ours.hidden(ids_T, torch.arange(30), packed([30]))
    torch.testing.assert_close(late_TD, whole_TD[18:], rtol=0, atol=1e-5)


def test_low_precision_keeps_fp32_logits_and_angles() -> None:
    theirs, ours = pair(configs()["qwen2"])
    ids_T = torch.randint(97, (200,))
    with torch.no_grad():
        exact_TV = theirs(ids_T[None]).logits[0]
        rough_TV = ours.bfloat16().logits(ours.hidden(ids_T, torch.arange(200), packed([200])))
        their_rough_TV = theirs.bfloat16()(ids_T[None]).logits[0]
    assert rough_TV.dtype == torch.float32
    error, their_error = (
        float((rough - exact_TV).abs().mean()) for rough in (rough_TV, their_rough_TV)
    )
    assert error < 1.2 * their_error


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "rope_type 'yarn'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "gemma2"}, "the architecture 'gemma2'"),
    ],
)
def test_unsupported_configuration_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    config = LlamaConfig()
    for key, value in changed.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=named):
        DenseModel(config)


def test_window_is_limited_to_the_sliding_window() -> None:
    windows = {
        name: DenseModelConfig.from_config(config).window for name, config in configs().items()
    }
    assert windows == {**dict.fromkeys(NAMES, 256), "mistral-sliding": 100}


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied"])
def test_selected_rows_match_full_output_and_gradients(name: str):
    _, ours = pair(configs()[name])
    ids, positions, rows = torch.arange(11), torch.arange(11), torch.tensor([7, 2, 10])
    weights = torch.randn(3, ours.shape.width, generator=torch.Generator().manual_seed(0))
    found = []
    for few in (False, True):
        ours.zero_grad()
        h = (
            ours.hidden(ids, positions, packed([11]), rows)
            if few
            else ours.hidden(ids, positions, packed([11]))[rows]
        )
        (h * weights).sum().backward()
        found.append([h.detach(), *(each.grad.clone() for each in ours.model.parameters())])
    for all_of_them, some in zip(*found, strict=True):
        torch.testing.assert_close(some, all_of_them, rtol=1e-4, atol=1e-5)
