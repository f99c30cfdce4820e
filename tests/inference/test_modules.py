"""Models that are transformers modules run in one batch if possible, else one by one; the results
equal those of ``generate`` and of a plain forward pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3MoeConfig,
)

from ramify.inference.local.engine import InferenceEngineLimits, LocalEngine
from ramify.inference.local.generation_request import (
    GenerationState,
    SamplingSettings,
    sample_tokens,
)
from ramify.inference.local.model_runner import (
    BatchedStepModelRunner,
    TransformersModelRunner,
    create_runner,
)
from tests.inference.helpers import drained

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, tuple[Any, type]] = {
    "gpt2": (GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3), BatchedStepModelRunner),
    "neox": (GPTNeoXConfig(**{**_SIZES, "num_key_value_heads": None}), BatchedStepModelRunner),
    "llama-yarn": (LlamaConfig(**_SIZES, rope_parameters=YARN), BatchedStepModelRunner),
    "qwen3-moe": (
        Qwen3MoeConfig(**_SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), BatchedStepModelRunner,
    ),
    "gemma2": (Gemma2Config(**_SIZES, head_dim=8, sliding_window=16), TransformersModelRunner),
    "mamba": (
        MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3), TransformersModelRunner,
    ),
}  # fmt: skip


def module(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name][0]).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_replies_match_a_plain_forward_pass(name: str) -> None:
    """With shared prefixes, chunked prefill, few slots, a second turn, and changing weights."""
    model = module(name)
    runner = create_runner(model)
    assert type(runner) is CONFIGS[name][1]
    engine = LocalEngine(
        runner, InferenceEngineLimits(slots=3, prefill_tokens=9, cache_bytes=1 << 24, window=128)
    )
    pick = random.Random(0)
    common = [pick.randrange(97) for _ in range(30)]
    prompts = [
        common[: pick.randint(1, 30)] + [pick.randrange(97) for _ in range(pick.randint(1, 9))]
        for _ in range(6)
    ]
    for turn in range(2):
        asked = [
            {"prompt_ids": each, "max_tokens": 7, "seed": str(index)}
            for index, each in enumerate(prompts)
        ]
        for request in asked:
            engine.add(GenerationState(**request))
        done = {tuple(each.ids[: each.num_prompt]): each for each in drained(engine)}
        for request in asked:
            ours, alone = (
                done[tuple(request["prompt_ids"])],
                expected(model, GenerationState(**request)),
            )
            assert ours.sampled_ids == alone.sampled_ids
            torch.testing.assert_close(
                torch.tensor(ours.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=2e-5
            )
        prompts = [[*done[tuple(each)].ids, turn, 5] for each in prompts]
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(0.7)
        engine.mark_weights_changed(turn + 1)


@torch.no_grad()
def expected(model: Any, like: GenerationState) -> GenerationState:
    while like.end is None:
        logits = model(input_ids=torch.tensor([like.ids]), use_cache=False).logits[0, -1:].float()
        drawn = sample_tokens(logits, [like.draw], [like.uniform()])
        like.append(drawn.ids[0], drawn.logprobs[0], drawn.kept[0], 0)
    return like


@pytest.mark.parametrize("name", CONFIGS)
def test_module_itself_is_unchanged(name: str) -> None:
    model = module(name)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        greedy = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[
            0, 4:
        ].tolist()
        engine = LocalEngine(
            create_runner(model),
            InferenceEngineLimits(slots=2, prefill_tokens=9, cache_bytes=1 << 24, window=128),
        )
        engine.add(GenerationState([5, 6, 7, 8], max_tokens=6, draw=SamplingSettings(0.0)))
        assert drained(engine)[0].sampled_ids == greedy
        assert torch.equal(model(input_ids=ids).logits, before)


def test_all_logits_match_the_module() -> None:
    for name in ("gpt2", "mamba"):
        model = module(name)
        ids = [3, 1, 4, 1, 5]
        with torch.no_grad():
            plain = model(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(
            create_runner(model).all_logits(ids), plain, rtol=1e-5, atol=1e-5
        )
