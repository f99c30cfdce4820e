"""Models that score: log-probabilities of given tokens, by the same forward pass that trains the
policy.

    rows of several groups ── wait while a pass runs ── pack (shared prefixes once) ── trunk, head ──> scores per row

Rows of a group share the prompt up to where a hint was put in, and are packed as training packs
them. One thread computes, so that passes do not crowd each other out; rows that come meanwhile go
together into the next pass. Temperatures are those that the tokens were sampled at. Decides where
teachers' weights come from (``RunTeachers``), which of them a checkpoint holds, and that a teacher
with another vocabulary is refused before anything is spent.

Legend: E entries of a batch, N scored tokens of a row, k candidates.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify.errors import ConfigError, RamifyError, TrainError
from ramify.train.pack import describe, pack
from ramify.train.signals.base import ScoringRow, TokenScorer, TokenScores
from ramify.types.sequence import TokenSequence

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.models.load import Policy
    from ramify.train.backends.single import SingleBackend

Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""A function -> its result, computed in some thread."""
REFERENCE = "reference"
"""Folder of a run with the policy that its rollouts began with."""
CHUNK = 64
"""Rows of one pass at most, so that a large group does not hold up others."""


class PolicyScorer:
    """A ``TokenScorer`` over a policy of this process."""

    def __init__(self, backend: SingleBackend, window: int, num_ids: int, run: Run) -> None:
        """``run`` computes in the thread that the model belongs to."""
        self._backend, self._window, self._num_ids, self._in_thread = backend, window, num_ids, run
        self._waiting: list[tuple[ScoringRow, int, asyncio.Future[TokenScores]]] = []
        self._running: asyncio.Task[None] | None = None
        self.busy_s = 0.0
        """Seconds of computing so far."""
        self.row_tokens = 0.0
        """TokenSequence of all rows so far."""
        self.packed_tokens = 0.0
        """Those that were computed, what rows share counted once, beyond those of plain rows."""
        self.plain_tokens = 0.0
        """What plain rows took, which training does not compute again."""

    async def score(self, rows: Sequence[ScoringRow], *, top: int = 0) -> list[TokenScores]:
        for row in rows:
            if len(row.ids) > self._window:
                raise RamifyError(
                    f"a row of {len(row.ids)} tokens does not fit the teacher's window of "
                    f"{self._window}"
                )
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[TokenScores]] = []
        for row in rows:
            futures.append(loop.create_future())
            self._waiting.append(
                (row, self._num_ids if top < 0 else min(top, self._num_ids), futures[-1])
            )
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        await asyncio.sleep(0)  # those who ask in the same moment go together
        while self._waiting:
            asked, self._waiting = self._waiting[:CHUNK], self._waiting[CHUNK:]
            by_top: dict[tuple[int, int], list[tuple[ScoringRow, asyncio.Future[TokenScores]]]] = {}
            for row, top, future in asked:
                width = len(row.candidates[0]) if row.candidates else 0
                by_top.setdefault((top, width), []).append((row, future))
            for (top, _), together in by_top.items():
                await self._pass(
                    [row for row, _ in together], top, [future for _, future in together]
                )

    async def _pass(
        self, rows: list[ScoringRow], top: int, futures: list[asyncio.Future[TokenScores]]
    ) -> None:
        try:
            found = await self._in_thread(lambda: self.compute(rows, top))
        except Exception as error:  # noqa: BLE001 -- told to those who wait for it
            failure = (
                error
                if isinstance(error, RamifyError)
                else TrainError(f"the teacher failed: {error!r}")
            )
            for future in futures:
                if not future.done():
                    future.set_exception(failure)
            return
        for future, scores in zip(futures, found, strict=True):
            if not future.done():
                future.set_result(scores)

    def compute(self, rows: Sequence[ScoringRow], top: int = 0) -> list[TokenScores]:
        """The same, at once and in this thread."""
        started = time.perf_counter()
        sequences = [_sequence(row, index) for index, row in enumerate(rows)]
        batches = pack(sequences, self._backend.packing)
        self._count(rows, sequences, describe(batches, sequences)["packed_tokens"])
        logprobs = [np.zeros(len(each), np.float64) for each in sequences]
        wide: list[dict[str, Any]] = [{} for _ in sequences]
        for batch, found in zip(batches, self._backend.scores(batches, top), strict=True):
            for index in batch.sequences:
                mine = batch.owners[:, 0] == index
                places = batch.owners[mine, 1]
                logprobs[index][places] = found["logprobs"][mine]
                for name in found.keys() - {"logprobs"}:
                    column = wide[index].setdefault(
                        name, np.zeros((len(sequences[index]), found[name].shape[1]))
                    )
                    column[places] = found[name][mine]
        self.busy_s += time.perf_counter() - started
        return [_scores(row, logprobs[index], wide[index]) for index, row in enumerate(rows)]

    def _count(
        self, rows: Sequence[ScoringRow], sequences: Sequence[TokenSequence], packed: float
    ) -> None:
        plain = [sequence for row, sequence in zip(rows, sequences, strict=True) if row.is_plain]
        alone = (
            describe(pack(plain, self._backend.packing), plain)["packed_tokens"] if plain else 0.0
        )
        self.row_tokens += sum(len(row.ids) for row in rows if not row.is_plain)
        self.packed_tokens += packed - alone
        self.plain_tokens += alone


