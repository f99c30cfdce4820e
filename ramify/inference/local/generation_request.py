"""Sample tokens, and keep the state of each request in the inference engine.

A generation does not depend on the part of the cache that it uses, so preemption costs time but
does not change the result.

One uniform random number per row selects a token by inverting the cumulative distribution (drawing
an exponential variate per vocabulary entry would cost more than the rest of sampling). The number
comes from the request's own generator, so what a request samples does not depend on the rest of the
batch.

    temperature t > 0     log p = log_softmax(logits / t)
    top_k, then top_p     only those ids, renormalised; ``kept`` lists them
    temperature 0         the likeliest id; log p is the model's own, at temperature 1

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from ramify.models.batch_invariant_forward import apply_in_blocks
from ramify.types.message import VersionSpan

MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-3, 1e9
"""Bounds for temperatures. Logits divided by a temperature outside them may not be finite in
fp32."""


_LOG2_E = math.log2(math.e)


class SamplingSettings(msgspec.Struct, frozen=True):
    """The sampling settings of one request."""

    temperature: float = 1.0
    """Sampling temperature. 0 takes the most likely id. Other values below ``MIN_TEMPERATURE`` are
    raised to it."""
    top_p: float = 1.0
    """Keep the most likely ids until their probabilities add up to this value. 1 keeps all."""
    top_k: int = 0
    """Keep only this many of the most likely ids. 0 keeps all."""
    top_logprobs: int = 0
    """Report this many of the most likely ids for each token."""

    truncates: bool = False
    """True if top-k or top-p excludes ids. It is computed from the other fields and not set by the
    caller."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(
            self, "truncates", self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)
        )


TokenLogprobs = tuple[tuple[int, float], ...]
"""(id, log-probability) pairs, most likely first."""


class SamplingStepOutput(NamedTuple):
    """The tokens that an engine step sampled, one for each row of logits.

    Their log-probabilities are given, too.
    """

    ids: list[int]
    logprobs: list[float]
    kept: list[tuple[int, ...] | None]
    """Per row, the ids that could be drawn, most likely first; None if all ids could be drawn."""
    top: list[TokenLogprobs | None]
    """Per row, the most likely ids. None unless the row's settings ask for them."""


def sample_tokens(
    logits_nV: Tensor,
    settings: Sequence[SamplingSettings],
    uniforms: Sequence[float],
    *,
    fixed: bool = False,
) -> SamplingStepOutput:
    """Sample one token per row of fp32 logits.

    Each row uses one random number in [0, 1). With ``fixed``, computations have fixed shapes, so
    that a row's result does not depend on the number of rows.
    """
    logprobs_nV = log_softmax(_apply_temperature(logits_nV, settings), fixed=fixed)
    device = logits_nV.device
    # From pinned memory, so that the host does not wait here for the logits.
    pinned_n = torch.tensor(uniforms, dtype=torch.float64, pin_memory=device.type == "cuda")
    ids_n = sample_from_logprobs(logprobs_nV, pinned_n.to(device, non_blocking=True))
    if any(row_settings.temperature == 0 for row_settings in settings):
        greedy = [row for row, row_settings in enumerate(settings) if row_settings.temperature == 0]
        ids_n[greedy] = logits_nV[greedy].argmax(-1)
    chosen_n = logprobs_nV.gather(1, ids_n[:, None])[:, 0]
    num_rows = len(settings)
    drawn = SamplingStepOutput(
        ids_n.tolist(), chosen_n.tolist(), [None] * num_rows, [None] * num_rows
    )
    for row, row_settings in enumerate(settings):
        if row_settings.truncates:
            drawn.ids[row], drawn.logprobs[row], drawn.kept[row] = _draw_kept(
                logprobs_nV[row], row_settings, uniforms[row]
            )
        if row_settings.top_logprobs:
            drawn.top[row] = _top_logprobs(logprobs_nV[row], row_settings)
    return drawn


def _top_logprobs(logprobs_V: Tensor, settings: SamplingSettings) -> TokenLogprobs:
    """Return the most likely next tokens with their log-probabilities.

    The log-probabilities are those of the sampling distribution.
    """
    ids = top_k_top_p_ids(logprobs_V, settings) if settings.truncates else None
    among = logprobs_V if ids is None else logprobs_V[ids].log_softmax(-1)
    values, places = among.topk(min(settings.top_logprobs, len(among)))
    found = places if ids is None else ids[places]
    return tuple(zip(found.tolist(), values.tolist(), strict=True))


def log_softmax(z_nV: Tensor, *, fixed: bool) -> Tensor:
    """Return log-probabilities from logits: the log-softmax over the last dimension.

    With ``fixed``, it is computed in blocks of a fixed shape, so that a row's result does not
    depend on the number of rows.
    """
    return apply_in_blocks(lambda z: z.log_softmax(-1), z_nV) if fixed else z_nV.log_softmax(-1)


