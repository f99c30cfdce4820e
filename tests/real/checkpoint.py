"""Two tiny checkpoints with a ChatML template, made from scratch in a second; run as a separate
process.

    python checkpoint.py FOLDER < {"plain": …, "first": …, "then": …}    ->  FOLDER/reader  FOLDER/noise

Their tokens are bytes, so that a prompt can be counted without them. ``noise`` (Qwen3, 90k random
parameters) writes letters without end. ``reader`` (Llama) says one of the given replies: its
template ends each prompt in a token that it chooses by the conversation; the embedding of that
token is the output row of one whole reply, and the embedding of a reply that of the end. So a
recursive run through it is known to the last token, although the model computes each of them.

Not here: anything that a real model could do. The checkpoints only serve to test a protocol.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
"""


def make(folder: Path, replies: dict[str, str]) -> None:
    """Write both checkpoints. ``replies`` maps each cue of the reader's template to its reply."""
    torch.manual_seed(0)
    cues = {f"<|{name}|>": reply for name, reply in replies.items()}
    choice = (
        "{% if messages[0].role != 'system' %}<|plain|>"
        "{% elif messages | length == 2 %}<|first|>{% else %}<|then|>{% endif %}"
    )
    tokens = tokenizer(TEMPLATE + choice + "{% endif %}", cues)
    model = LlamaForCausalLM(config(LlamaConfig, tokens))
    teach(model, tokens, cues)
    save(folder / "reader", model, tokens)

    tokens = tokenizer(TEMPLATE + "{% endif %}", {})
    model = Qwen3ForCausalLM(config(Qwen3Config, tokens))
    allow_only_letters(model, tokens)
    save(folder / "noise", model, tokens)


def tokenizer(template: str, cues: dict[str, str]) -> PreTrainedTokenizerFast:
    """One token per byte, one per cue and one per reply."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START, *cues],
    )
    made.add_tokens([AddedToken(reply, normalized=False, special=False) for reply in cues.values()])
    made.chat_template = template
    return made


def config(kind: type[PreTrainedConfig], tokens: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return kind(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        initializer_range=1.0,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )


@torch.no_grad()
def teach(model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, cues: dict[str, str]) -> None:
    """Make the next token depend on the last one alone: cue -> reply -> end."""
    for layer in model.model.layers:  # attention and the MLP add nothing
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.zero_()
    embedding = model.model.embed_tokens.weight
    for cue, reply in cues.items():
        cue_id, reply_id = tokens.convert_tokens_to_ids([cue, reply])
        model.lm_head.weight[reply_id] = embedding[cue_id]
        model.lm_head.weight[tokens.eos_token_id] += embedding[reply_id]


@torch.no_grad()
def allow_only_letters(model: Qwen3ForCausalLM, tokens: PreTrainedTokenizerFast) -> None:
    """Allow only letters and spaces, so that the text is never code and never ends."""
    letters = [
        i
        for token, i in tokens.get_vocab().items()
        if (token.isascii() and token.isalpha()) or token == "Ġ"
    ]
    silent = torch.ones(len(model.lm_head.weight), dtype=torch.bool)
    silent[letters] = False
    model.lm_head.weight[silent] = 0


def save(folder: Path, model: PreTrainedModel, tokens: PreTrainedTokenizerFast) -> None:
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), json.load(sys.stdin))