class ClientScorer:
    """A ``TokenScorer`` over an engine that gives log-probabilities of a prompt
    (``InferenceClient.logprobs``)."""

    def __init__(self, client: Any) -> None:
        if not callable(getattr(client, "logprobs", None)):
            raise ConfigError(
                f"{client.name} gives no log-probabilities of prompts: it cannot be a teacher"
            )
        self._client = client
        self.busy_s = self.row_tokens = self.packed_tokens = self.plain_tokens = 0.0

    async def score(self, rows: Sequence[ScoringRow], *, top: int = 0) -> list[TokenScores]:
        if top or any(row.candidates for row in rows):
            raise RamifyError(
                f"{self._client.name} gives log-probabilities of the tokens themselves alone: set "
                "teacher.top=null"
            )
        return list(await asyncio.gather(*(self._one(row) for row in rows)))

    async def _one(self, row: ScoringRow) -> TokenScores:
        if row.temperature != 1:
            raise RamifyError(
                f"{self._client.name} scores at temperature 1, and these were sampled at "
                f"{row.temperature:g}"
            )
        started = time.perf_counter()
        found = await self._client.logprobs(list(row.ids))
        self.busy_s += time.perf_counter() - started
        self.row_tokens += len(row.ids)
        self.packed_tokens += len(row.ids)
        if len(found) != len(row.ids) - 1:
            raise RamifyError(
                f"{self._client.name} gave {len(found)} log-probabilities for {len(row.ids)} "
                "tokens, not one less"
            )
        values = [found[index - 1] for start, end in row.spans for index in range(start, end)]
        if any(value is None or not math.isfinite(value) or value > 1e-3 for value in values):
            raise RamifyError(
                f"{self._client.name} gave a log-probability that is none; nothing is put in its "
                "place"
            )
        return TokenScores([float(value) for value in values])


def _sequence(row: ScoringRow, index: int) -> TokenSequence:
    num = len(row.ids)
    zeros, weights = np.zeros(num, np.float32), np.zeros(num, np.float32)
    for start, end in row.spans:
        weights[start:end] = 1
    if num and weights[0]:
        raise ValueError("the first token of a path has no log-probability: nothing predicts it")
    streams = {}
    if row.candidates:
        wide = np.zeros((num, len(row.candidates[0])), np.float32)
        wide[weights > 0] = np.asarray(row.candidates, np.float32)
        streams["teacher_ids"] = wide
    return TokenSequence(
        name=f"teacher/row={index}",
        token_ids=np.asarray(row.ids, np.int64),
        mask=weights > 0,
        sampler_logprobs=zeros,
        advantages=zeros,
        rl=weights,
        streams=streams,
        temperature=row.temperature,
    )


def _scores(row: ScoringRow, logprobs: Any, wide: Mapping[str, Any]) -> TokenScores:
    at = np.concatenate([np.arange(start, end) for start, end in row.spans])
    return TokenScores(
        logprobs[at].tolist(),
        wide["candidates"][at].tolist() if "candidates" in wide else [],
        wide["top_ids"][at].astype(int).tolist() if "top_ids" in wide else [],
        wide["top"][at].tolist() if "top" in wide else [],
    )


def check_vocabulary(policy: Policy, teacher: Policy, name: str) -> None:
    """Raises ConfigError, with the first difference, where the teacher's ids mean something
    else."""
    ours, theirs = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if ours != theirs:
        texts = sorted(
            text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text)
        )
        text = texts[0]
        raise ConfigError(
            f"teacher '{name}' has another vocabulary: {text!r} is token {ours.get(text)} of the "
            "policy and "
            f"{theirs.get(text)} of the teacher ({len(texts)} differ); a teacher scores the "
            "policy's own ids, so both need "
            "one tokenizer"
        )


