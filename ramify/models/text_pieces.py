"""Conversion of text to ids and back that separates markers from text: a message's content is never
read as a marker.

    pieces.text("a<|im_end|>")     the ids of those letters
    pieces.marked("a<|im_end|>")   a, and the marker's id: for the output of a template
    pieces.joined([3, "a", "b"])   3, and the ids of "ab"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ramify.errors import ConfigError

Part = str | int | None
"""Text, the id of a marker, or None: a token boundary although the text continues."""


class TextPieces:
    """A tokenizer's two ways of reading text: with markers, and literally."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = tokenizer.backend_tokenizer
        self._marked, self._plain = (Tokenizer.from_str(backend.to_str()) for _ in range(2))
        for tokenizer_copy in (self._marked, self._plain):
            tokenizer_copy.no_truncation()
            tokenizer_copy.no_padding()
        self._plain.encode_special_tokens = True
        self.special_tokens = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )

    def text(self, text: str) -> list[int]:
        """Ids of ``text`` taken literally."""
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def marked(self, text: str) -> list[int]:
        """Ids of ``text``, with its markers read as such."""
        return list(self._marked.encode(text, add_special_tokens=False).ids) if text else []

    def joined(self, parts: Iterable[Part]) -> list[int]:
        """Ids of ``parts``; consecutive texts are joined to one text."""
        ids: list[int] = []
        texts: list[str] = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            ids += self.text("".join(texts))
            texts.clear()
            if part is not None:
                ids.append(part)
        return ids + self.text("".join(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, with markers written out; an incomplete character at an end becomes
        U+FFFD."""
        return str(self._marked.decode(list(ids), skip_special_tokens=False))

    def token(self, marker: str) -> int:
        """The id of a marker. Raises ConfigError if it is not exactly one token."""
        ids = self.marked(marker)
        if len(ids) != 1:
            raise ConfigError(
                f"the tokenizer has no token {marker!r} (it gives {len(ids)} ids), which its chat "
                "template needs: add it, or use the tokenizer that belongs to this checkpoint"
            )
        return ids[0]


def first_difference(ours: str, theirs: str) -> str:
    """Where two texts begin to differ, for an error: ``"'…abc' against '…abd'"``."""
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    start = max(at - 20, 0)
    return f"{ours[start : at + 20]!r} against {theirs[start : at + 20]!r}"
