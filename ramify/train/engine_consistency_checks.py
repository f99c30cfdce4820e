"""Check that the inference engines and the trainer compute the same model.

The checks run at the start of a run, at every weight sync and in every step. They guard against
numbers that are silently wrong, the costliest bugs in this field.

    fingerprint   trainer and engine hold the same weights
    canary        the log-probabilities of a sampled reply agree between the engine's cache and
                  the trainer's forest, and so do those of its prompt (sampled tokens are often
                  nearly certain, which would hide an outdated output matrix)
    movement      an engine without a fingerprint must not score bit for bit as before if its
                  weights should have changed: the canary may miss a sync that did nothing
    ids           the trajectory has exactly the ids that went through the engine
    weights       compiling and packing neither lost nor doubled any loss weight

If a check fails, the run ends with an error that names the check. A step whose advantages are all
zero is not an error; the algorithm reports the reason (``OptimizerStepAdvantages.no_signal``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ramify.clients.base import PromptRenderer, Request, Sampling
from ramify.errors import TrainError
from ramify.inference.base import EngineLost, UpdatableInferenceClient
from ramify.progress import heartbeat
from ramify.train.backends.base import Backend
from ramify.train.data.pack import pack
from ramify.types.message import Message, Reply
from ramify.types.training_sequences import Batch, TokenSequence
from ramify.types.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

InTorch = Callable[..., Awaitable[Any]]
Floats64 = np.ndarray[Any, np.dtype[np.float64]]
Weights = Iterable[tuple[str, "Tensor"]]
CANARY_TOKENS = 16
_MIN_CHANGE = 0.01
"""If at least this share of the weights has changed, an engine that returns exactly the same scores
as before must be using old weights. Measured in bf16, with a model of half a million parameters and
87 positions: a change of 0.03 % left all bits unchanged in two of ten runs, 0.3 % changed 60
positions or more, and 2.4 % changed all."""
_MIN_POSITIONS = 32
"""Minimum number of positions for which bitwise equality is meaningful."""
_NUM_COMPARED = 1024
"""Number of values compared per matrix."""
_BROKEN = -50.0
"""Mean log-probability of the canary's tokens below which the policy's weights are broken. Chance
is about -12 with 150,000 tokens."""
_NUM_SAMPLES = 6
"""Number of canary replies sampled at once in a deterministic run."""


class CanaryTolerance(NamedTuple):
    """Limits on how far engine and trainer may disagree about the log-probabilities of the canary,
    a short sampled reply."""

    tolerance: float = 1e-4
    """Limit of the largest difference. The limit of the mean difference is a tenth of it."""
    rounding: float = 0.0
    """Limit of the largest difference as a share of the canary's largest log-probability. The
    larger of the two limits applies."""
    hint: str = ""
    """Advice for the error message: both precisions, and the options that set them."""


class TokenIdHashingClient:
    """A client that records a hash of the token ids of every completion.

    The hashes are used to check that trajectories contain exactly the ids that the engine
    processed. Everything else is delegated to the wrapped client.

    Clients of rollout workers record ids too, and the workers send their hashes to the run.
    """

    def __init__(self, client: UpdatableInferenceClient, max_token_staleness: int = 0) -> None:
        """Create a client that records hashes and sends all requests to ``client``.

        Hashes are kept for the latest ``max_token_staleness + 1`` windows, and
        ``begin_next_window`` starts a new window. Older windows are needed because rollouts of
        later steps may finish before the current step is trained on.
        """
        self.name = client.name
        self.window = client.window
        self.price = client.price
        self.rendering: PromptRenderer | None = getattr(client, "rendering", None)
        self.client = client
        self._paths: deque[set[int]] = deque([set()], maxlen=max_token_staleness + 1)

    async def complete(self, request: Request) -> Reply:
        reply = await self.client.complete(request)
        heartbeat()
        if reply.prompt_ids is not None and reply.token_ids is not None:
            self._paths[-1].add(hash((*reply.prompt_ids, *reply.token_ids)))
        return reply

    def merge_hashes(self, paths: Iterable[int]) -> None:
        """Add the hashes recorded by a client in another process, as returned by its
        ``take_hashes``."""
        self._paths[-1].update(paths)

    def take_hashes(self) -> tuple[int, ...]:
        """Return the hashes recorded since the last call of this method, and forget them."""
        paths = tuple(self._paths[-1])
        self._paths[-1].clear()
        return paths

    def has_seen(self, ids: tuple[int, ...]) -> bool:
        return any(hash(ids) in paths for paths in self._paths)

    def begin_next_window(self) -> None:
        self._paths.append(set())

    async def close(self) -> None:
        await self.client.close()


class CanaryLogprobs(NamedTuple):
    """The log-probabilities that an engine returned for the canary, a short sampled reply.

    They are stored again only when they change.
    """

    path: tuple[int, ...]
    theirs: tuple[float, ...]
    some: Mapping[str, Tensor]
    """A sample of the values of each weight matrix, as the engine should have had them when it
    returned these log-probabilities."""
    version: int


class EngineConsistencyChecks:
    """Checks during a run that engines and trainer agree on weights, log-probabilities and token
    ids."""

    def __init__(
        self,
        seen: TokenIdHashingClient,
        weights: Callable[[], Weights],
        prompt: Sequence[Message],
        limits: CanaryTolerance = CanaryTolerance(),  # noqa: B008 (frozen)
    ) -> None:
        """Create the checks of the engines of one training run.

        ``weights`` returns the trained weights as the engine should have them. ``prompt`` is the
        prompt of the canary, a short reply that is sampled and scored.

        In fp32, single tokens differ by up to 2e-5 and most tokens by much less. bf16 rounds to
        three digits, so differences grow with the log-probabilities.
        """
        self.seen = seen
        self._weights = weights
        self._limits = limits
        self._request = Request(
            tuple(prompt),
            Sampling(CANARY_TOKENS, temperature=1.0, logprobs=True),
            affinity="canary",
        )
        self.worst = 0.0
        """Largest difference seen in any canary."""
        self.good_version: int | None = None
        """Version of the last weights that every reachable engine was shown to use."""
        self._scored: dict[str, CanaryLogprobs] = {}
        """The latest scores of each engine without a fingerprint, by the engine's name."""

    async def check_engines(self, backend: Backend, in_torch: InTorch) -> None:
        """Raise TrainError if any engine serves a different policy than the trainer holds.

        Engines that are currently lost are skipped and checked when they rejoin.
        """
        ours, some = await in_torch(self._expected_weights)
        answered = 0
        for engine in engines_of(self.seen.client):
            with contextlib.suppress(EngineLost):  # it is checked when it rejoins
                await self._check_engine(engine, ours, some, backend, in_torch)
                answered += 1
        if answered:
            self.good_version = self.seen.client.version

    def _expected_weights(self) -> tuple[str, Mapping[str, Tensor]]:
        """Return a fingerprint and sample values of the weights that the engines should have.

        The sample values are keyed by matrix name.
        """
        from ramify.models.weights import tensors_fingerprint

        some: dict[str, Tensor] = {}

        def recorded() -> Iterator[tuple[str, Tensor]]:
            for name, weight in self._weights():
                if weight.dim() > 1:
                    # An odd step, so that the values are not all from one column.
                    step = max(1, weight.numel() // _NUM_COMPARED) | 1
                    some[name] = weight.detach().flatten()[::step].cpu().clone()
                yield name, weight

        return tensors_fingerprint(recorded()), some

    async def _check_engine(
        self,
        engine: UpdatableInferenceClient,
        ours: str,
        some: Mapping[str, Tensor],
        backend: Backend,
        in_torch: InTorch,
    ) -> None:
        theirs = await engine.fingerprint()
        if theirs is not None and ours != theirs:
            raise TrainError(
                f"the engine has other weights (fingerprint {theirs}) than the trainer ({ours}): "
                f"the weight sync failed{self._engine_description(engine)}"
            )
        # The same bits are needed in a batch of any size.
        num = 1 if self._limits.tolerance else _NUM_SAMPLES
        requests = [_with_seed(self._request, 7 + index) for index in range(num)]
        for reply in await asyncio.gather(*(engine.complete(each) for each in requests)):
            assert reply.prompt_ids is not None
            assert reply.token_ids is not None
            assert reply.logprobs is not None
            path = (*reply.prompt_ids, *reply.token_ids)
            ours_T = await in_torch(self._own_logprobs, backend, path)
            allowed = self._allowed_difference(ours_T)
            sampled_T = ours_T[len(reply.prompt_ids) :]
            self._compare(engine, np.array(reply.logprobs), sampled_T, "sampled", allowed)
        scores = await engine.logprobs(path)
        self._compare(engine, np.array(scores), ours_T[1:], "scored", allowed)
        if theirs is None:
            self._check_moved(
                engine, CanaryLogprobs(path, tuple(scores), some, self.seen.client.version)
            )

    def _check_moved(self, engine: UpdatableInferenceClient, now: CanaryLogprobs) -> None:
        """Raise TrainError if the engine's log-probabilities did not change although its weights
        did.

        Rounding can hide the change of one small step, but not that of many. So the change of the
        weights is measured since the log-probabilities last changed.
        """
        before = self._scored.get(engine.name)
        # Different scores show that the new weights are used; too few positions prove nothing.
        if before is None or before[:2] != now[:2] or len(now.theirs) < _MIN_POSITIONS:
            self._scored[engine.name] = now
            return
        share = float(
            np.median(
                [_share_changed(before.some[name], weights) for name, weights in now.some.items()]
                or [0.0]
            )
        )
        if share >= _MIN_CHANGE:
            self.good_version = before.version
            raise TrainError(
                f"the engine scores all {len(now.theirs)} tokens of the canary as at version "
                f"{before.version}, bit for bit, although {share:.1%} of the weights have changed "
                "since (median over matrices): it received new weights but does not use them"
                f"{self._engine_description(engine)}"
            )

    def _allowed_difference(self, ours_T: Floats64) -> float:
        """Return the largest allowed engine-trainer log-probability difference on the canary.

        The canary is a short sampled reply, whose log-probabilities both the engine and the trainer
        compute. ``ours_T`` holds the trainer's. Large values round more, so they allow a larger
        difference.
        """
        largest = float(np.abs(ours_T[np.isfinite(ours_T)]).max(initial=0.0))
        return max(self._limits.tolerance, self._limits.rounding * largest)

    def _compare(
        self,
        engine: UpdatableInferenceClient,
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
            why = "they compute different models, or the engine's cache is stale"
            if not np.isfinite(ours_T).all() or float(ours_T.mean()) < _BROKEN:
                why = (
                    "the trainer's own values are those of a policy that predicts no text any "
                    "more, so an update has broken its weights: lower the stage's optim.lr, or set "
                    "optim.max_grad_norm"
                )
            at = int(np.argmax(differences_T))
            raise TrainError(
                f"the canary's log-probabilities differ by up to {largest:.2g} between engine and "
                f"trainer (allowed: {allowed:.3g}), and by {mean:.2g} on average (allowed: "
                f"{allowed / 10:.3g}): {why}{self._engine_description(engine)}; at {what} "
                f"token {at} the engine "
                f"gives {theirs_T[at]:.5f} and the trainer {ours_T[at]:.5f}{hint}"
            )

    def _engine_description(self, engine: UpdatableInferenceClient) -> str:
        last = (
            "none was checked before"
            if self.good_version is None
            else f"the last good version is {self.good_version}"
        )
        return f" ({engine.name}; version {self.seen.client.version}; {last})"

    def check_ids_from_engine(self, groups: Sequence[Group]) -> None:
        """Check that all token ids in a step's first rollout group went through the engine.

        Raises TrainError if one of its trajectories contains ids that did not go through the
        engine.
        """
        for trajectory in groups[0].trajectories:
            self._check_ids(trajectory)
        self.seen.begin_next_window()

    def _check_ids(self, trajectory: Trajectory) -> None:
        for call in trajectory.calls:
            if call.model != self.seen.name:
                continue
            for index, turn in enumerate(call.turns):
                path = trajectory.path(call, index) if turn.num_ids is not None else None
                if path is not None and not self.seen.has_seen(path.ids):
                    raise TrainError(
                        f"{trajectory.id}/call={call.id}/turn={index}: the engine was never given "
                        f"these {len(path)} ids as one sequence: the run would train on something "
                        "other than what was sampled"
                    )

    def check_packed_loss_weights(
        self, rows: Sequence[TokenSequence], batches: Sequence[Batch]
    ) -> None:
        """Raise TrainError if packing changed the total loss weight of a step.

        The batches must have the same sum of weights as the sequences in ``rows``.
        """
        for name in ("rl", "ce", "kd"):
            total = sum(
                float(np.sum(column, dtype=np.float64))
                for row in rows
                if (column := getattr(row, name)) is not None
            )
            packed = sum(
                float(np.sum(b.streams[name], dtype=np.float64))
                for b in batches
                if name in b.streams
            )
            if abs(total - packed) > 1e-5 * max(abs(total), 1.0):
                raise TrainError(
                    f"the batches of a step have a total weight of {packed:.6g} in '{name}', but "
                    f"their sequences {total:.6g}"
                )

    def _own_logprobs(self, backend: Backend, ids: tuple[int, ...]) -> Floats64:
        """Return the log-probability that the trainer's weights give to each token of one sequence.

        The first token gets 0.
        """
        row = _row(ids, 1)
        ours_T = np.zeros(len(row), np.float64)
        batches = pack([row], backend.packing)
        for batch, logprobs in zip(batches, backend.logprobs(batches), strict=True):
            ours_T[batch.owners[:, 1]] = logprobs
        return ours_T


def engines_of(client: UpdatableInferenceClient) -> Sequence[UpdatableInferenceClient]:
    """Return the individual engines behind ``client``, for checks that each engine must pass.

    If ``client`` is itself an engine, only that engine is returned. The list is empty if all
    engines are currently lost.
    """
    engines: Sequence[UpdatableInferenceClient] | None = getattr(client, "engines", None)
    return [client] if engines is None else engines


def _with_seed(request: Request, seed: int) -> Request:
    sampling = msgspec.structs.replace(request.sampling, seed=seed)
    return msgspec.structs.replace(request, sampling=sampling)


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
