"""The ``fsdp`` backend: one model over several processes, as seen from rank 0, where the training
loop runs.

    FsdpRanks ── spread ──> FsdpModel ── backend ──> FsdpBackend (``fsdp_backend.py``)
                              │ weights, unmerged, export: one tensor at a time
                              └─ load_weights

A verb is sent to all ranks, with each rank's batches. Losses are divided by the counts of the whole
step, and gradients are sums over ranks, so both equal those of the ``single`` backend. Decides how
weights are loaded and gathered. Not here: which rank computes what (``fsdp_backend.py``), how
weights are sharded (``sharding.py``), what a rank does (``rank.py``), and failures of ranks
(``rank_group.py``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor, nn

from ramify.actors.launcher import Launcher
from ramify.actors.rank_group import RankGroup
from ramify.errors import ConfigError
from ramify.inference.weight_sync.base import AdaptedMatrix, FrozenTensor
from ramify.models.load import Policy, stored_dtype
from ramify.models.stored_weights import stored_tensors
from ramify.models.weights import check_weights
from ramify.train.backends import adapters, launch
from ramify.train.backends.adapters import AdapterSpec
from ramify.train.backends.base import Backend, ComputeSpec, OptimizerSpec, decided
from ramify.train.backends.fsdp_backend import FsdpBackend, ShardedReference, check_optimizer
from ramify.train.backends.layer_split import SplitPlan
from ramify.train.backends.rank import ModelConfigText, RankModelSpec, is_of_critic
from ramify.train.backends.sharding import on_meta
from ramify.train.backends.trained_model import SeparateCritic
from ramify.train.backends.write_checkpoint import export_model

_AT_ONCE = 16 << 20
"""Bytes of tensors gathered or sent at once; a larger tensor is handled alone."""
Source = Union[Path, Mapping[str, Tensor], "FsdpModel"]
"""Source of a model's weights: a folder that all ranks can read, tensors of this process, or a
model over the same mesh."""


class FsdpRanks:
    """The ranks of a run, and the models sharded over them."""

    def __init__(
        self,
        compute: ComputeSpec,
        device: str = "cpu",
        *,
        dumps: Path | None = None,
        hosts: Launcher | None = None,
    ) -> None:
        """Start the ranks, on ``hosts`` if given, or join those of torchrun. Batches with a
        non-finite loss, and the stacks of stuck ranks, are written to ``dumps``. Raises
        ConfigError, before anything is started, if ``compute.shard`` does not fit this machine."""
        self.compute = compute
        self.device = device
        self.dumps = dumps or Path()
        self._joined = launch.join(compute.shard, device, self.dumps, hosts)
        self._num_models = 0
        self._end = weakref.finalize(self, _leave, self._joined)

    @property
    def rank_group(self) -> RankGroup:
        rank_group: RankGroup = self._joined.rank_group
        return rank_group

    @property
    def own(self) -> Any:
        """The ``RankModels`` of this process."""
        return self._joined.rank

    def spread(
        self,
        config: Any,
        source: Source,
        lora: AdapterSpec | None = None,
        compute: ComputeSpec | None = None,
        *,
        critic: bool = False,
        holds_base: bool = False,
    ) -> FsdpModel:
        """Shard a model with a Hugging Face configuration and weights from ``source``. ``compute``
        overrides the ranks' options, except their number. ``critic``: add a value head, initialized
        to 0. ``holds_base``: keep the weights that adapters are added to in this process too, so
        that only adapters are gathered. Raises ConfigError, naming the first tensor that does not
        fit."""
        compute = compute or self.compute
        SplitPlan.check(config, compute.shard, self.rank_group.size, lora)
        check_source(config, source)
        self._num_models += 1
        compute = decided(compute, stored_dtype(config, self.device), self.device)
        parts = FsdpModelParts(config, source, lora, compute, critic, holds_base)
        return FsdpModel(self, f"model {self._num_models}", parts)

    def close(self) -> None:
        self._end()


class FsdpTrainedModel:
    """Implements ``TrainedModel`` over ranks. The policy object in this process belongs to the
    engine, which is updated at each publication."""

    is_here = False

    def __init__(
        self,
        policy: Policy,
        compute: ComputeSpec,
        dumps: Path,
        *,
        lora: AdapterSpec | None = None,
        source: Source,
        critic: bool = False,
        hosts: Launcher | None = None,
        device: str | None = None,
    ) -> None:
        """``policy`` determines the model and the tokenizer; its weights may change later.
        ``critic``: add a value head, for ``with_critic``. ``device``: kind of the ranks' devices;
        None: the policy's."""
        device = device or policy.device.type
        compute = decided(compute, policy.dtype, device)
        self._ranks = FsdpRanks(compute, device, dumps=dumps, hosts=hosts)
        try:
            has_all = policy.device.type != "meta"  # the engine of this process has them anyway
            self._model = self._ranks.spread(
                policy.config, source, lora, critic=critic, holds_base=has_all
            )
        except BaseException:
            self._ranks.close()
            raise
        self._backend: FsdpBackend | None = None

    @staticmethod
    def check(compute: ComputeSpec, device: str, *, elsewhere: bool = False) -> None:
        """Raise ConfigError if the ranks cannot be started. ``elsewhere``: not all ranks are on
        this machine."""
        launch.check(compute.shard, device, elsewhere=elsewhere)

    @staticmethod
    def check_model(
        config: Any,
        compute: ComputeSpec,
        device: str,
        lora: AdapterSpec | None,
        optims: Many[OptimizerSpec],
    ) -> None:
        """Raise ConfigError if the model, its adapters or one of the optimizers that will train it
        cannot be split over the mesh."""
        shard = compute.shard
        SplitPlan.check(config, shard, launch.num_ranks(shard, device), lora)
        for optim in optims:
            check_optimizer(optim, shard)

    def backend(self, optim: OptimizerSpec) -> FsdpBackend:
        self._backend = self._model.backend(optim)
        return self._backend

    def with_critic(self, optim: OptimizerSpec, own: OptimizerSpec | None) -> Backend:
        if own is None:
            self._backend = self._model.backend(optim, critic=True)
            return self._backend
        # Adapters are summed up first; without them each rank copies its own part.
        source = self._model if self._model.lora is None else dict(self.weights())
        model = self._ranks.spread(self._model.config, source, self._model.lora, critic=True)
        return SeparateCritic(self.backend(optim), model.backend(own, critic=True))

    def reference(self, folder: Path, is_base: bool) -> ShardedReference | FsdpBackend:
        if is_base and self._model.lora is not None and self._backend is not None:
            return self._backend.base()
        return self._ranks.spread(self._model.config, folder).backend()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.weights()

    def unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        return self._model.unmerged()

    def stacks(self) -> str:
        """Stacks of the other ranks, as text."""
        return self._ranks.rank_group.stacks()

    def release_memory(self) -> None:
        self._ranks.rank_group.call("release_memory")

    def close(self) -> None:
        self._ranks.close()


