"""Represent a call as one sequence of token ids, exactly as the model processed them.

A turn holds the ids that its prompt adds to the sequence (path) so far, and the sampled ids:

    turn 0   prompt_ids 1 2 3   token_ids 7 8   reused_ids 0   path  1 2 3 7 8
    turn 1   prompt_ids 4       token_ids 9     reused_ids 5   path  1 2 3 7 8 4 9
    turn 2   prompt_ids 5       token_ids 6     reused_ids 3   path  1 2 3 5 6   (not an extension)

``training_sequences.py`` defines the training data that is made from such paths.
"""

from __future__ import annotations

import msgspec

from ramify.types.message import Reply


class SampledTokenSpan(msgspec.Struct, frozen=True):
    """A range ``[start, end)`` of a token path that was sampled as the reply of turn ``turn`` of
    the call ``call``."""

    call: str
    turn: int
    start: int
    end: int


class CallTokenIds(msgspec.Struct, frozen=True):
    """One sequence of token ids, from the first token of the prompt to the last sampled token."""

    ids: tuple[int, ...]
    """All T token ids, [T]."""
    sampled: tuple[bool, ...]
    """True for tokens that the model sampled, False for prompt tokens, [T]."""
    logprobs: tuple[float, ...] | None
    """Log-probability of each token at sampling time, 0 for prompt tokens, [T]. None if some reply
    had none."""
    versions: tuple[int, ...]
    """Policy version that sampled each token, [T]. It is -1 for prompt tokens and unknown
    versions."""
    spans: tuple[SampledTokenSpan, ...]
    """Sampled spans in order, each with the turn that sampled it. Several paths of one tree may
    share spans."""
    kept: tuple[tuple[int, ...], ...] | None = None
    """For each token, the ids that remained after top-p and top-k filtering, [T]. An empty tuple
    means the whole vocabulary. None if no reply reports them.
    """
    routes: tuple[tuple[int, ...], ...] | None = None
    """For mixture-of-experts models: for each token, the experts of the forward pass that produced
    it, i.e. of the preceding token, [T]. An empty tuple means that they are unknown. None if no
    reply reports them.
    """

    def __len__(self) -> int:
        return len(self.ids)


class CallTokenIdsBuilder:
    """Builds the token path of a call, turn by turn.

    This takes time linear in the number of ids stored in the turns.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._spans: list[SampledTokenSpan] = []
        self._logprobs: list[tuple[float, ...] | None] = []
        self._versions: list[list[int]] = []
        self._kept: list[tuple[tuple[int, ...], ...] | None] = []
        self._routes: list[tuple[tuple[int, ...], ...] | None] = []

    def is_extended_by(self, reply: Reply, reused_ids: int) -> bool:
        """Return True if adding this reply would extend the path, that is, keep all of its ids as a
        prefix."""
        has_ids = reply.prompt_ids is not None and reply.token_ids is not None
        return has_ids and reused_ids == len(self._ids)

    def add(self, call: str, turn: int, reply: Reply, reused_ids: int) -> None:
        """Add the reply of a turn to the token path.

        After a reply without token ids, the path is unknown until a later reply has them.

        Args:
            call: id of the call.
            turn: index of the turn in the call.
            reply: its ``prompt_ids`` are those after the reused ones.
            reused_ids: number of ids of the path so far that the turn's prompt starts with.
        """
        if reply.prompt_ids is None or reply.token_ids is None:
            self._cut(0)
            return
        self._cut(reused_ids)
        start, num = reused_ids + len(reply.prompt_ids), len(reply.token_ids)
        self._ids += [*reply.prompt_ids, *reply.token_ids]
        self._spans.append(SampledTokenSpan(call, turn, start, start + num))
        self._logprobs.append(reply.logprobs)
        self._kept.append(reply.kept)
        self._routes.append(reply.routes)
        versions = [-1] * num
        for span in reply.versions or ():
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        self._versions.append(versions)

    def build(self) -> CallTokenIds | None:
        """Return the token path of the turns that were added so far.

        Returns None if it is unknown because a reply had no token ids.
        """
        if not self._ids:
            return None
        length = len(self._ids)
        sampled, versions, logprobs = [False] * length, [-1] * length, [0.0] * length
        kept: list[tuple[int, ...]] = [()] * length
        routes: list[tuple[int, ...]] = [()] * length
        for index, span in enumerate(self._spans):
            at = slice(span.start, span.end)
            num = span.end - span.start
            sampled[at], versions[at] = [True] * num, self._versions[index][:num]
            logprobs[at] = (self._logprobs[index] or [0.0] * num)[:num]
            kept[at] = (self._kept[index] or [()] * num)[:num]
            routes[at] = (self._routes[index] or [()] * num)[:num]
        has_logprobs = all(logprobs is not None for logprobs in self._logprobs)
        has_kept = any(kept_sets is not None for kept_sets in self._kept)
        return CallTokenIds(
            tuple(self._ids),
            tuple(sampled),
            tuple(logprobs) if has_logprobs else None,
            tuple(versions),
            tuple(self._spans),
            tuple(kept) if has_kept else None,
            tuple(routes) if any(self._routes) else None,
        )

    def _cut(self, length: int) -> None:
        """Keep only the first ``length`` token ids of the path.

        A span that extends beyond them is shortened.
        """
        del self._ids[length:]
        self._spans = [
            SampledTokenSpan(span.call, span.turn, span.start, min(span.end, length))
            for span in self._spans
            if span.start < length
        ]
        for values in (self._logprobs, self._versions, self._kept, self._routes):
            del values[len(self._spans) :]
