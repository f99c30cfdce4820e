"""What a run does with each policy that it trains: from the data of a step to newer weights.

    prepare    compute the streams that the rows need: old, reference, values
    learn      pack ─ forward_backward ─ optim_step, for each minibatch
    save       its backend and its policy, as parts of a checkpoint

A run has one learner for ``Run.policy`` and one for each of ``Run.policies``. All functions but
``paths`` are called in the training thread. Not here: their order (``trainer.py``), and when
engines have the weights (``publisher.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ramify.errors import TrainError
from ramify.models import checksums
from ramify.train.backends.base import Backend, ReferenceModel
from ramify.train.checkpoint import Write
from ramify.train.data.pack import attach, describe, pack
from ramify.train.depth_models import own_calls
from ramify.train.publisher import Publisher
from ramify.train.signals.scorer import REFERENCE
from ramify.train.stages import Minibatch, StepData, TrainingStage
from ramify.types.sequence import Batch, Floats, TokenSequence
from ramify.types.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Iterable[tuple[str, Tensor]]


class PolicyPaths(NamedTuple):
    """Where a run's folder and its checkpoints hold a policy."""

    policy: str
    backend: str
    reference: str
    """The policy that rollouts began with."""


def paths_of(name: str) -> PolicyPaths:
    """``name``: that of the policy in ``Run.policies``; empty for ``Run.policy``."""
    if not name:
        return PolicyPaths("policy", "backend", REFERENCE)
    return PolicyPaths(f"policies/{name}", f"backends/{name}", f"{REFERENCE}-{name}")


class Learner:
    """One policy that learns."""

    def __init__(
        self,
        publisher: Publisher,
        backend_of: Callable[[TrainingStage], Backend],
        *,
        reference_of: Callable[[Path], ReferenceModel] | None = None,
        source: Callable[[], Weights] | None = None,
        model: str = "",
    ) -> None:
        """``reference_of`` loads a saved policy as the reference of a KL. ``source`` returns the
        weights that a policy begins with which is a copy of another. ``model``: the name under
        which it answers calls; empty if it answers all that are trained."""
        self.publisher = publisher
        self.paths = paths_of(publisher.name)
        self._backend_of = backend_of
        self._reference_of = reference_of
        self._reference: ReferenceModel | None = None
        self._source = source
        self._model = model

    @property
    def name(self) -> str:
        return self.publisher.name

    def own(self, groups: Sequence[Group]) -> Sequence[Group]:
        """``groups`` with the token ids of this policy's calls only."""
        return own_calls(groups, self._model) if self._model else groups

    def measured(self, values: Mapping[str, float]) -> dict[str, float]:
        """``values`` under the names of this policy's metrics."""
        prefix = f"policy.{self.name}/" if self.name else ""
        return {prefix + name: each for name, each in values.items()}

    def begin(self, stage: TrainingStage) -> None:
        """Begin ``stage``, with a new optimizer."""
        backend = self._backend_of(stage)
        if self._source is not None:
            backend.load_weights(dict(self._source()))
        self.publisher.backend = backend

    def restore(self, stage: TrainingStage, checkpoint: Path, *, is_open: bool) -> None:
        """Restore the weights, and the optimizer if the stage continues (``is_open``)."""
        backend = self._backend_of(stage)
        backend.load(checkpoint / self.paths.backend)
        if is_open:
            self.publisher.backend = backend

    def save_policy(self, folder: Path) -> None:
        """Save the current policy with checksums, which are verified when it is loaded."""
        checksums.drop(folder)
        self.publisher.policy.save(folder)
        checksums.write(folder)

    def parts(self) -> dict[str, Write]:
        """What a checkpoint holds of this policy."""
        assert self.publisher.backend is not None
        return {
            self.paths.backend: self.publisher.backend.save,
            self.paths.policy: self.publisher.policy.save,
        }

    def load_reference(self, out: Path, *, is_new: bool) -> None:
        """Load the policy that rollouts began with, saved next to the checkpoints; ``is_new``:
        save it first, since they begin now."""
        folder = out / self.paths.reference
        if is_new:
            self.save_policy(folder)
        elif not folder.is_dir():
            raise TrainError(
                f"{folder} is missing: it is the policy that rollouts began with, the reference "
                "of the run's KL; copy it from the run that wrote the checkpoint"
            )
        checksums.check(folder)
        if self._reference_of is None:
            raise TrainError(
                "the run has a KL to a reference policy, but no reference_of to load it with"
            )
        self._reference = self._reference_of(folder)

    def prepare(self, stage: TrainingStage, work: StepData) -> dict[str, float]:
        """Compute the streams that the rows of a step need before its first minibatch."""
        backend = self.publisher.backend
        assert backend is not None
        rows = [row for part in work.parts for row in part.rows]
        if "staleness" in stage.streams:
            self._attach_staleness(rows)
        if "ref_logprobs" in stage.streams:
            assert self._reference is not None
            # A signal may have computed some of them.
            missing = [row for row in rows if "ref_logprobs" not in row.streams]
            if missing:
                _attach(missing, self._reference, "ref_logprobs", self._reference.logprobs)
        if "old_logprobs" in stage.streams:
            _attach(rows, backend, "old_logprobs", backend.logprobs)
        if "values" in stage.streams:
            _attach(rows, backend, "values", backend.values)
        return stage.finish(rows)

    def _attach_staleness(self, rows: Sequence[TokenSequence]) -> None:
        """Attach the stream ``staleness``: how many versions the sampling policy lags behind the
        trained one, per token."""
        for row in rows:
            if row.versions is not None:
                row.streams["staleness"] = np.where(
                    row.versions >= 0, self.publisher.policy.version - row.versions, 0
                ).astype(np.float32)

    def learn(self, stage: TrainingStage, part: Minibatch) -> dict[str, float]:
        """One optimizer step."""
        backend = self.publisher.backend
        assert backend is not None
        whole_calls = stage.loss.is_over_sequences
        batches = pack(part.rows, backend.packing, part.denominators, whole_calls=whole_calls)
        if self.publisher.check is not None:
            self.publisher.check.weights(part.rows, batches)
        measured = backend.forward_backward(batches, stage.loss)
        measured |= backend.optim_step()
        self.publisher.learned()
        return {**measured, **describe(batches, part.rows)}


def own_parts(
    learners: Sequence[Learner], stage: TrainingStage, work: StepData
) -> Iterator[tuple[Learner, TrainingStage, StepData]]:
    """Each policy that learns in ``stage``, with its part of the stage and of the step's data."""
    for learner in learners:
        if not learner.name:
            yield learner, stage, work
        elif learner.name in work.others:
            yield learner, stage.others[learner.name], work.others[learner.name]


def _attach(
    rows: Sequence[TokenSequence],
    backend: ReferenceModel,
    name: str,
    ask: Callable[[Sequence[Batch]], Sequence[Floats]],
) -> None:
    """Attach the stream ``name`` to ``rows``, by applying ``ask`` to batches packed for
    ``backend``."""
    batches = pack(rows, backend.packing)
    attach(rows, batches, name, ask(batches))


def over_parts(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's optimizer steps: sums of counts, and means of the rest over
    those that have a number. The mismatch of trainer and sampler is that of the first optimizer
    step, since it moves the weights."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in measured for name in part):
        values = [part[name] for part in measured if name in part]
        if name in ("batches", "packed_tokens", "row_tokens"):
            combined[name] = sum(values)
        elif not name.startswith("mismatch"):
            combined[name] = sum(values) / len(values)
        elif name in measured[0]:
            combined[name] = measured[0][name]
    return combined
