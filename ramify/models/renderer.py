"""Conversion of messages to token ids and back, in which a conversation only ever grows by ids.

    prompt(messages)              a conversation from its beginning, ready for a reply
    extend(messages, after=ids)   what to append to a path whose last sampled ids are ``ids``
    parse(ids)                    the reply that was sampled

    prompt([u])  ─ sampled r ─▶  prompt([u]) + r
                 ─ extend([o], after=r) ─▶  prompt([u]) + r + extend([o], after=r)
                                            = prompt([u, parse(r), o])

The last line holds if ``r`` are the ids that the tokenizer itself gives to their text. The chat
template and the tokens of a tokenizer decide which renderer it gets. A renderer is only chosen if
it writes canned conversations exactly as the template does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from ramify.clients.base import Tool
from ramify.errors import ConfigError
from ramify.models.marked_renderer import FORMATS, ChatFormat, MarkedRenderer
from ramify.models.template import ChatTemplate, TemplateRenderer
from ramify.models.text_pieces import TextPieces
from ramify.types.message import Message


class Renderer(Protocol):
    """How one policy's conversations are written as token ids."""

    name: str
    """``tiny``, ``chatml``, ``llama3`` or ``template``."""
    stop_ids: tuple[int, ...]
    """Sampling any of these ends a reply."""
    unstable: str
    """Why ``extend`` is not possible; empty if it is."""
    takes_tools: bool
    """Whether ``prompt`` can offer native tools."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of the whole conversation and of the beginning of the next reply."""
        ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """Ids to append after the sampled ids ``after``; closes the reply if its end was not
        sampled."""
        ...

    def parse(self, ids: Sequence[int]) -> Message:
        """The reply that sampled ids stand for."""
        ...


def renderer_of(
    tokenizer: PreTrainedTokenizerFast,
    *,
    stop_ids: Sequence[int] = (),
    thinking: bool | None = None,
) -> Renderer:
    """The renderer for a tokenizer. ``stop_ids`` end a reply in addition to the format's own end;
    ``thinking`` switches a hybrid model's thinking on or off, if its template uses
    ``enable_thinking``.

    Raises ConfigError for a tokenizer without its template's tokens, or with neither a template nor
    known tokens.
    """
    pieces, template = TextPieces(tokenizer), ChatTemplate(tokenizer, thinking)
    for format in FORMATS:
        if not _uses(format, template, pieces):
            continue
        for trims in (False, True):
            try:
                return MarkedRenderer(format, pieces, template, stop_ids, trims=trims)
            except ConfigError:
                if not template.source or not _has_tokens(format, pieces):
                    raise
    if not template.source:
        known = ", ".join(format.tokens[0] for format in FORMATS)
        raise ConfigError(
            "the tokenizer has no chat template, and none of the markers of a known format "
            f"({known}): set its chat_template to the one that the model was trained with"
        )
    return TemplateRenderer(pieces, template, stop_ids)


def _uses(format: ChatFormat, template: ChatTemplate, pieces: TextPieces) -> bool:
    if template.source:
        return all(marker in template.source for marker in format.tokens[-2:])
    return _has_tokens(format, pieces)


def _has_tokens(format: ChatFormat, pieces: TextPieces) -> bool:
    return all(len(pieces.marked(marker)) == 1 for marker in format.tokens)
