"""Chat templates in the style of well-known models, written for these tests, and tokenizers with
their markers."""

from __future__ import annotations

import copy
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ramify.models.tokenizer_training import train_tokenizer

CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_QWEN_MESSAGES = """\
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if message.reasoning_content and loop.index0 > last.query %}
      {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- ('\n' if message.content or not loop.first else '') + '<tool_call>\n{"name": "' + call.function.name }}
      {{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}"""
_QWEN_TOOLS = """\
{%- if tools %}
  {{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') + '\n# Tools' }}
  {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- elif default_system %}{{- '<|im_start|>system\n' + default_system + '<|im_end|>\n' }}
{%- endif %}"""
_LAST_QUERY = """\
{%- set last = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}"""
QWEN25 = f"""\
{{%- set default_system = 'You are a helpful assistant.' %}}
{_LAST_QUERY}{_QWEN_TOOLS}{_QWEN_MESSAGES}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\n' }}}}{{%- endif %}}"""
QWEN3 = f"""\
{_LAST_QUERY}{_QWEN_TOOLS}{_QWEN_MESSAGES}
{{%- if add_generation_prompt %}}
  {{{{- '<|im_start|>assistant\n' }}}}
  {{%- if enable_thinking is defined and enable_thinking is false %}}{{{{- '<think>\n\n</think>\n\n' }}}}{{%- endif %}}
{{%- endif %}}"""
THINKING = QWEN3.replace("{%- if enable_thinking", "{{- '<think>\n' }}{%- if enable_thinking")
"""Every reply begins inside a thinking block."""

LLAMA3 = """\
{{- bos_token }}
{%- set begin = 0 %}{%- set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set begin = 1 %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: 1 May\n\n' + system + '<|eot_id|>' }}
{%- for message in messages[begin:] %}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'system' %}{{- raise_exception('no system messages') }}{%- endif %}
  {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' + message.content | trim }}
  {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

COUNTING = """\
{%- for message in messages %}{{ '<s>' + message.role + ' ' + loop.revindex | string + '\n' + message.content + '</s>' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<s>assistant 0\n' }}{%- endif %}"""
"""Each message has the number of later ones, so every new message changes all before it."""

FORGETFUL = """\
{%- for message in messages %}{{ '<s>' + message.role + '\n' }}
{{- message.content[:3] if message.role == 'assistant' and loop.revindex > 20 else message.content }}{{ '</s>' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{%- endif %}"""
"""Only replies far back are shortened."""
FORGETFUL_CHATML = CHATML.replace(
    "message.content +",
    "(message.content[:3] if message.role == 'assistant' and loop.revindex > 20 else message.content) +",
)
STRIPS_THINKING = """\
{%- for message in messages %}{{ '<s>' + message.role + '\n' }}
{{- message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}{{ '</s>' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{%- endif %}"""

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (CHATML, _IM),
    "qwen2.5": (QWEN25, _IM),
    "qwen3": (QWEN3, _IM),
    "thinking": (THINKING, _IM),
    "llama3": (LLAMA3, _HEADERS),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "counting": (COUNTING, ("<s>", "</s>")),
    "forgetful": (FORGETFUL, ("<s>", "</s>")),
    "forgetful-chatml": (FORGETFUL_CHATML, _IM),
    "strips-thinking": (STRIPS_THINKING, ("<s>", "</s>")),
}
"""Name -> (template, special tokens)."""
_TEXTS = [
    "user\nassistant\nsystem\n\n",
    "How many rows are red? print(len(context)) 1 2 3",
    "answer the question",
] * 20

_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen split text: newlines are separate pieces."""


@cache
def _tiny() -> PreTrainedTokenizerFast:
    return train_tokenizer([*_TEXTS, *(f"{a}{b} " for a in "abcdefgh" for b in "ijklmnop")], 320)


@cache
def _bytes() -> str:
    """A byte-level tokenizer without any marker, as JSON."""
    plain = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), to_bytes]
    )
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        _TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return str(plain.to_str())


def tokenizer_of(name: str, *, without: str = "") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the template ``name`` and its markers, except ``without``."""
    if name == "tiny":
        return copy.deepcopy(_tiny())
    template, markers = TEMPLATES[name]
    markers = tuple(marker for marker in markers if marker != without)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_bytes()),
        bos_token=markers[0],
        eos_token=markers[-1],
        extra_special_tokens=list(markers),
        clean_up_tokenization_spaces=False,
    )
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in plain])
    tokenizer.chat_template = template
    return tokenizer
