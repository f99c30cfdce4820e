"""A small byte-level BPE tokenizer, trained in code from given texts: the one of policies that are made from nothing.

    <|u|>count rows of 'red'<0x0A>len 812<|a|>print(context[:70])<|end|>

Pieces are words with the space before them, single digits, newlines, runs of signs, runs of blanks; so numbers are
copied digit by digit, and 'red' keeps its quote apart (GPT-2's rule for English contractions would make it 're + d).
Every byte has a token, so that any text can be written. The conversation's form is the format ``tiny`` of
``formats.py``, also as a chat template, so that other programs render the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ramify.errors import ConfigError

PAD, USER, ASSISTANT, END = "<|pad|>", "<|u|>", "<|a|>", "<|end|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, END)
"""Ids 0 to 3."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|a|>{{ message.content }}<|end|>"
    "{% elif message.role in ['user', 'tool'] %}<|u|>{{ message.content }}"
    "{% else %}{{ raise_exception('this format has no ' + message.role + ' message') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
_PIECES = r" ?\p{L}+|\p{N}|\n| ?[^\s\p{L}\p{N}]+|\s+"
_NUM_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A tokenizer of ``vocab_size`` tokens: 4 special ones, 256 bytes, and the most frequent merges in ``texts``.

    The same texts give the same tokenizer. Raises ConfigError where the texts hold fewer merges than were asked for,
    since the model's embedding would then be larger than what its ids reach."""
    least = len(SPECIAL_TOKENS) + _NUM_BYTES
    if vocab_size < least:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is too small: {least} tokens stand for bytes and markers alone"
        )
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the texts give a vocabulary of {bpe.get_vocab_size()} tokens, not {vocab_size}: give more texts, or ask for fewer"
        )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
