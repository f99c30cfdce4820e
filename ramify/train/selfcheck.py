"""Checks that a run makes of itself, at its start, at every weight sync and on every step: the
costliest bugs of this field were silent numbers.

    fingerprint   trainer and engine hold the same weights
    canary        a sampled reply's log-probabilities, by the engine's cache and by the trainer's forest, agree, and so do
                  those of its whole prompt: what is sampled is often near certain, and hides an old output matrix
    movement      an engine without a fingerprint does not score as it did before, bit for bit, though its weights should be
                  others: a sync that did nothing can be too small for the canary
    ids           what the engine was given and sampled is what the tree says, id by id
    weights       compiling and packing lost none of the weight that the algorithm gave out, and doubled none

A check that fails ends the run with a sentence that names it. That a step's advantages are all zero
is no failure: the algorithm says why (``AssignedStep.no_signal``).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ramify.clients.base import Request, Sampling
from ramify.errors import TrainError
from ramify.inference.base import EngineLost, InferenceClient, engines_of
from ramify.train.backends.base import Backend
from ramify.train.pack import pack
from ramify.types.message import Message, Reply
from ramify.types.sequence import Batch, TokenSequence
from ramify.types.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

InTorch = Callable[..., Awaitable[Any]]
Floats64 = np.ndarray[Any, np.dtype[np.float64]]
Weights = Iterable[tuple[str, "Tensor"]]
CANARY_TOKENS = 16
_MOVED = 0.01
"""Share of the weights after whose change an engine cannot score as before. In bf16, by a model of
half a million parameters and over 87 positions: 0.03 % changed no bit, twice of ten times; 0.3 % at
60 positions or more; 2.4 % at all."""
_FEWEST = 32
"""Positions that must be bit for bit the same to mean anything."""
_LOOKED_AT = 1024
"""Values of each matrix."""


class EngineScores(NamedTuple):
    """What an engine's scores were when they last changed."""

    path: tuple[int, ...]
    theirs: tuple[float, ...]
    some: Mapping[str, Tensor]
    """Of the weights that it should have had: some values of each matrix."""
    version: int


class AuditedClient:
    """A client that remembers which ids went through it, as hashes; everything else is the wrapped
    client's."""

    def __init__(self, client: InferenceClient, max_token_staleness: int = 0) -> None:
        """It remembers what went through since ``forget`` was called so many times and once more:
        rollouts of a later step may be over before those of this one are learnt from."""
        self.name, self.window, self.price = client.name, client.window, client.price
        self.client = client
        self.on_reply: Callable[[], None] | None = None
        """Told of each reply."""
        self._paths: deque[set[int]] = deque([set()], maxlen=max_token_staleness + 1)

    async def complete(self, request: Request) -> Reply:
        reply = await self.client.complete(request)
        if self.on_reply is not None:
            self.on_reply()
        if reply.prompt_ids is not None and reply.token_ids is not None:
            self._paths[-1].add(hash((*reply.prompt_ids, *reply.token_ids)))
        return reply

    def note(self, paths: Iterable[int]) -> None:
        """What went through elsewhere, as ``take`` gave it."""
        self._paths[-1].update(paths)

    def take(self) -> tuple[int, ...]:
        """What went through since this was last asked."""
        taken = tuple(self._paths[-1])
        self._paths[-1].clear()
        return taken

    def has_seen(self, ids: tuple[int, ...]) -> bool:
        return any(hash(ids) in paths for paths in self._paths)

    def forget(self) -> None:
        self._paths.append(set())

    async def close(self) -> None:
        await self.client.close()


class CanaryLimits(NamedTuple):
    """How far the canary's log-probabilities may differ between engine and trainer."""

    tolerance: float
    """Largest difference; the mean may be a tenth of it."""
    rounding: float
    """The same as a share of the path's largest log-probability; the larger of the two holds."""
    hint: str
    """Both precisions, and the options that set them."""


