"""A reply that is assembled from parts, since updates may interrupt it, and the key that sends the
calls of one tree to the same server."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ramify.clients.base import Request
from ramify.inference.http.engine_server import SampledIds
from ramify.types.message import VersionSpan


class PartialReply:
    """The part of a reply that was sampled so far."""

    def __init__(self, prompt: Iterable[int], left: int) -> None:
        self.ids = list(prompt)
        """Prompt ids, then sampled ids."""
        self.left = left
        """Number of tokens that may still follow."""
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.kept: list[tuple[int, ...]] = []
        self.versions: list[VersionSpan] = []
        self.cached = 0
        self.end = ""

    def add(self, part: SampledIds, version: int) -> None:
        begin = len(self.sampled)
        self.cached = self.cached if self.sampled else part.cached
        self.ids += part.ids
        self.sampled += part.ids
        self.logprobs += part.logprobs
        self.kept += part.kept or ()
        self.left -= len(part.ids)
        self.end = part.end
        spans = (
            part.versions
            if part.versions is not None
            else (VersionSpan(0, len(part.ids), version),)
        )
        for span in spans:
            start, end = begin + span.start, begin + span.end
            last = self.versions[-1] if self.versions else None
            if last is not None and last.version == span.version:
                self.versions[-1] = VersionSpan(last.start, end, span.version)
            elif end > start or not self.versions:
                self.versions.append(VersionSpan(start, end, span.version))


def tree_of(request: Request) -> Hashable:
    """A key that all calls of one tree share: the seed of a rollout, otherwise how the call's
    conversation begins."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return request.messages[0].content if request.messages else request.affinity
