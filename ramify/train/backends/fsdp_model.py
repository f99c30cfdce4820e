"""Train a model that is sharded over several processes (ranks).

Rank 0 uses this module to access the full weights and to distribute batches over the ranks.

    weights, unmerged, export   one tensor at a time, gathered from all ranks
    load_weights                one tensor at a time, to the ranks that hold parts of it

    batches of a step ── dealt, longest first ──> group 0  group 1  …   each: forward, backward
    metrics, log-probabilities               <──  group 0  group 1  …

A command is sent to all ranks, with each rank's batches. A group is the ranks that split a layer
together (``compute.shard.tensor``); its first rank answers. Ranks are started by ``fsdp.py``,
weights are sharded by ``sharding.py``, and ``rank.py`` has what a rank does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Union

import msgspec
import torch
from torch import Tensor, nn

from ramify.actors.rank_group import RankGroup
from ramify.errors import ConfigError
from ramify.inference.weight_sync.base import LazyFrozenWeight, LoraAdaptedMatrix
from ramify.models.load import Policy
from ramify.models.stored_weights import stored_tensors
from ramify.models.weights import check_weights
from ramify.train.backends import launch, sharded_checkpoint, sharded_lora
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.mesh import DeviceMeshSizes
from ramify.train.backends.meta_model import build_meta_model
from ramify.train.backends.rank import (
    ModelConfigText,
    ShardedModelSpec,
    distribute_batches,
    idle_batch,
    is_of_critic,
)
from ramify.train.backends.safetensors_export import export_model
from ramify.train.backends.sharded_lora import AdapterSpec
from ramify.train.backends.single_device import check_context_window
from ramify.train.data.pack import PackingSpec
from ramify.train.losses import total_loss as losses
from ramify.train.losses.total_loss import LossSpec, LossTally
from ramify.types.training_sequences import Batch, Floats

_STATE = "trainer.pt"
_AT_ONCE = 16 << 20
"""Maximum total size, in bytes, of tensors that are gathered or sent together. A larger tensor is
handled alone.
"""
Source = Union[Path, Mapping[str, Tensor], "FsdpModel"]
"""Source of a model's weights: a folder that all ranks can read, tensors of this process, or
another model over the same mesh."""


def check_optimizer(optim: OptimizerSpec, shard: FsdpSpec) -> None:
    """Raise ConfigError if the optimizer cannot update a model sharded according to ``shard``.

    Muon does not work with tensor parallelism.
    """
    if optim.kind == "muon" and shard.tensor > 1:
        raise ConfigError(
            "optim.kind=muon needs whole matrix columns on each rank, but "
            f"compute.shard.tensor={shard.tensor} splits them: use optim.kind=adamw, or tensor=1"
        )


class FsdpBackend:
    """A training backend that distributes its batches over several processes (ranks)."""

    def __init__(self, model: FsdpModel, optim: OptimizerSpec, critic: bool = False) -> None:
        self._model = model
        check_optimizer(optim, model.compute.shard)
        self._optim = optim
        self._critic = critic
        self._call("begin_stage", optim, critic)
        self._steps = 0

    @property
    def packing(self) -> PackingSpec:
        packing: PackingSpec = self._own_backend.packing
        return msgspec.structs.replace(packing, multiple=self._mesh.num_batches)

    @property
    def version(self) -> int:
        return self._steps

    def forward_backward(self, batches: Many[Batch], loss: LossSpec) -> dict[str, float]:
        if loss.is_over_sequences:
            losses.check_sequences_unsplit(batches, loss.sequence)
        if losses.selects_tokens(loss) and batches:
            batches = losses.mark_selected_tokens(batches, loss, self.logprobs(batches))
        tally = LossTally()
        if batches:
            _, each = self._divide_batches(batches)
            formula = loss.stored()
            measured = self._call(
                "accumulate_gradient",
                each=[(part, formula, idle_batch(batches[0])) for part in each],
            )
            for one in measured[:: self._mesh.tensor]:
                tally.merge(one)
        return tally.metrics()

    def optim_step(self) -> dict[str, float]:
        try:
            metrics: dict[str, float] = self._call("optim_step")[0]
        finally:
            # Also after an error: this rank may have made the step before another one was lost.
            self._steps = self._own_backend.version
        return metrics

    def check_gradient(self) -> None:
        self._call("check_gradient")

    def clear_gradient(self) -> None:
        self._call("clear_gradient")

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        return self.loss_token_logprobs(batches, base=False)

    def base_reference(self) -> ShardedReference:
        """Return the model without its adapters, for use as a frozen reference model."""
        return ShardedReference(self)

    def values(self, batches: Many[Batch]) -> list[Floats]:
        if not self._critic:
            raise ConfigError("this backend has no critic: create it with one, as rl.critic does")
        return self._run_on_ranks("values", batches)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and a copy of each full tensor.

        A tensor is gathered from the ranks only when the caller asks for it.
        """
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
            # Rank 0's write ends after those of all ranks, so the others need not be asked.
            wait: Callable[[], None] = self._model.own.pending_write.wait
            return wait
        self._model.rank_group.call("wait")
        return None

    def load(self, folder: Path) -> None:
        """Restore the training state saved in ``folder``.

        With the same number of ranks, training continues bit for bit. With another number, sums are
        rounded differently. Raises ConfigError if the state does not fit this backend.
        """
        try:
            state = torch.load(folder / _STATE, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} holds no sharded training state: {_STATE} is missing"
            ) from None
        there, here = msgspec.json.decode(state["optim"]), self._optim.kind
        packed = self._model.own.model(self._model.key).sharded.packed
        weights, optimizers = self._own_backend.trained_parameters_and_optimizer
        sharded_checkpoint.check_shapes_match(
            folder, sharded_checkpoint.ShardedTrainingState(weights, optimizers, packed)
        )
        if there["kind"] != here:
            raise ConfigError(
                f"{folder} was saved with optim.kind={there['kind']}, but this run has {here}: "
                "use the same"
            )
        random = [sharded_checkpoint.RankRandomStates(*each) for each in state["random"]]
        self._call("load", str(folder.resolve()), state["num_steps"], random)
        self._steps = state["num_steps"]

    def loss_token_logprobs(self, batches: Many[Batch], base: bool) -> list[Floats]:
        """Return the log-probabilities of the tokens that contribute to the loss, as one array per
        batch.

        With ``base``, they are computed without the model's adapters.
        """
        return self._run_on_ranks("logprobs", batches, base)

    def _run_on_ranks(self, verb: str, batches: Many[Batch], *options: Any) -> list[Floats]:
        """Run the method ``verb`` on all ranks, and return its result for each batch.

        Each rank gets its share of the batches. Returns one result per batch, in the order of
        ``batches``.
        """
        if not batches:
            return []
        shares, each = self._divide_batches(batches)
        by_index: dict[int, Floats] = {}
        values = self._call(verb, each=[(part, idle_batch(batches[0]), *options) for part in each])
        for share, columns in zip(shares, values[:: self._mesh.tensor], strict=True):
            by_index |= zip(share, columns, strict=True)
        return [by_index[index] for index in range(len(batches))]

    def _divide_batches(
        self, batches: Many[Batch]
    ) -> tuple[list[list[int]], list[list[Batch | None]]]:
        """Divide a step's batches among the ranks.

        All ranks of a tensor-parallel group get the same batches.

        Returns two lists. The first has the indices of the batches of each group, and the second
        has the batches of each rank, padded with None to the same length.
        """
        for batch in batches:
            check_context_window(batch, self._model.policy.window)
        shares = distribute_batches(batches, self._mesh.num_batches)
        rounds = max(map(len, shares))
        return shares, [
            [batches[index] for index in each] + [None] * (rounds - len(each))
            for each in shares
            for _ in range(self._mesh.tensor)
        ]

    @property
    def _own_backend(self) -> Any:
        return self._model.own.backend_of(self._model.key)

    @property
    def _mesh(self) -> DeviceMeshSizes:
        return self._model.compute.shard.mesh(self._model.rank_group.size)

    def _call(
        self, verb: str, *shared: Any, each: Many[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        return self._model.rank_group.call(verb, self._model.key, *shared, each=each)


class ShardedReference:
    """A frozen reference model: the sharded model that is trained, with its adapters disabled."""

    def __init__(self, trained: FsdpBackend) -> None:
        self._trained = trained

    @property
    def packing(self) -> PackingSpec:
        return self._trained.packing

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        return self._trained.loss_token_logprobs(batches, base=True)


class FsdpModelSpec(NamedTuple):
    """The arguments for creating a model that is sharded over ranks."""

    config: Any
    source: Source
    lora: AdapterSpec | None
    compute: TrainerComputeSpec
    critic: bool
    holds_base: bool


class FsdpModel:
    """One model that is sharded over all ranks.

    This object lives on rank 0 and controls the shards of the other ranks.
    """

    def __init__(
        self, ranks: launch.JoinedRanks, dumps: Path, key: str, parts: FsdpModelSpec
    ) -> None:
        config, source, lora, compute, critic, holds_base = parts
        self.rank_group: RankGroup = ranks.rank_group
        self.own: Any = ranks.rank
        """The ``RankModelWorker`` of this process."""
        self.key = key
        self.config = config
        self.lora = lora
        self.compute = compute
        folder = str(source.resolve()) if isinstance(source, Path) else ""
        self.rank_group.call(
            "make",
            key,
            ShardedModelSpec(
                ModelConfigText.from_config(config),
                compute,
                folder,
                lora,
                str(dumps.resolve()),
                critic,
            ),
        )
        model = self.own.model(key)
        self._shapes: dict[str, torch.Size] = {
            name: each.shape for name, each in model.sharded.parameters.items()
        }
        self._adapted: list[str] = model.names
        self._buffers: dict[str, Tensor] = model.sharded.buffers
        self._named = {*self.shapes, *self._buffers}
        self.policy: Policy = model.policy
        if isinstance(source, FsdpModel):
            self.rank_group.call("copy_weights", key, source.key)
        elif not isinstance(source, Path):
            self._put(source)
        self._own_names = {
            sharded_lora.base_parameter_name(name): name
            for name in self._shapes
            if not sharded_lora.is_adapter(name)
        }
        self._frozen: dict[str, nn.Parameter] = {}
        """Map the name of each adapted weight to its frozen tensor, if this process keeps them."""
        # This is with the engine in this process, so that a sync gathers only adapters.
        if lora is not None and holds_base:
            assert not isinstance(source, FsdpModel)
            initial: Mapping[str, Any] = (
                stored_tensors(source, build_meta_model(config))
                if isinstance(source, Path)
                else source
            )
            self._frozen = {
                # ``[...]`` reads a tensor from disk; a copy, since the policy's own may change.
                name: nn.Parameter(initial[name][...].float().clone(), requires_grad=False)
                for name in self.shapes
            }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Map the name of every parameter of the policy to its shape.

        The names are those of the model without adapters.
        """
        policy = {name: shape for name, shape in self._shapes.items() if not is_of_critic(name)}
        return {
            sharded_lora.base_parameter_name(n): tuple(s)
            for n, s in policy.items()
            if not sharded_lora.is_adapter(n)
        }

    def create_backend(
        self, optim: OptimizerSpec | None = None, *, critic: bool = False
    ) -> FsdpBackend:
        """Return a backend that trains the model with a fresh optimizer.

        ``critic`` also trains the value head, if the model was created with one.
        """
        return FsdpBackend(self, optim or OptimizerSpec(), critic)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the full tensor of each weight, one at a time, on the CPU.

        Adapters are merged into the weights that they adapt. Weights that this process does not
        hold are gathered from the ranks.
        """
        if self.lora is None:
            yield from self._gather_tensors(list(self.shapes))
            return
        for name, base, make in self.lazy_weights_and_adapters():
            yield name, base.detach() if make is None else make()

    def lazy_weights_and_adapters(
        self,
    ) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """Yield each weight and its adapter without gathering them from the ranks.

        Yields its name, a tensor of its shape, and a function that gathers the weight. For a frozen
        weight that this process holds, the tensor is the weight itself and the function is None.
        """
        matrices = {f"{name}.weight" for name in self._adapted}
        for name, shape in self.shapes.items():
            blank = torch.empty(shape, device="meta")
            if self.lora is None:
                yield name, blank, partial(self._gather_one, name)
            elif name in matrices:
                yield name, self._frozen.get(name, blank), self._with_adapter(name)
            elif name in self._frozen:
                yield name, self._frozen[name], None
            else:
                yield (
                    name,
                    blank,
                    # The stamp never changes, since the weight is frozen.
                    LazyFrozenWeight(partial(self._base_weight, name), (id(self), name)),
                )

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the full tensor of each adapter matrix (A and B).

        In a model with adapters, no other weights are trained.
        """
        yield from self._gather_tensors(
            [name for name in self._shapes if sharded_lora.is_adapter(name)]
        )

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the full accumulated gradient of every trained parameter.

        This is meant for debugging.
        """
        trained = self.own.backend_of(self.key).trained_parameters_and_optimizer[0]
        yield from self._gather_tensors(list(trained), gradients=True)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights on all ranks with this process's full tensors.

        The tensors are sent one at a time. Raises ConfigError if the model has adapters.
        """
        if self.lora is not None:
            raise ConfigError(
                "a model with adapters keeps its initial base weights: it accepts no others"
            )
        check_weights(build_meta_model(self.config), weights, "the update")
        self._put(weights)

    def export(self, folder: Path, dtype: torch.dtype | None = None, tokenizer: Any = None) -> None:
        """Write the model to a Hugging Face folder, one tensor at a time, in ``dtype`` (default
        fp32).

        For a model with adapters, the folder holds the merged weights, and its subfolder
        ``adapter`` the adapters in peft's format.
        """
        buffers = {name: tuple(each.shape) for name, each in self._buffers.items()}
        tensors = itertools.chain(self.weights(), self._buffers.items())
        shapes = {**self.shapes, **buffers}
        export_model(folder, self.config, build_meta_model(self.config), shapes, tensors, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if self.lora is not None:
            sharded_lora.save(folder / "adapter", self.lora, self._adapted, self.adapters())

    def drop(self) -> None:
        """Free this model's memory on all ranks."""
        self.rank_group.call("drop", self.key)

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for names in _groups_to_gather(
            {name: each for name, each in weights.items() if name in self._named}
        ):
            named = [(name, weights[name]) for name in names]
            blank: list[tuple[str, Tensor | None]] = [(name, None) for name in names]
            each = [(named,), *[(blank,)] * (self.rank_group.size - 1)]
            self.rank_group.call("store_weight_shards", self.key, each=each)

    def _gather_one(self, name: str) -> Tensor:
        ((_, tensor),) = self._gather_tensors([name])
        return tensor

    def _with_adapter(self, name: str) -> LoraAdaptedMatrix:
        assert self.lora is not None

        def pair() -> tuple[Tensor, Tensor]:
            (_, a), (_, b) = self._gather_tensors(list(sharded_lora.adapter_matrix_names(name)))
            return a, b

        scale = self.lora.alpha / self.lora.rank
        return LoraAdaptedMatrix(partial(self._base_weight, name), pair, scale, torch.float32)

    def _base_weight(self, name: str) -> Tensor:
        """Return the weight ``name`` of the model without its adapters."""
        if name in self._frozen:
            return self._frozen[name].detach()
        return self._gather_one(self._own_names[name])

    def _gather_tensors(
        self, names: list[str], gradients: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        empty = {name: torch.empty(self._shapes[name], device="meta") for name in names}
        for group in _groups_to_gather(empty):
            yield from zip(
                group,
                self.rank_group.call("gather", self.key, group, gradients)[0],
                strict=True,
            )


def _groups_to_gather(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Split the names of ``tensors`` into groups that are small enough to gather in one
    operation."""
    group: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        num = tensor.numel() * 4
        if group and size + num > _AT_ONCE:
            yield group
            group, size = [], 0
        group.append(name)
        size += num
    if group:
        yield group
