"""Any causal model behind one interface: on a forest if its layers allow it, else on rows, with the
results of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
)

from ramify.errors import ConfigError
from ramify.models.training_forward import wrap_for_training
from ramify.types.training_sequences import PackedTokenSegment

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FORESTS = {
    "gpt2": GPT2Config(
        vocab_size=97,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "llama": LlamaConfig(**SIZES),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.3),
}
ROWS = {
    "mamba": MambaConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, state_size=8, use_mambapy=False
    ),
    "gemma2": Gemma2Config(**SIZES, head_dim=12, final_logit_softcapping=5.0),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "lfm2": Lfm2Config(
        **SIZES | {"initializer_range": 0.02}, layer_types=["conv", "full_attention"]
    ),
}
ROWS_OF = [[3, 1, 4, 1, 5, 9], [3, 1, 4, 2, 6], [3, 1, 4, 2, 7, 1, 8]]
FOREST = [
    PackedTokenSegment(0, 3, -1),
    PackedTokenSegment(3, 6, 0),
    PackedTokenSegment(6, 7, 0),
    PackedTokenSegment(7, 8, 2),
    PackedTokenSegment(8, 11, 2),
]
IDS, POSITIONS = [3, 1, 4, 1, 5, 9, 2, 6, 7, 1, 8], [0, 1, 2, 3, 4, 5, 3, 4, 4, 5, 6]
ENDS = [5, 7, 10]
"""Position of each row's last token in the forest."""


def model(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def reference_logits(config: Any) -> torch.Tensor:
    """Return logits after the last token of each row, from the unmodified transformers model."""
    with torch.no_grad():
        return torch.stack(
            [model(config)(input_ids=torch.tensor([row])).logits[0, -1] for row in ROWS_OF]
        )


@pytest.mark.parametrize("name", FORESTS)
def test_model_with_plain_attention_runs_on_a_forest(name: str):
    trunk = wrap_for_training(model(FORESTS[name]))
    assert trunk.can_share_prefixes
    with torch.no_grad(), trunk.forward_context():
        found = trunk.logits(
            trunk.hidden(torch.tensor(IDS), torch.tensor(POSITIONS), FOREST, torch.tensor(ENDS))
        )
    torch.testing.assert_close(found, reference_logits(FORESTS[name]), rtol=1e-4, atol=1e-4)


def test_model_is_unchanged_outside_the_scope_of_its_trunk():
    module = model(FORESTS["llama"])

    def attention() -> str:
        return module.config._attn_implementation  # noqa: SLF001 (of transformers)

    own = attention()
    trunk = wrap_for_training(module)
    assert attention() == own != "ramify_forest"
    with trunk.forward_context():
        assert attention() == "ramify_forest"
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([ROWS_OF[0]])).logits[0, -1]
    torch.testing.assert_close(logits, reference_logits(FORESTS["llama"])[0])


@pytest.mark.filterwarnings("ignore:.*mamba.*", "ignore:.*Mamba.*")
@pytest.mark.parametrize("name", ROWS)
def test_model_without_forest_support_runs_on_rows(name: str):
    trunk = wrap_for_training(model(ROWS[name]))
    assert not trunk.can_share_prefixes
    ids, rows = (
        torch.tensor([id for row in ROWS_OF for id in row]),
        [
            PackedTokenSegment(0, 6, -1),
            PackedTokenSegment(6, 11, -1),
            PackedTokenSegment(11, 18, -1),
        ],
    )
    with torch.no_grad(), trunk.forward_context():
        found = trunk.logits(
            trunk.hidden(ids, torch.zeros_like(ids), rows, torch.tensor([5, 10, 17]))
        )
    torch.testing.assert_close(found, reference_logits(ROWS[name]), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="pack it with share=False"):
        trunk.hidden(torch.tensor(IDS), torch.tensor(POSITIONS), FOREST, torch.tensor(ENDS))


def test_forest_gradients_match_row_by_row_gradients():
    """Rows one by one through the plain module, against the whole forest at once."""
    alone, ours = model(FORESTS["llama"]), model(FORESTS["llama"])
    for row in ROWS_OF:
        alone(input_ids=torch.tensor([row])).logits[0, -1].square().sum().backward()
    trunk = wrap_for_training(ours)
    with trunk.forward_context():
        trunk.logits(
            trunk.hidden(torch.tensor(IDS), torch.tensor(POSITIONS), FOREST, torch.tensor(ENDS))
        ).square().sum().backward()
    for (name, wanted), (_, found) in zip(
        alone.named_parameters(), ours.named_parameters(), strict=True
    ):
        assert float((found.grad - wanted.grad).abs().max() / wanted.grad.abs().max()) < 1e-5, name


def test_nonlinear_output_head_is_refused():
    strange = model(FORESTS["llama"])
    forward = strange.forward

    def squared(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits**2
        return out

    strange.forward = squared
    with pytest.raises(
        ConfigError, match="its logits are not its output matrix times its hidden states"
    ):
        wrap_for_training(strange)