def _apply_temperature(logits_nV: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
    if {row.temperature for row in settings} <= {0.0, 1.0}:
        return logits_nV
    temperatures = [
        min(max(row.temperature, MIN_TEMPERATURE), _MAX_TEMPERATURE) if row.temperature else 1.0
        for row in settings
    ]
    return logits_nV / torch.tensor(temperatures, device=logits_nV.device)[:, None]


def sample_from_logprobs(logprobs_nV: Tensor, uniforms_n: Tensor) -> Tensor:
    """Sample one token id per row of log-probabilities.

    This inverts the cumulative distribution. The sampled id is the first one at which the
    cumulative probability exceeds the row's uniform random number (float64, in [0, 1)). The result
    has shape [n].

    The sum is computed in float64. In single precision, a number close to 1 could be rounded up to
    the total, beyond the last id.
    """
    # Powers of 2 take half as long as those of e.
    cumulative_nV = logprobs_nV.double().mul_(_LOG2_E).exp2_().cumsum_(-1)
    ids_n1 = torch.searchsorted(
        cumulative_nV, uniforms_n[:, None] * cumulative_nV[:, -1:], right=True
    )
    # If logits are NaN, the search ends beyond the last id, where ``gather`` would fail.
    return ids_n1[:, 0].clamp_(max=logprobs_nV.shape[1] - 1)


def top_k_top_p_ids(logprobs_V: Tensor, settings: SamplingSettings) -> Tensor:
    """Return the token ids that top-k and then top-p keep, most likely first.

    At least one remains. Ties go to lower ids.
    """
    order = logprobs_V.argsort(descending=True, stable=True)
    if settings.top_k:
        order = order[: settings.top_k]
    if settings.top_p < 1:
        probabilities = logprobs_V[order].double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        order = order[: max(int((before < settings.top_p).sum()), 1)]
    return order


def _draw_kept(
    logprobs_V: Tensor, settings: SamplingSettings, uniform: float
) -> tuple[int, float, tuple[int, ...]]:
    """Sample one token id among those that top-k and top-p sampling keep.

    Returns the id, its log-probability among the kept ids, and these ids.
    """
    kept = top_k_top_p_ids(logprobs_V, settings)
    renormalised = logprobs_V[kept].log_softmax(-1)
    index = int(
        sample_from_logprobs(
            renormalised[None], torch.tensor([uniform], dtype=torch.float64, device=kept.device)
        )
    )
    return int(kept[index]), float(renormalised[index]), tuple(kept.tolist())


End = Literal["stop", "length", "abort"]
_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character. A token holds at least one byte, so this many tokens always
cover a character."""


class GenerationState:
    """The state of one request in the inference engine: its prompt and the reply so far.

    It also says why the reply ended.
    """

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
        """Create the state of a request for which no tokens are sampled yet.

        Generations with the same ``seed`` get the same random numbers. A reply ends at any of the
        strings in ``stop``, which are searched for in the text that ``decode`` makes of token ids.
        """
        self.ids = list(prompt_ids)
        """Prompt ids, followed by sampled ids."""
        self.num_prompt = len(self.ids)
        self.max_tokens = max_tokens
        self.draw = draw
        self.affinity = affinity
        self.logprobs: list[float] = []
        self._kept: list[tuple[int, ...]] = []
        self.top: list[TokenLogprobs] = []
        """Per sampled token, the most likely ids. Empty unless ``draw`` asks for them."""
        self.routes: list[tuple[int, ...]] = []
        """For each sampled token, the experts that predicted it, which are those that processed the
        preceding token. Empty if experts are not recorded."""
        self._versions: list[tuple[int, int]] = []
        self._version: int | None = None
        self.end: End | None = None
        """Why the reply ended. None while it is being generated."""
        self.stopped_at: str = ""
        """The stop sequence that ended the reply, or an empty string."""
        self.num_reused = 0
        """Number of prompt tokens whose keys and values were already cached."""
        self.cancelled = False
        self._stop_ids = frozenset(stop_ids)
        self._stop = tuple(stop)
        self._decode = decode
        digest = hashlib.blake2b(seed.encode(), digest_size=16).digest()
        # Not a torch generator, which on a CPU uses only 32 bits of its seed.
        self.uniform = random.Random(int.from_bytes(digest)).random
        """A function that returns this generation's next random number in [0, 1), and is called
        once per token."""
        self._tail = max((len(text.encode()) for text in stop), default=0) + _LONGEST_CHARACTER

    @property
    def sampled_ids(self) -> list[int]:
        return self.ids[self.num_prompt :]

    @property
    def candidate_ids_by_token(self) -> tuple[tuple[int, ...], ...] | None:
        """The token ids among which each token of the reply was sampled.

        None if no ids were excluded.
        """
        return tuple(self._kept) or None

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The spans of the reply that were sampled with the same version of the weights, in order.

        Each contains the version. Empty if no token was sampled.
        """
        if not self._versions:
            return ()
        ends = [start for start, _ in self._versions[1:]] + [len(self.logprobs)]
        return tuple(
            VersionSpan(start, end, version)
            for (start, version), end in zip(self._versions, ends, strict=True)
        )

    def append(
        self,
        id: int,
        logprob: float,
        kept: tuple[int, ...] | None,
        version: int,
        top: TokenLogprobs | None = None,
    ) -> None:
        """Append a newly sampled token to the reply.

        Sets ``end`` if it is the last one.
        """
        self.ids.append(id)
        if version != self._version:
            self._version = version
            self._versions.append((len(self.logprobs), version))
        self.logprobs.append(logprob)
        if kept is not None:
            self._kept.append(kept)
        if top is not None:
            self.top.append(top)
        if id in self._stop_ids:
            self.end = "stop"
        elif self._stop and (stop_text := self._stop_text()):
            self.end, self.stopped_at = "stop", stop_text
        elif len(self.logprobs) >= self.max_tokens:
            self.end = "length"

    def _stop_text(self) -> str:
        """Return the stop sequence that the last sampled token completed, or an empty string.

        If there are several, the one that begins first is returned.
        """
        assert self._decode is not None
        tail = self._decode(self.sampled_ids[-self._tail :])
        matches = [(at, text) for text in self._stop if (at := tail.find(text)) >= 0]
        return min(matches)[1] if matches else ""
