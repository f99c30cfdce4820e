"""One request inside the engine: its prompt, what it has sampled so far, and when it ends.

A generation does not know its slot or what is cached of it, so a preempted one only loses time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Literal

from ramify.inference.local.sampling import SamplingSettings
from ramify.types.message import VersionSpan

End = Literal["stop", "length", "abort"]
_LONGEST_CHARACTER = 4
"""Bytes of the longest character. A token holds at least one byte, so this many tokens hold a
character."""


class Generation:
    """Prompt and reply of one request."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        draw: SamplingSettings = SamplingSettings(),  # noqa: B008 (frozen)
        stop_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        seed: str = "",
        affinity: str = "",
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """``seed``: two generations with the same seed draw the same random numbers. ``stop``:
        texts that end the reply; ``decode`` turns ids into text to find them."""
        self.ids = list(prompt_ids)
        """Prompt ids, then sampled ids."""
        self.num_prompt = len(self.ids)
        self.max_tokens = max_tokens
        self.draw = draw
        self.affinity = affinity
        self.logprobs: list[float] = []
        self._kept: list[tuple[int, ...]] = []
        self._versions: list[tuple[int, int]] = []
        self._version: int | None = None
        self.end: End | None = None
        """Why it ended; None while it runs."""
        self.stopped_at: str = ""
        """The stop text that ended it."""
        self.num_reused = 0
        """Prompt tokens whose keys and values were already cached."""
        self.cancelled = False
        self._stop_ids = frozenset(stop_ids)
        self._stop = tuple(stop)
        self._decode = decode
        digest = hashlib.blake2b(seed.encode(), digest_size=16).digest()
        self.uniform = random.Random(int.from_bytes(digest)).random
        """The next random number in [0, 1) of this generation; called once per token."""
        self._tail = max((len(text.encode()) for text in stop), default=0) + _LONGEST_CHARACTER

    @property
    def sampled(self) -> list[int]:
        return self.ids[self.num_prompt :]

    @property
    def kept(self) -> tuple[tuple[int, ...], ...] | None:
        """For each sampled token the ids it was drawn from; None if nothing was truncated."""
        return tuple(self._kept) or None

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which version sampled which tokens; empty if no token was sampled."""
        if not self._versions:
            return ()
        ends = [start for start, _ in self._versions[1:]] + [len(self.logprobs)]
        return tuple(
            VersionSpan(start, end, version)
            for (start, version), end in zip(self._versions, ends, strict=True)
        )

    def append(self, id: int, logprob: float, kept: tuple[int, ...] | None, version: int) -> None:
        """Append one sampled token; sets ``end`` if it is the last."""
        self.ids.append(id)
        if version != self._version:
            self._version = version
            self._versions.append((len(self.logprobs), version))
        self.logprobs.append(logprob)
        if kept is not None:
            self._kept.append(kept)
        if id in self._stop_ids:
            self.end = "stop"
        elif self._stop and (stop_text := self._stop_text()):
            self.end, self.stopped_at = "stop", stop_text
        elif len(self.logprobs) >= self.max_tokens:
            self.end = "length"

    def _stop_text(self) -> str:
        """The stop text that the last token completed; of several, the one that begins first."""
        assert self._decode is not None
        tail = self._decode(self.sampled[-self._tail :])
        matches = [(at, text) for text in self._stop if (at := tail.find(text)) >= 0]
        return min(matches)[1] if matches else ""
