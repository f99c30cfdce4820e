"""Training one model over ranks: which rank computes what.

    batches of a step ── dealt, longest first ──> group 0  group 1  …   each: forward, backward
    metrics, log-probabilities               <──  group 0  group 1  …

A group is the ranks that split a layer together (``compute.shard.tensor``); its first rank answers.
Not here: creating models over ranks, and their weights (``fsdp.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.train.backends import shards
from ramify.train.backends.base import OptimizerSpec, ShardSpec
from ramify.train.backends.mesh import MeshSizes
from ramify.train.backends.rank import dealt, idle
from ramify.train.backends.single import check_window
from ramify.train.data.pack import PackingSpec
from ramify.train.losses import loss as losses
from ramify.train.losses.loss import LossSpec, LossTally
from ramify.types.sequence import Batch, Floats

if TYPE_CHECKING:
    from ramify.train.backends.fsdp import FsdpModel

_STATE = "trainer.pt"


def check_optimizer(optim: OptimizerSpec, shard: ShardSpec) -> None:
    """Raise ConfigError if ``optim`` cannot step a model with this mesh."""
    if optim.kind == "muon" and shard.tensor > 1:
        raise ConfigError(
            f"optim.kind=muon needs the whole columns of a matrix on a rank, but "
            f"compute.shard.tensor={shard.tensor} splits them: use optim.kind=adamw, or tensor=1"
        )


class FsdpBackend:
    """Implements ``Backend`` over ranks."""

    def __init__(self, model: FsdpModel, optim: OptimizerSpec, critic: bool = False) -> None:
        self._model = model
        check_optimizer(optim, model.compute.shard)
        self._optim = optim
        self._critic = critic
        self._call("stage", optim, critic)
        self._steps = 0

    @property
    def packing(self) -> PackingSpec:
        packing: PackingSpec = self._own.packing
        return msgspec.structs.replace(packing, multiple=self._mesh.num_batches)

    @property
    def version(self) -> int:
        return self._steps

    def forward_backward(self, batches: Many[Batch], loss: LossSpec) -> dict[str, float]:
        if loss.is_over_sequences:
            losses.check_whole(batches)
        if losses.chooses(loss) and batches:
            batches = losses.choose(batches, loss, self.logprobs(batches))
        tally = LossTally()
        if batches:
            _, each = self._shares(batches)
            formula = loss.stored()
            measured = self._call("add", each=[(part, formula, idle(batches[0])) for part in each])
            for one in measured[:: self._mesh.tensor]:
                tally.merge(one)
        return tally.metrics()

    def optim_step(self) -> dict[str, float]:
        try:
            metrics: dict[str, float] = self._call("optim_step")[0]
        finally:
            self._steps = self._own.version
        return metrics

    def check_gradient(self) -> None:
        self._call("check_gradient")

    def clear_gradient(self) -> None:
        self._call("clear_gradient")

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        return self.of(batches, base=False)

    def base(self) -> ShardedReference:
        """The model without its adapters, as a reference."""
        return ShardedReference(self)

    def values(self, batches: Many[Batch]) -> list[Floats]:
        if not self._critic:
            raise ConfigError("this backend has no critic: create it with one, as rl.critic does")
        return self._collect("values", batches)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, copy of the full tensor); each is gathered when it is requested."""
        return self._model.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_weights(weights)

    def save(self, folder: Path) -> Callable[[], None] | None:
        folder.mkdir(parents=True, exist_ok=True)
        is_async = self._model.compute.shard.save_async
        random = self._call("save", str(folder.resolve()), is_async)
        state = {
            "num_steps": self._steps,
            "optim": msgspec.json.encode(self._optim).decode(),
            "random": [tuple(each) for each in random],
        }
        torch.save(state, folder / _STATE)
        if is_async:
            wait: Callable[[], None] = self._model.ranks.own.saving.wait
            return wait
        self._model.ranks.rank_group.call("wait")
        return None

    def load(self, folder: Path) -> None:
        """Like ``Backend.load``. Bit by bit if the number of ranks is the same; otherwise sums are
        rounded differently."""
        try:
            state = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no state of ranks: {_STATE} is missing") from None
        there, here = msgspec.json.decode(state["optim"]), self._optim.kind
        packed = self._model.ranks.own.model(self._model.key).sharded.packed
        weights, optimizers = self._own.trained
        shards.check(folder, shards.ShardedState(weights, optimizers, packed))
        if there["kind"] != here:
            raise ConfigError(
                f"{folder} is from another optimizer: optim.kind is {there['kind']} there and "
                f"{here} here"
            )
        random = [shards.RandomState(*each) for each in state["random"]]
        self._call("load", str(folder.resolve()), state["num_steps"], random)
        self._steps = state["num_steps"]

    def of(self, batches: Many[Batch], base: bool) -> list[Floats]:
        """``logprobs``; with ``base`` those of the model without its adapters."""
        return self._collect("logprobs", batches, base)

    def _collect(self, verb: str, batches: Many[Batch], *options: Any) -> list[Floats]:
        """The ranks' results for each batch, in the order of ``batches``."""
        if not batches:
            return []
        shares, each = self._shares(batches)
        by_index: dict[int, Floats] = {}
        values = self._call(verb, each=[(part, idle(batches[0]), *options) for part in each])
        for share, columns in zip(shares, values[:: self._mesh.tensor], strict=True):
            by_index |= zip(share, columns, strict=True)
        return [by_index[index] for index in range(len(batches))]

    def _shares(self, batches: Many[Batch]) -> tuple[list[list[int]], list[list[Batch | None]]]:
        """(``tensor`` group -> indices of its batches, rank -> these batches, padded with None to
        the longest list)"""
        for batch in batches:
            check_window(batch, self._model.policy.window)
        shares = dealt(batches, self._mesh.num_batches)
        rounds = max(map(len, shares))
        return shares, [
            [batches[index] for index in each] + [None] * (rounds - len(each))
            for each in shares
            for _ in range(self._mesh.tensor)
        ]

    @property
    def _own(self) -> Any:
        return self._model.ranks.own.of(self._model.key)

    @property
    def _mesh(self) -> MeshSizes:
        return self._model.compute.shard.mesh(self._model.ranks.rank_group.size)

    def _call(
        self, verb: str, *shared: Any, each: Many[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        return self._model.ranks.rank_group.call(verb, self._model.key, *shared, each=each)


class ShardedReference:
    """The model without its adapters, as a reference; implements ``ReferenceModel``."""

    def __init__(self, trained: FsdpBackend) -> None:
        self._trained = trained

    @property
    def packing(self) -> PackingSpec:
        return self._trained.packing

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        return self._trained.of(batches, base=True)