class RunTeachers:
    """The scorers of one run, made when the first step needs them."""

    def __init__(
        self,
        sources: Mapping[str, float],
        policy: Policy,
        backend_of: Callable[[Policy], SingleBackend],
        out: Path,
        save: Callable[[Path], None],
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        client_of: Callable[[str], Any] | None = None,
        seed: int = 0,
        in_engine: Run | None = None,
        is_copy: bool = False,
    ) -> None:
        """``sources``: name -> decay of the average, for ``ema``. ``policy`` is the one that
        learns; ``weights`` are those that it has now, and ``save`` writes them into a folder.
        ``is_copy``: what learns lies elsewhere, as over ranks, and ``policy`` is what answers.
        ``client_of`` connects an engine by name. ``in_engine`` computes between two steps of the
        engine, where that samples from the very module that learns.

        Raises ConfigError for a checkpoint that is not there, or has another vocabulary."""
        self._sources, self._policy, self._backend_of, self._out = (
            dict(sources),
            policy,
            backend_of,
            out,
        )
        self._save, self._client_of, self._seed, self._in_engine = save, client_of, seed, in_engine
        self._weights, self._is_copy = weights, is_copy
        self._executor = ThreadPoolExecutor(1, "ramify-teacher")
        self._models: dict[str, Any] = {}
        self._scorers: dict[str, Any] = {}
        for name in self._sources:
            if name not in ("reference", "ema", "live", "random") and not name.startswith(
                "client:"
            ):
                self._models[name] = self._other(name)

    async def at(self, step: int) -> Mapping[str, TokenScorer]:
        """The scorers for step ``step`` of the stage, averages brought up to date."""
        if self._sources:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._prepare, step)
        return self._scorers

    def measured(self) -> dict[str, float]:
        """Seconds of computing, tokens of rows and tokens computed, over all scorers and since the
        run began."""
        names = {
            "busy_s": "teacher_s",
            "row_tokens": "teacher_row_tokens",
            "packed_tokens": "teacher_tokens",
            "plain_tokens": "teacher_plain_tokens",
        }
        return {
            shown: float(sum(getattr(each, name) for each in self._scorers.values()))
            for name, shown in names.items()
        }

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def is_kept(self) -> bool:
        """Whether a checkpoint must hold something of them."""
        return "ema" in self._sources

    def save(self, folder: Path) -> None:
        """Write what cannot be made again: the average, as the last step left it."""
        from ramify.models.load import save

        save(self._models["ema"], folder)

    def load(self, folder: Path) -> None:
        """Go on with what ``save`` wrote. Raises ConfigError where there is none."""
        from ramify.models.load import load

        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not there: the checkpoint does not hold the average that the teacher "
                "'ema' is, so this run "
                "cannot go on from it; start anew, or resume from a checkpoint that does"
            )
        self._models["ema"] = load(folder, None, self._policy.device)

    def _prepare(self, step: int) -> None:
        """In the teachers' thread."""
        from ramify.models.weights import load_weights

        for name, decay in self._sources.items():
            if name == "ema" and name in self._models:
                self._average(decay)
            if name not in self._scorers:
                self._scorers[name] = self._made(name, step)
            if name == "live" and self._is_copy:
                load_weights(
                    self._models[name].model, dict(self._weights()), "the policy that is trained"
                )

    def _made(self, name: str, step: int) -> Any:
        if name.startswith("client:"):
            if self._client_of is None:
                raise ConfigError(f"teacher '{name}': there is nothing to connect it with here")
            return ClientScorer(self._client_of(name.removeprefix("client:")))
        policy = self._models.get(name) or self._own(name, step)
        self._models[name] = policy
        backend = self._backend_of(policy)
        run = self._in_engine if name == "live" and self._in_engine is not None else self._in_own
        return PolicyScorer(backend, policy.window, policy.config.vocab_size, run)

    async def _in_own(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _own(self, name: str, step: int) -> Policy:
        """The policy as it is, or a copy of it."""
        from ramify.models.load import from_config, load

        policy = self._policy
        if name == "live" and not self._is_copy:
            return policy
        if name == "random":
            return from_config(
                policy.config, policy.tokenizer, self._seed + 1, device=policy.device
            )
        if name != REFERENCE:
            folder = self._out / f"teacher-{name}.tmp"
            self._save(folder)
            copy = load(folder, policy.dtype, policy.device)
            shutil.rmtree(folder)
            return copy
        folder = self._out / REFERENCE
        if not step:
            self._save(folder)
        elif not folder.is_dir():
            raise ConfigError(
                f"{folder} is not there: it is the policy that rollouts began with, which the "
                "teacher 'reference' is; copy it "
                "from the run that the checkpoint is of"
            )
        return load(folder, policy.dtype, policy.device)

    def _other(self, name: str) -> Policy:
        from ramify.models.load import load

        teacher = load(name, self._policy.dtype, self._policy.device)
        check_vocabulary(self._policy, teacher, name)
        return teacher

    def _average(self, decay: float) -> None:
        """w ← (1 − decay) w + decay · policy"""
        import torch

        theirs = dict(self._models["ema"].model.named_parameters())
        with torch.no_grad():
            for name, weight in self._weights():
                theirs[name].lerp_(weight.to(theirs[name].device, theirs[name].dtype), decay)
