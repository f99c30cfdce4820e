"""Score tokens with teachers: compute log-probabilities of given tokens with the same forward pass
that trains the policy.

    rows of several groups ── wait while a pass runs ── pack (shared prefixes once)
                           ── trunk, head ──> scores per row

A row is one token sequence to score. The rows of a group share their prompt up to the position at
which a hint was inserted. They are packed as in training, so each shared prefix is computed only
once. A single thread computes, so passes do not compete. Rows that arrive during a pass are scored
in the next one. Each row is scored at the temperature at which it was sampled.

This file also decides where the weights of teachers come from (``TeacherModels``) and which
teachers a checkpoint must hold. It rejects a teacher with a different vocabulary before any compute
is spent.

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
from ramify.train.data.pack import pack, packing_statistics
from ramify.train.signals.base import TokenScorer, TokenScores, TokenScoringRequest
from ramify.types.training_sequences import TokenSequence

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.models.load import Policy
    from ramify.train.backends.single_device import SingleBackend

Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function in a particular thread and returns its result."""
REFERENCE = "reference"
"""Subfolder of a run that holds its initial policy."""
CHUNK = 64
"""Maximum number of sequences per pass, so that a large group does not delay others."""


class LocalTokenScorer:
    """A token scorer that uses a model loaded in this process.

    Implements ``TokenScorer``.
    """

    def __init__(self, backend: SingleBackend, window: int, num_ids: int, run: Run) -> None:
        """Create a scorer for the model of ``backend``.

        ``window`` is the maximum sequence length in tokens, and ``num_ids`` the size of the
        vocabulary. ``run`` executes a function in the model's thread.
        """
        self._backend = backend
        self._window = window
        self._num_ids = num_ids
        self._in_thread = run
        self._waiting: list[tuple[TokenScoringRequest, int, asyncio.Future[TokenScores]]] = []
        self._running: asyncio.Task[None] | None = None
        self.busy_s = 0.0
        """Total compute time in seconds."""
        self.row_tokens = 0.0
        """Tokens of all scored sequences, except plain ones, which training would score anyway."""
        self.packed_tokens = 0.0
        """Tokens actually computed for the sequences counted in ``row_tokens``: a shared prefix
        counts once, and tokens of plain sequences are not counted.
        """
        self.plain_tokens = 0.0
        """Tokens computed for plain sequences, whose scores save training the same pass."""

    async def score(
        self, rows: Sequence[TokenScoringRequest], *, top: int = 0
    ) -> list[TokenScores]:
        for row in rows:
            if len(row.ids) > self._window:
                raise RamifyError(
                    f"a row of {len(row.ids)} tokens does not fit the teacher's window of "
                    f"{self._window} tokens"
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
        await asyncio.sleep(0)  # let requests of the same moment share one pass
        while self._waiting:
            chunk, self._waiting = self._waiting[:CHUNK], self._waiting[CHUNK:]
            # Sequences of one pass must have results of the same shape.
            by_top: dict[
                tuple[int, int], list[tuple[TokenScoringRequest, asyncio.Future[TokenScores]]]
            ] = {}
            for row, top, future in chunk:
                width = len(row.candidates[0]) if row.candidates else 0
                by_top.setdefault((top, width), []).append((row, future))
            for (top, _), together in by_top.items():
                await self._run_pass(
                    [row for row, _ in together], top, [future for _, future in together]
                )

    async def _run_pass(
        self, rows: list[TokenScoringRequest], top: int, futures: list[asyncio.Future[TokenScores]]
    ) -> None:
        try:
            results = await self._in_thread(lambda: self.compute(rows, top))
        except Exception as error:  # noqa: BLE001 -- passed on to those who await the scores
            failure = (
                error
                if isinstance(error, RamifyError)
                else TrainError(f"the teacher failed: {error!r}")
            )
            for future in futures:
                if not future.done():
                    future.set_exception(failure)
            return
        for future, scores in zip(futures, results, strict=True):
            if not future.done():
                future.set_result(scores)

    def compute(self, rows: Sequence[TokenScoringRequest], top: int = 0) -> list[TokenScores]:
        """Score the given sequences immediately, in the current thread."""
        started = time.perf_counter()
        sequences = [_sequence(row, index) for index, row in enumerate(rows)]
        batches = pack(sequences, self._backend.packing)
        self._count(rows, sequences, packing_statistics(batches, sequences)["packed_tokens"])
        logprobs = [np.zeros(len(sequence), np.float64) for sequence in sequences]
        columns: list[dict[str, Any]] = [{} for _ in sequences]
        for batch, scores in zip(batches, self._backend.top_logprobs(batches, top), strict=True):
            for index in batch.sequences:
                is_own = batch.owners[:, 0] == index
                places = batch.owners[is_own, 1]
                logprobs[index][places] = scores["logprobs"][is_own]
                for name in scores.keys() - {"logprobs"}:
                    column = columns[index].setdefault(
                        name, np.zeros((len(sequences[index]), scores[name].shape[1]))
                    )
                    column[places] = scores[name][is_own]
        self.busy_s += time.perf_counter() - started
        return [_scores(row, logprobs[index], columns[index]) for index, row in enumerate(rows)]

    def _count(
        self, rows: Sequence[TokenScoringRequest], sequences: Sequence[TokenSequence], packed: float
    ) -> None:
        plain = [sequence for row, sequence in zip(rows, sequences, strict=True) if row.is_plain]
        num_plain = (
            packing_statistics(pack(plain, self._backend.packing), plain)["packed_tokens"]
            if plain
            else 0.0
        )
        self.row_tokens += sum(len(row.ids) for row in rows if not row.is_plain)
        self.packed_tokens += packed - num_plain
        self.plain_tokens += num_plain


class EngineLogprobScorer:
    """A token scorer that asks an inference engine for log-probabilities of prompts.

    It calls ``UpdatableInferenceClient.logprobs``. Implements ``TokenScorer``.
    """

    def __init__(self, client: Any) -> None:
        if not callable(getattr(client, "logprobs", None)):
            raise ConfigError(
                f"{client.name} returns no log-probabilities of prompts, so it cannot be a teacher"
            )
        self._client = client
        self.busy_s = self.row_tokens = self.packed_tokens = self.plain_tokens = 0.0

    async def score(
        self, rows: Sequence[TokenScoringRequest], *, top: int = 0
    ) -> list[TokenScores]:
        if top or any(row.candidates for row in rows):
            raise RamifyError(
                f"{self._client.name} returns log-probabilities of the given tokens only: set "
                "teacher.top=null"
            )
        return list(await asyncio.gather(*(self._score_row(row) for row in rows)))

    async def _score_row(self, row: TokenScoringRequest) -> TokenScores:
        if row.temperature != 1:
            raise RamifyError(
                f"{self._client.name} scores at temperature 1, but these tokens were sampled at "
                f"{row.temperature:g}"
            )
        started = time.perf_counter()
        logprobs = await self._client.logprobs(list(row.ids))
        self.busy_s += time.perf_counter() - started
        self.row_tokens += len(row.ids)
        self.packed_tokens += len(row.ids)
        if len(logprobs) != len(row.ids) - 1:
            raise RamifyError(
                f"{self._client.name} returned {len(logprobs)} log-probabilities for "
                f"{len(row.ids)} tokens, instead of one fewer than tokens"
            )
        values = [logprobs[index - 1] for start, end in row.spans for index in range(start, end)]
        if any(value is None or not math.isfinite(value) or value > 1e-3 for value in values):
            raise RamifyError(
                f"{self._client.name} returned an invalid log-probability: it must be finite and "
                "at most 0"
            )
        return TokenScores([float(value) for value in values])


def _sequence(row: TokenScoringRequest, index: int) -> TokenSequence:
    num = len(row.ids)
    zeros, weights = np.zeros(num, np.float32), np.zeros(num, np.float32)
    for start, end in row.spans:
        weights[start:end] = 1
    if num and weights[0]:
        raise ValueError("the first token of a path has no log-probability: nothing predicts it")
    streams = {}
    if row.candidates:
        candidates = np.zeros((num, len(row.candidates[0])), np.float32)
        candidates[weights > 0] = np.asarray(row.candidates, np.float32)
        streams["teacher_ids"] = candidates
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


def _scores(row: TokenScoringRequest, logprobs: Any, columns: Mapping[str, Any]) -> TokenScores:
    at = np.concatenate([np.arange(start, end) for start, end in row.spans])
    return TokenScores(
        logprobs[at].tolist(),
        columns["candidates"][at].tolist() if "candidates" in columns else [],
        columns["top_ids"][at].astype(int).tolist() if "top_ids" in columns else [],
        columns["top"][at].tolist() if "top" in columns else [],
    )


def check_vocabulary(policy: Policy, teacher: Policy, name: str) -> None:
    """Raise ConfigError if a teacher's vocabulary differs from the policy's, since the same token
    ids would then mean different tokens.

    The error shows the first difference.
    """
    policy_ids = policy.tokenizer.get_vocab()
    teacher_ids = teacher.tokenizer.get_vocab()
    if policy_ids != teacher_ids:
        texts = sorted(
            text
            for text in policy_ids.keys() | teacher_ids.keys()
            if policy_ids.get(text) != teacher_ids.get(text)
        )
        text = texts[0]
        raise ConfigError(
            f"teacher '{name}' has another vocabulary: {text!r} is token {policy_ids.get(text)} of "
            f"the policy and {teacher_ids.get(text)} of the teacher ({len(texts)} differ); a "
            "teacher scores the policy's own ids, so both need one tokenizer"
        )


class TeacherModels:
    """The teachers of one run, which are models that score the policy's tokens.

    Their weights are loaded when a step first needs them, and then kept up to date.
    """

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
        """Prepare the teacher models of a training run.

        Teachers that are checkpoints are loaded now, and all others at first use.

        ``sources`` maps the name of each teacher to a decay of its moving average, which only the
        teacher ``ema`` uses. ``policy`` is the policy being trained; ``weights`` yields its
        current weights, and ``save`` writes them to a folder. ``is_copy`` is True if the trained
        weights are elsewhere, as in a sharded run, and ``policy`` is a copy that only samples.
        ``client_of`` connects to an engine by name. ``in_engine`` runs a function between two
        engine steps, if the engine samples from the very module that is trained. Raises
        ConfigError for a checkpoint that does not exist or has another vocabulary.
        """
        self._sources = dict(sources)
        self._policy = policy
        self._backend_of = backend_of
        self._out = out
        self._save = save
        self._client_of = client_of
        self._seed = seed
        self._in_engine = in_engine
        self._weights = weights
        self._is_copy = is_copy
        self._executor = ThreadPoolExecutor(1, "ramify-teacher")
        self.models: dict[str, Any] = {}
        self._scorers: dict[str, Any] = {}
        for name in self._sources:
            if name not in ("reference", "ema", "live", "random") and not name.startswith(
                "client:"
            ):
                self.models[name] = self._from_checkpoint(name)

    async def teachers_at_step(self, step: int) -> Mapping[str, TokenScorer]:
        """Return the teachers for one training step of the current stage, by teacher name.

        A teacher that is a moving average of the policy's weights is updated first.
        """
        if self._sources:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._prepare, step)
        return self._scorers

    def metrics(self) -> dict[str, float]:
        """Return metrics of all teachers since the run began: compute time and token counts.

        The time is in seconds; the tokens are those to score and those actually computed.
        """
        names = {
            "busy_s": "teacher_s",
            "row_tokens": "teacher_row_tokens",
            "packed_tokens": "teacher_tokens",
            "plain_tokens": "teacher_plain_tokens",
        }
        return {
            shown: float(sum(getattr(scorer, name) for scorer in self._scorers.values()))
            for name, shown in names.items()
        }

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    @property
    def has_state(self) -> bool:
        """True if a checkpoint must store the teachers' state.

        Only a moving average of weights needs this, because it cannot be recomputed.
        """
        return "ema" in self._sources

    def save(self, folder: Path) -> None:
        """Write the moving average of the policy's weights to ``folder``.

        All other state of teachers can be recomputed.
        """
        from ramify.models.load import save_policy

        save_policy(self.models["ema"], folder)

    def load(self, folder: Path) -> None:
        """Restore the moving average of the weights from ``folder``.

        Raises ConfigError if the folder does not exist.
        """
        from ramify.models.load import load_policy

        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not there: the checkpoint does not hold the averaged weights of the "
                "teacher 'ema', so this run cannot be resumed from it; start a new run, or resume "
                "from a checkpoint that holds them"
            )
        self.models["ema"] = load_policy(folder, None, self._policy.device)

    def _prepare(self, step: int) -> None:
        """Prepare the teachers for a step: update the moving average and create missing teachers.

        Runs in the teachers' thread.
        """
        from ramify.models.weights import load_weights

        for name, decay in self._sources.items():
            if name == "ema" and name in self.models:
                self._average(decay)
            if name not in self._scorers:
                self._scorers[name] = self._scorer(name, step)
            if name == "live" and self._is_copy:
                load_weights(
                    self.models[name].model, dict(self._weights()), "the policy that is trained"
                )

    def _scorer(self, name: str, step: int) -> Any:
        if name.startswith("client:"):
            if self._client_of is None:
                raise ConfigError(f"teacher '{name}': this run has no clients for models")
            return EngineLogprobScorer(self._client_of(name.removeprefix("client:")))
        policy = self.models.get(name) or self._policy_for(name, step)
        self.models[name] = policy
        backend = self._backend_of(policy)
        run = (
            self._in_engine
            if name == "live" and self._in_engine is not None
            else self._in_teacher_thread
        )
        return LocalTokenScorer(backend, policy.window, policy.config.vocab_size, run)

    async def _in_teacher_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _policy_for(self, name: str, step: int) -> Policy:
        """Return the policy that serves as the teacher called ``name``.

        This is the current policy or a copy of it, the run's initial policy (``reference``), or an
        untrained model (``random``). Raises ConfigError if the initial policy is needed and its
        folder is missing.
        """
        from ramify.models.load import from_config, load_policy

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
            copy = load_policy(folder, policy.dtype, policy.device)
            shutil.rmtree(folder)
            return copy
        folder = self._out / REFERENCE
        if not step:
            self._save(folder)
        elif not folder.is_dir():
            raise ConfigError(
                f"{folder} is not there: it holds the initial policy of the run, which is the "
                "teacher 'reference'; copy it from the run that wrote the checkpoint"
            )
        return load_policy(folder, policy.dtype, policy.device)

    def _from_checkpoint(self, name: str) -> Policy:
        from ramify.models.load import load_policy

        teacher = load_policy(name, self._policy.dtype, self._policy.device)
        check_vocabulary(self._policy, teacher, name)
        return teacher

    def _average(self, decay: float) -> None:
        """Update the moving average of the weights: w ← (1 − decay) w + decay · policy."""
        import torch

        averages = dict(self.models["ema"].model.named_parameters())
        with torch.no_grad():
            for name, weight in self._weights():
                average = averages[name]
                average.lerp_(weight.to(average.device, average.dtype), decay)