class SelfCheck:
    """The checks of one run."""

    def __init__(
        self,
        seen: AuditedClient,
        weights: Callable[[], Weights],
        prompt: Sequence[Message],
        tolerance: float = 1e-4,
        rounding: float = 0.0,
        hint: str = "",
    ) -> None:
        """``weights`` are the trained ones as the engine should have them; ``prompt`` is what the
        canary is asked; ``tolerance``, ``rounding`` and ``hint`` as in ``CanaryLimits``. (In fp32
        differences up to 2e-5 were seen at single tokens, far less at most; bf16 rounds to three
        digits, so there they grow with the log-probabilities.)"""
        self._seen, self._weights = seen, weights
        self._limits = CanaryLimits(tolerance, rounding, hint)
        self._request = Request(
            tuple(prompt),
            Sampling(CANARY_TOKENS, temperature=1.0, seed=7, logprobs=True),
            affinity="canary",
        )
        self.worst = 0.0
        """Largest difference that a canary has shown."""
        self.good_version: int | None = None
        """Of the last weights that every engine that was there was seen to answer with."""
        self._scored: dict[str, EngineScores] = {}
        """By each engine that says no fingerprint."""

    async def engine(self, backend: Backend, in_torch: InTorch) -> None:
        """Raises TrainError where an engine and the trainer are not the same policy."""
        ours, some = await in_torch(self._looked_at)
        answered = 0
        for engine in engines_of(self._seen.client):
            with contextlib.suppress(EngineLost):  # it is checked when it is back
                await self._one(engine, ours, some, backend, in_torch)
                answered += 1
        if answered:
            self.good_version = self._seen.client.version

    def _looked_at(self) -> tuple[str, Mapping[str, Tensor]]:
        """(fingerprint, some values of each matrix) of the weights that engines should have."""
        from ramify.models.fingerprint import fingerprint_of

        some: dict[str, Tensor] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, weight in self._weights():
                if weight.dim() > 1:
                    step = max(1, weight.numel() // _LOOKED_AT) | 1  # odd: no column alone
                    some[name] = weight.detach().flatten()[::step].cpu().clone()
                yield name, weight

        return fingerprint_of(noted()), some

    async def _one(
        self,
        engine: InferenceClient,
        ours: str,
        some: Mapping[str, Tensor],
        backend: Backend,
        in_torch: InTorch,
    ) -> None:
        theirs = await engine.fingerprint()
        if theirs is not None and ours != theirs:
            raise TrainError(
                f"the engine answers with other weights (fingerprint {theirs}) than the trainer "
                f"has ({ours}): the weight sync "
                f"failed{self._where(engine)}"
            )
        reply = await engine.complete(self._request)
        assert reply.prompt_ids is not None
        assert reply.token_ids is not None
        assert reply.logprobs is not None
        path = (*reply.prompt_ids, *reply.token_ids)
        ours_T = await in_torch(self._own_logprobs, backend, path)
        allowed = self._allowed(ours_T)
        self._compare(
            engine, np.array(reply.logprobs), ours_T[len(reply.prompt_ids) :], "sampled", allowed
        )
        scores = await engine.logprobs(path)
        self._compare(engine, np.array(scores), ours_T[1:], "scored", allowed)
        if theirs is None:
            self._moved(engine, EngineScores(path, tuple(scores), some, self._seen.client.version))

    def _moved(self, engine: InferenceClient, now: EngineScores) -> None:
        """Raises TrainError where the engine scores as it did before, though the weights are others
        by more than rounding can hide. Measured since its scores last changed: one small step may
        be hidden, many are not."""
        before = self._scored.get(engine.name)
        if before is None or before[:2] != now[:2] or len(now.theirs) < _FEWEST:
            self._scored[engine.name] = now
            return
        share = float(
            np.median(
                [_share_changed(before.some[name], each) for name, each in now.some.items()]
                or [0.0]
            )
        )
        if share >= _MOVED:
            self.good_version = before.version
            raise TrainError(
                f"the engine scores all {len(now.theirs)} tokens of the canary as it did at "
                f"version {before.version}, bit for "
                f"bit, though {share:.1%} of the weights are others since (median of all "
                "matrices): it took new weights and "
                f"does not answer with them{self._where(engine)}"
            )

    def _allowed(self, ours_T: Floats64) -> float:
        """Largest difference that the canary may show on a path of these log-probabilities."""
        largest = float(np.abs(ours_T[np.isfinite(ours_T)]).max(initial=0.0))
        return max(self._limits.tolerance, self._limits.rounding * largest)

    def _compare(
        self,
        engine: InferenceClient,
        theirs_T: Floats64,
        ours_T: Floats64,
        what: str,
        allowed: float,
    ) -> None:
        differences_T = np.nan_to_num(np.abs(ours_T - theirs_T), nan=np.inf)
        largest, mean = float(differences_T.max(initial=0.0)), float(differences_T.mean())
        self.worst = max(self.worst, largest)
        if not (largest <= allowed and mean <= allowed / 10):
            hint = f"; {self._limits.hint}" if self._limits.hint else ""
            at = int(np.argmax(differences_T))
            raise TrainError(
                f"the canary's log-probabilities differ by {largest:.2g} between engine and "
                f"trainer, {mean:.2g} on average, "
                f"and at most {allowed:.3g} and {allowed / 10:.3g} are allowed ({theirs_T[at]:.5f} "
                "by the engine, "
                f"{ours_T[at]:.5f} by the trainer, at {what} token {at}): they compute different "
                "models, or the engine's cache "
                f"is stale{self._where(engine)}{hint}"
            )

    def _where(self, engine: InferenceClient) -> str:
        last = (
            "none was checked before"
            if self.good_version is None
            else f"the last good version is {self.good_version}"
        )
        return f" ({engine.name}; version {self._seen.client.version}; {last})"

    def ids(self, groups: Sequence[Group]) -> None:
        """Raises TrainError where a tree of the first group says other ids than went through the
        engine."""
        for trajectory in groups[0].trajectories:
            self._ids_of(trajectory)
        self._seen.forget()

    def _ids_of(self, trajectory: Trajectory) -> None:
        for call in trajectory.calls:
            if call.model != self._seen.name:
                continue
            for index, turn in enumerate(call.turns):
                path = trajectory.path(call, index) if turn.num_ids is not None else None
                if path is not None and not self._seen.has_seen(path.ids):
                    raise TrainError(
                        f"{trajectory.id}/call={call.id}/turn={index}: the tree has {len(path)} "
                        "ids that the engine was never "
                        "given together: what would be trained on is not what was sampled"
                    )

    def weights(self, rows: Sequence[TokenSequence], batches: Sequence[Batch]) -> None:
        """Raises TrainError where the batches of a step do not weigh what its rows do."""
        for name in ("rl", "ce", "kd"):
            given = sum(
                float(np.sum(column, dtype=np.float64))
                for row in rows
                if (column := getattr(row, name)) is not None
            )
            packed = sum(
                float(np.sum(b.streams[name], dtype=np.float64))
                for b in batches
                if name in b.streams
            )
            if abs(given - packed) > 1e-5 * max(abs(given), 1.0):
                raise TrainError(
                    f"the batches of a step weigh {packed:.6g} in '{name}', their sequences "
                    f"{given:.6g}"
                )

    def _own_logprobs(self, backend: Backend, ids: tuple[int, ...]) -> Floats64:
        """The trainer's log-probability of each of ``ids``; 0 for the first."""
        row = _row(ids, 1)
        ours_T = np.zeros(len(row), np.float64)
        batches = pack([row], backend.packing)
        for batch, logprobs in zip(batches, backend.logprobs(batches), strict=True):
            ours_T[batch.owners[:, 1]] = logprobs
        return ours_T


def _share_changed(before: Tensor, now: Tensor) -> float:
    return float((before != now).double().mean())


def _row(ids: tuple[int, ...], num_given: int) -> TokenSequence:
    zeros = np.zeros(len(ids), np.float32)
    weights = zeros.copy()
    weights[num_given:] = 1
    return TokenSequence(
        name="canary",
        token_ids=np.array(ids, np.int64),
        mask=weights > 0,
        sampler_logprobs=zeros,
        advantages=zeros,
        rl=zeros,
        ce=weights,
    )
