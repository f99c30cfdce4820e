"""Trains small byte-level BPE tokenizers for policies that are trained from scratch.

    <|u|>count rows of 'red'<0x0A>len 812<|a|>print(context[:70])<|end|>

Text is split into words with the space before them, single digits, newlines, runs of punctuation
and runs of blanks. A model can therefore copy numbers digit by digit, and the quote before 'red'
stays a separate token (GPT-2's rule for English contractions would split it as 're + d). Every byte
has a token, so any text can be written. Conversations have the format ``scratch`` of
``chat_renderer.py``, which is also stored as a chat template, so that other programs render the
same ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ramify.errors import ConfigError

PAD, USER, ASSISTANT, END = "<|pad|>", "<|u|>", "<|a|>", "<|end|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, END)
"""Special tokens, with the ids 0 to 3."""
UNKNOWN = "<|?|>"
"""The unknown token of a word tokenizer, with the id 4."""
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


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 512, *, is_exact: bool = True
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ``vocab_size`` tokens on the given strings.

    It has 4 special tokens, 256 bytes, and the most frequent merges of the texts. The same texts
    always give the same tokenizer. If they contain fewer merges than needed, ConfigError is raised,
    because the model's embedding would have rows that are never used. If ``is_exact`` is false, the
    vocabulary is smaller instead.
    """
    least = len(SPECIAL_TOKENS) + _NUM_BYTES
    if vocab_size < least:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is too small: bytes and markers alone take {least} "
            "tokens"
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
    if is_exact and bpe.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the texts give a vocabulary of {bpe.get_vocab_size()} tokens, not {vocab_size}: "
            "give more texts, or a smaller vocab_size"
        )
    return _add_chat_template(bpe)


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Create a tokenizer for artificial languages that knows only the given words.

    The longest matching word at each position becomes a token, and text between words is unknown. A
    text of known words is decoded exactly as it was encoded.

    Raises ConfigError if a word is empty, given twice, or a special marker.
    """
    vocabulary = [*SPECIAL_TOKENS, UNKNOWN, *words]
    if not words or len(set(vocabulary)) < len(vocabulary) or "" in vocabulary:
        invalid = sorted({word for word in vocabulary if not word or vocabulary.count(word) > 1})
        raise ConfigError(
            "a tokenizer needs at least one word, and none that is empty, repeated or reserved: "
            f"{invalid}"
        )
    word_level = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    longest_first = sorted(words, key=len, reverse=True)
    word_level.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(re.escape, longest_first))), "isolated"
    )
    word_level.decoder = decoders.Fuse()
    return _add_chat_template(word_level, unk_token=UNKNOWN)


def _add_chat_template(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for conversations by adding special markers and a chat template."""
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        **special,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped
