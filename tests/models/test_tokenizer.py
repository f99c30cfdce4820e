"""The tokenizer that is trained in code: separate tokens, determinism, and lossless decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ramify.errors import ConfigError
from ramify.models.tokenizer_training import SPECIAL_TOKENS, train_tokenizer
from tests.models.templates import tokenizer_of


def texts() -> list[str]:
    draw = random.Random(0)
    names = [
        "".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(3))
        for _ in range(60)
    ]
    return [
        f"sum qty of '{draw.choice(names)}'\nlen {draw.randrange(900)}\nprint(context[:70])"
        for _ in range(300)
    ]


def test_training_is_deterministic() -> None:
    one, other = (train_tokenizer(texts(), 400).backend_tokenizer.to_str() for _ in range(2))
    assert one == other


def test_tokenizer_has_the_requested_size_and_markers() -> None:
    tokenizer = train_tokenizer(texts(), 400)
    assert len(tokenizer) == 400
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(SPECIAL_TOKENS)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 3)


def test_digits_and_quotes_are_separate_tokens() -> None:
    tokens = train_tokenizer(texts(), 400).tokenize("sum qty of 'red'\nlen 812")
    assert [token for token in tokens if token.isdigit()] == ["8", "1", "2"]
    quotes = [token.removeprefix("Ġ") for token in tokens if "'" in token]
    assert quotes == ["'", "'"]


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = tokenizer_of("tiny")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_saved_tokenizer_keeps_template_and_vocabulary(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(texts(), 400)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "?"},
    ]
    rendered = [
        each.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        for each in (tokenizer, again)
    ]
    assert rendered == ["<|u|>hi<|a|>1<|end|><|u|>?<|a|>"] * 2
    assert again.get_vocab() == tokenizer.get_vocab()


def test_impossible_vocabulary_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="259 is too small: bytes and markers alone take 260"):
        train_tokenizer(texts(), 259)
    with pytest.raises(ConfigError, match="give more texts"):
        train_tokenizer(["ab ab"], 512)