def check_source(config: Any, source: Source) -> None:
    """Raise ConfigError, naming the first tensor of ``source`` that does not fit the model of
    ``config``."""
    model = on_meta(config)
    if isinstance(source, Path):
        check_weights(model, stored_tensors(source, model), str(source))
    elif not isinstance(source, FsdpModel):
        check_weights(model, source, "the given weights")


class FsdpModelParts(NamedTuple):
    """The parts of a model over ranks."""

    config: Any
    source: Source
    lora: AdapterSpec | None
    compute: ComputeSpec
    critic: bool
    holds_base: bool


class FsdpModel:
    """Rank 0's handle of one model over all ranks."""

    def __init__(self, ranks: FsdpRanks, key: str, parts: FsdpModelParts) -> None:
        config, source, lora, compute, critic, holds_base = parts
        self.ranks = ranks
        self.key = key
        self.config = config
        self.lora = lora
        self.compute = compute
        folder = str(source.resolve()) if isinstance(source, Path) else ""
        ranks.rank_group.call(
            "make",
            key,
            RankModelSpec(
                ModelConfigText.of(config),
                compute,
                folder,
                lora,
                str(ranks.dumps.resolve()),
                critic,
            ),
        )
        model = ranks.own.model(key)
        self._shapes: dict[str, torch.Size] = {
            name: each.shape for name, each in model.sharded.parameters.items()
        }
        self._adapted: list[str] = model.names
        self._buffers: dict[str, Tensor] = model.sharded.buffers
        self._named = {*self.shapes, *self._buffers}
        self.policy: Policy = model.policy
        if isinstance(source, FsdpModel):
            ranks.rank_group.call("copy", key, source.key)
        elif not isinstance(source, Path):
            self._put(source)
        self._own_names = {
            adapters.plain(name): name for name in self._shapes if not adapters.is_adapter(name)
        }
        self._frozen: dict[str, nn.Parameter] = {}
        """Name -> weight that adapters are added to, if this process keeps them."""
        if lora is not None and holds_base:
            assert not isinstance(source, FsdpModel)
            initial: Mapping[str, Any] = (
                stored_tensors(source, on_meta(config)) if isinstance(source, Path) else source
            )
            self._frozen = {
                name: nn.Parameter(initial[name][...].float().clone(), requires_grad=False)
                for name in self.shapes
            }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter of the policy, as in the model without adapters."""
        policy = {name: shape for name, shape in self._shapes.items() if not is_of_critic(name)}
        return {
            adapters.plain(n): tuple(s) for n, s in policy.items() if not adapters.is_adapter(n)
        }

    def backend(self, optim: OptimizerSpec | None = None, *, critic: bool = False) -> FsdpBackend:
        """Begin training the model with a fresh optimizer. ``critic``: train its value head too, if
        it was created with one."""
        return FsdpBackend(self, optim or OptimizerSpec(), critic)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) on the CPU, one at a time. With adapters, these are added to the
        initial weights, which are gathered too unless this process keeps them."""
        if self.lora is None:
            yield from self._gathered(list(self.shapes))
            return
        for name, base, make in self.unmerged():
            yield name, base.detach() if make is None else make()

    def unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """(name, tensor of its shape, function that gathers it, or None if it is frozen and
        here)"""
        matrices = {f"{name}.weight" for name in self._adapted}
        for name, shape in self.shapes.items():
            blank = torch.empty(shape, device="meta")
            if self.lora is None:
                yield name, blank, partial(self._one, name)
            elif name in matrices:
                yield name, self._frozen.get(name, blank), self._with_adapter(name)
            elif name in self._frozen:
                yield name, self._frozen[name], None
            else:
                yield name, blank, FrozenTensor(partial(self._base, name), (id(self), name))

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every A and B: everything that changes."""
        yield from self._gathered([name for name in self._shapes if adapters.is_adapter(name)])

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full accumulated gradient) of every trained parameter, for diagnosis."""
        trained = self.ranks.own.of(self.key).trained[0]
        yield from self._gathered(list(trained), gradients=True)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load full tensors of this process, one at a time."""
        if self.lora is not None:
            raise ConfigError(
                "a model with adapters keeps its initial base weights: it accepts no others"
            )
        check_weights(on_meta(self.config), weights, "the update")
        self._put(weights)

    def export(self, folder: Path, dtype: torch.dtype | None = None, tokenizer: Any = None) -> None:
        """Write the model as a plain Hugging Face folder, one tensor at a time, in ``dtype``
        (default fp32). With adapters, the folder holds the merged weights, and its subfolder
        ``adapter`` the adapters in peft's format."""
        buffers = {name: tuple(each.shape) for name, each in self._buffers.items()}
        tensors = itertools.chain(self.weights(), self._buffers.items())
        shapes = {**self.shapes, **buffers}
        export_model(folder, self.config, on_meta(self.config), shapes, tensors, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if self.lora is not None:
            adapters.save(folder / "adapter", self.lora, self._adapted, self.adapters())

    def drop(self) -> None:
        """Free the model on all ranks."""
        self.ranks.rank_group.call("drop", self.key)

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for names in _groups({name: each for name, each in weights.items() if name in self._named}):
            named = [(name, weights[name]) for name in names]
            blank: list[tuple[str, Tensor | None]] = [(name, None) for name in names]
            each = [(named,), *[(blank,)] * (self.ranks.rank_group.size - 1)]
            self.ranks.rank_group.call("put", self.key, each=each)

    def _one(self, name: str) -> Tensor:
        ((_, tensor),) = self._gathered([name])
        return tensor

    def _with_adapter(self, name: str) -> AdaptedMatrix:
        assert self.lora is not None

        def pair() -> tuple[Tensor, Tensor]:
            (_, a), (_, b) = self._gathered(list(adapters.pair(name)))
            return a, b

        scale = self.lora.alpha / self.lora.rank
        return AdaptedMatrix(partial(self._base, name), pair, scale, torch.float32)

    def _base(self, name: str) -> Tensor:
        """A weight of the model without adapters."""
        if name in self._frozen:
            return self._frozen[name].detach()
        return self._one(self._own_names[name])

    def _gathered(self, names: list[str], gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
        empty = {name: torch.empty(self._shapes[name], device="meta") for name in names}
        for group in _groups(empty):
            yield from zip(
                group,
                self.ranks.rank_group.call("gather", self.key, group, gradients)[0],
                strict=True,
            )


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, in groups that are small enough to handle at once."""
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


def _leave(joined: launch.JoinedRanks) -> None:
    launch.leave(joined)
