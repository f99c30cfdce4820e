"""What a trainer's backend does, in the verbs of the Tinker API, and its options.

    batches = pack(sequences, backend.packing, denominators)      the whole optimizer step
    backend.forward_backward(batches, loss)                       adds to the gradient, batch by batch
    backend.optim_step()                                          clips, steps, clears it; the policy is a version newer

A backend owns the weights, the optimizer and the random states, and decides where they live; it
knows nothing of rewards, rollouts or recipes. Every loss is a sum over entries divided by the
denominators of the whole step, so that it comes out the same however the step is cut into batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from ramify.errors import ConfigError, OldNameWarning
from ramify.train.loss import LossSpec
from ramify.train.pack import PackingSpec
from ramify.types.sequence import Batch, Floats

if TYPE_CHECKING:
    from torch import Tensor


BACKENDS = {
    "single": "ramify.train.backends.trained_model:LocalTrainedModel",
    "fsdp": "ramify.train.backends.fsdp:FsdpTrainedModel",
}
"""Name -> class of a ``TrainedModel``."""


class OptimizerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How weights are moved along the gradient."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalises the momentum of matrices (2502.16982); embeddings, the output matrix
    and norms stay with AdamW."""
    lr: float = 1e-3
    """Peak learning rate; of Muon's matrices too, whose update is scaled to the size of AdamW's."""
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Of matrices alone; norms, biases and embeddings do not decay."""
    momentum: float = 0.95
    """Muon's."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this global norm; 0: never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the way down after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the rate rises to ``lr``, linearly; the first has ``lr / warmup_steps``."""
    num_steps: int = 0
    """Steps after which ``final_fraction`` is reached; 0: the length of the stage, which fills it
    in."""
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ConfigError(f"optim.lr={self.lr} must be a positive number")
        if self.schedule != "constant" and 0 < self.num_steps <= self.warmup_steps:
            raise ConfigError(
                f"optim.schedule={self.schedule} over {self.num_steps} steps needs more than the "
                f"{self.warmup_steps} of warm-up"
            )
        if min(self.weight_decay, self.max_grad_norm, self.warmup_steps, self.final_fraction) < 0:
            raise ConfigError(
                "optim: weight_decay, max_grad_norm, warmup_steps, final_fraction cannot be "
                "negative"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of step ``step``, from 0.

        lr=1, linear, warmup_steps=2, num_steps=6, final_fraction=0: 0.5, 1, 1, 0.75, 0.5, 0.25, 0,
        0, …"""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        if not self.num_steps:
            raise ConfigError(f"optim.schedule={self.schedule} has no end: give optim.num_steps")
        done = min(1.0, (step - self.warmup_steps) / (self.num_steps - self.warmup_steps))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.final_fraction + (1 - self.final_fraction) * left)


class ShardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the backend ``fsdp`` spreads a model over processes, its ranks; changes the loss only by
    rounding."""

    ranks: int = 0
    """0: as many as torchrun started; without it one for each GPU of this machine, on a CPU one."""
    replicas: int = 1
    """The model stands so many times, each time spread over ``ranks / replicas`` ranks (HSDP)."""
    gather: Literal["layer", "step"] = "layer"
    """layer: a layer's weights are put together for its forward and its backward pass, and
    gradients added up over ranks after each batch. step: once per optimizer step, which sends less
    and holds all weights and a whole gradient."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """In which gradients are added up over ranks, where products are bf16."""
    offload: bool = False
    """Keep weights, gradients and the optimizer in main memory while the GPU does not need them."""
    compile: bool = False
    """Compile each layer, but for its attention."""
    save_async: bool = True
    """Write checkpoints while training goes on, from a copy."""
    timeout_s: float = 600.0
    """After which a rank that does not get on is an error."""
    port: int = 0
    """On which ranks of this machine find each other; 0: any that is free."""

    def __post_init__(self) -> None:
        if self.ranks < 0 or self.replicas < 1:
            raise ConfigError(
                f"compute.shard: ranks={self.ranks} cannot be negative, replicas={self.replicas} "
                "must be at least 1"
            )
        if self.ranks % self.replicas:
            raise ConfigError(
                f"compute.shard: {self.ranks} ranks do not fit a mesh of {self.replicas} replicas: "
                f"{self.ranks} = "
                f"{self.replicas} x {self.ranks // self.replicas} + {self.ranks % self.replicas}"
            )
        if not self.timeout_s > 0 or not 0 <= self.port < 65536:
            raise ConfigError(
                f"compute.shard: timeout_s={self.timeout_s} must be positive, port={self.port} a "
                "port"
            )


class ComputeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the numbers are computed; changes speed and memory, and the loss only by rounding."""

    backend: str = "single"
    """Of ``BACKENDS``, or ``module:attribute``."""
    shard: ShardSpec = ShardSpec()
    """Of the backend ``fsdp``."""
    max_tokens: int = 0
    """Of a batch; larger trees are cut. 0: as many as fit into 4 GiB of activations on a CPU, two
    fifths of a GPU's memory. On a CPU trees are put together up to 4096 tokens only: more at once
    leave the cache."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products; weights, log-probabilities and losses are fp32. auto: that of
    the engine (``policy.dtype``): fp32 on a CPU, and on a GPU as the checkpoint is stored."""
    recompute: bool = False
    """Keep only what goes into each layer, and compute the layer again in the backward pass."""
    max_logits: int = 0
    """Logits that are held at once; 0: 4 million on a CPU, 64 million on a GPU."""
    share: bool = True
    """Compute what sequences begin with alike once."""

    def __post_init__(self) -> None:
        if self.backend == "fsdp2":
            warnings.warn("compute.backend=fsdp2 is called fsdp here", OldNameWarning, stacklevel=3)
            msgspec.structs.force_setattr(self, "backend", "fsdp")


class ReferenceModel(Protocol):
    """A policy that is asked and not trained: of a ``Backend`` what that needs."""

    @property
    def packing(self) -> PackingSpec:
        """How sequences are to be packed for this model on this device."""
        ...

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        """As ``Backend.logprobs``."""
        ...


class TrainedModel(Protocol):
    """The model that a run trains, wherever its weights lie, through all stages of the run."""

    is_here: bool
    """Whether the weights that are trained are those of the policy in this process."""

    def backend(self, optim: OptimizerSpec) -> Backend:
        """What the next stage is trained by, with a fresh optimizer."""
        ...

    def with_critic(self, optim: OptimizerSpec, own: OptimizerSpec | None) -> Backend:
        """As ``backend``, with a critic: a value head on the policy's own layers, or where ``own``
        says how that is stepped a model of its own, which begins as a copy of the policy."""
        ...

    def reference(self, folder: Path, is_base: bool) -> ReferenceModel:
        """The policy that was saved in ``folder``; ``is_base`` says that nothing had been trained
        then."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name -> tensor, as a model without adapters has them."""
        ...

    def unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """As ``weights``, with nothing computed or gathered yet, as ``lora.unmerged`` does."""
        ...

    def release_memory(self) -> None:
        """Give back to the devices what is kept of their memory and holds nothing, for others who
        share them."""
        ...

    def close(self) -> None:
        """Free what was started for it."""
        ...


class Backend(Protocol):
    """Implemented by every class of this room."""

    @property
    def packing(self) -> PackingSpec:
        """How sequences are to be packed for this model on this device."""
        ...

    @property
    def version(self) -> int:
        """Of the policy: how many optimizer steps it has seen."""
        ...

    def forward_backward(self, batches: Many[Batch], loss: LossSpec) -> dict[str, float]:
        """Add the gradient of ``loss`` over ``batches`` to what has been gathered; the loss and its
        metrics.

        Raises TrainError where the loss is not finite: it names the sequence and the file that the
        batch was put in.
        """
        ...

    def optim_step(self) -> dict[str, float]:
        """Clip the gradient, step, and clear it: ``grad_norm`` (before clipping) and ``lr``. One
        version newer.

        Raises TrainError where the gradient is not finite; the weights stay as they were."""
        ...

    def check_gradient(self) -> None:
        """Raises the TrainError that ``optim_step`` would, and clears the gradient as that does;
        else changes nothing."""
        ...

    def clear_gradient(self) -> None:
        """Forget what has been gathered."""
        ...

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        """For each batch, [E]: log-probabilities of its entries under the policy as it is now, at
        the temperature and within the kept sets that they were sampled with. ``pack.attach`` brings
        them back to the sequences."""
        ...

    def values(self, batches: Many[Batch]) -> list[Floats]:
        """For each batch, [E]: what the critic expects a call to come to, before the entry's token
        is sampled. Raises ConfigError where there is no critic."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name -> parameter, under Hugging Face's names; views, valid until the next
        ``optim_step``."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these parameters over; the optimizer stays as it is."""
        ...

    def save(self, folder: Path) -> Callable[[], None] | None:
        """Write weights, optimizer and random states, as they are now, into ``folder``, which is
        made. Where that goes on while the caller does, what is returned waits for its end."""
        ...

    def load(self, folder: Path) -> None:
        """Go on as the backend that wrote ``folder`` would have, bit by bit. Raises ConfigError
        where it does not fit: the first difference is named."""
        ...
