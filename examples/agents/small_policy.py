"""A policy that is trained in seconds on a CPU: it says whole phrases, at first at random.

    python examples/agents/small_policy.py FOLDER

Each phrase is one token: a call of the agents' tool, a cell for a session, a metal. Any other text
is written in bytes. The model has two layers. Its weights are random, except that a phrase is
likely at the beginning of a reply, and the end of the reply after it. So a policy without any
knowledge already speaks well-formed sentences, and learns which of them earn a reward. The chat
template is in Qwen's style, with tools. Not here: anything that a real model could do.
"""

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

START, END = "<|im_start|>", "<|im_end|>"
CALL = '<tool_call>\n{{"name": "look", "arguments": {{"box": "{}"}}}}\n</tool_call>'
ASK = "llm_query(context + ' Which metal is in the blue box?')"
PHRASES = (
    *(CALL.format(box) for box in ("red", "blue", "green")),
    "```repl\nprint(context)\n```",
    f"```repl\nanswer['content'] = {ASK}\nanswer['ready'] = True\n```",
    "copper",
    "gold",
    "silver",
)
TEMPLATE = """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
  {{- '<|im_start|>system\n' + first + '\n# Tools' }}
  {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif first %}{{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- ('\n' if message.content or not loop.first else '') }}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def make(folder: Path, phrases: tuple[str, ...] = PHRASES, seed: int = 0) -> Path:
    """Write the policy to ``folder``, and return it."""
    torch.manual_seed(seed)
    tokenizer = tokenizer_of(phrases)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    model = Qwen3ForCausalLM(config)
    is_phrase = torch.zeros(len(tokenizer), dtype=torch.bool)
    is_phrase[tokenizer.convert_tokens_to_ids(list(phrases))] = True
    with torch.no_grad():
        # Two of the 64 numbers of each embedding say that it is one, and whether it is a phrase.
        inputs, outputs = model.model.embed_tokens.weight, model.lm_head.weight
        inputs.normal_(std=0.5)
        outputs.normal_(std=0.02)
        inputs[:, 0], inputs[:, 1] = 4.0, torch.where(is_phrase, 4.0, -4.0)
        outputs[:, 0], outputs[:, 1] = torch.where(is_phrase, 1.0, -0.5), -1.0 * is_phrase
        outputs[tokenizer.eos_token_id, :2] = torch.tensor([0.5, 1.5])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of(phrases: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """One token for each byte and each phrase."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    in_bytes = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(letters)}, merges=[]))
    in_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    in_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=in_bytes,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in phrases])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
