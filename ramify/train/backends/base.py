"""Define the training backend interface, which follows the Tinker API, and its options.

    batches = pack(sequences, backend.packing, denominators)   the whole optimizer step
    backend.forward_backward(batches, loss)                    add to the gradient, batch by batch
    backend.optim_step()                                       clip, step, clear; version + 1

A backend owns the weights, the optimizer and the random states, and chooses where they live. It
does not see rewards, rollouts or recipes. Every loss is a sum over entries, divided by the
denominators of the whole step, so its value does not depend on how the step is cut into batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from ramify.errors import ConfigError, DeprecatedSettingNameWarning
from ramify.logging import ComponentLogger
from ramify.plugins import PluginRegistry
from ramify.train.backends.mesh import DeviceMeshSizes
from ramify.train.config_redaction import check_field_bounds, check_none_or_positive
from ramify.train.data.pack import PackingSpec
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch, Floats

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_log = ComponentLogger("train")
BACKENDS = PluginRegistry(
    "backend",
    "ramify.backends",
    {
        "single": "ramify.train.backends.trained_model:InProcessTrainedModel",
        "fsdp": "ramify.train.backends.fsdp:ShardedTrainedModel",
    },
)
"""Map the name of each training backend to the class that implements ``TrainableModel``."""


class OptimizerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the optimizer and its learning-rate schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon`` orthogonalizes the momentum of weight matrices (arXiv 2502.16982), and uses AdamW
    for embeddings, the output matrix and norms. ``adamw`` uses AdamW for all weights."""
    lr: float | None = None
    """Peak learning rate, also for Muon's matrices, whose updates are scaled to the size of
    AdamW's. None: for a pretrained checkpoint the usual rate of the stage, otherwise 3e-4 in
    the stage ``rl`` and 1e-3 in others."""
    betas: tuple[float, float] | None = None
    """Decay rates of AdamW's two moments. None: 0.9 and 0.999 for a pretrained checkpoint,
    otherwise 0.9 and 0.98.
    """
    eps: float = 1e-8
    """Constant added to the denominator of Adam's update, so that it is never 0."""
    weight_decay: float = 0.0
    """Weight decay of matrices; norms, biases and embeddings do not decay."""
    momentum: float = 0.95
    """Momentum of the Muon optimizer."""
    max_grad_norm: float | None = 1.0
    """Global norm to which gradients are clipped; None: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays after the warm-up."""
    warmup_steps: int | None = None
    """Optimizer steps over which the learning rate rises linearly from ``lr / warmup_steps`` to
    ``lr``; a training step with minibatches counts several. None: for a pretrained checkpoint a
    tenth of the stage's steps, at most 10; otherwise 0.
    """
    num_steps: int | None = None
    """Optimizer step at which the learning rate reaches ``final_fraction``; None: the last step of
    the stage.
    """
    final_fraction: float = 0.1
    """Learning rate at the end of a linear or cosine schedule, as a fraction of ``lr``."""

    def __post_init__(self) -> None:
        if not self.peak_lr >= 0 or not math.isfinite(self.peak_lr):
            raise ConfigError(f"optim.lr={self.lr} must be a finite number, at least 0")
        check_none_or_positive("optim", "never", max_grad_norm=self.max_grad_norm)
        check_none_or_positive("optim", "the length of the stage", num_steps=self.num_steps)
        num_steps = self.num_steps
        if self.schedule != "constant" and num_steps is not None and num_steps <= self.num_warmup:
            raise ConfigError(
                f"optim.schedule={self.schedule} needs more steps than the {self.num_warmup} of "
                f"warm-up, but has {num_steps}"
            )
        if min(self.weight_decay, self.num_warmup, self.final_fraction) < 0:
            raise ConfigError(
                "optim: weight_decay, warmup_steps and final_fraction cannot be negative"
            )

    @property
    def peak_lr(self) -> float:
        return 1e-3 if self.lr is None else self.lr

    @property
    def num_warmup(self) -> int:
        """Number of steps of learning-rate warm-up."""
        return self.warmup_steps or 0

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        With lr=1, linear, warmup_steps=2, num_steps=6, final_fraction=0, the rates are 0.5, 1, 1,
        0.75, 0.5, 0.25, 0, 0, …
        """
        if step < self.num_warmup:
            return self.peak_lr * (step + 1) / self.num_warmup
        if self.schedule == "constant":
            return self.peak_lr
        if self.num_steps is None:
            raise ConfigError(f"optim.schedule={self.schedule} has no end: set optim.num_steps")
        done = min(1.0, (step - self.num_warmup) / (self.num_steps - self.num_warmup))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak_lr * (self.final_fraction + (1 - self.final_fraction) * left)


class FsdpSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options for sharding a model over several processes (ranks) with the ``fsdp`` backend.

    Sharding changes the loss only by rounding.
    """

    ranks: int | None = None
    """Number of ranks; None: as many as torchrun started, or without torchrun one per GPU of this
    machine, or one on a CPU."""
    replicas: int = 1
    """Number of copies of the model, each sharded over ``ranks / replicas`` ranks (HSDP)."""
    tensor: int = 1
    """Number of ranks that split every layer and compute the same batches together (tensor
    parallelism; ``tp_size`` in transformers). Divides ``ranks / replicas``."""
    experts: int = 1
    """Number of ranks over which the experts of a mixture-of-experts model are distributed (expert
    parallelism; ``ep_size`` in transformers). A multiple of ``tensor`` that divides ``ranks /
    replicas``.
    """
    tensor_plan: dict[str, str] = {}
    """Rules for ``tensor``, name pattern -> style of transformers, on top of the class's own plan.
    Example: ``{"model.layers.*.mlp.up_proj": "colwise"}``."""
    expert_plan: dict[str, str] = {}
    """Rules for ``experts``, in the format of ``tensor_plan``: name pattern -> style of
    transformers.
    """
    gather: Literal["layer", "step"] = "layer"
    """layer: gather a layer's weights for its forward and its backward pass, and reduce gradients
    after each batch. step: gather once per optimizer step, which communicates less but holds all
    weights and a full gradient."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are summed over ranks when matrix products are in bf16."""
    offload: bool = False
    """Keep weights, gradients and optimizer states in main memory while the GPU does not need
    them."""
    compile: bool = False
    """Deprecated alias of ``compute.compile``."""
    save_async: bool = True
    """Write checkpoints in the background, from a copy, while training continues."""
    timeout_s: float = 600.0
    """Seconds without progress after which a rank counts as failed."""
    port: int | None = None
    """Port of the ranks' rendezvous on this machine; None: any free port."""

    def __post_init__(self) -> None:
        check_none_or_positive("compute.shard", "one per GPU", ranks=self.ranks)
        check_none_or_positive("compute.shard", "any free port", port=self.port)
        sizes = {name: getattr(self, name) for name in ("replicas", "tensor", "experts")}
        check_field_bounds("compute.shard", least=1, **sizes)
        if self.ranks is not None:
            self.mesh(self.ranks)
        check_field_bounds("compute.shard", above=0, timeout_s=self.timeout_s)
        if self.port is not None and self.port > 65535:
            raise ConfigError(f"compute.shard.port={self.port} must be at most 65535")

    def mesh(self, num_ranks: int) -> DeviceMeshSizes:
        """Return the device mesh sizes for ``num_ranks`` ranks.

        Raises ConfigError if the number of ranks does not fit the options.
        """
        return DeviceMeshSizes.from_rank_count(num_ranks, self.replicas, self.tensor, self.experts)


class TrainerComputeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options for how the trainer computes, such as precision and batch size.

    They affect speed and memory, and change the loss only by rounding.
    """

    backend: str = "single"
    """Name of a training backend in ``BACKENDS``, or ``module:attribute``."""
    shard: FsdpSpec = FsdpSpec()
    """Options of the ``fsdp`` backend."""
    max_tokens: int | None = None
    """Maximum number of tokens per batch; larger trees are cut. None: as many as fit into 4 GiB of
    activations on a CPU, or two fifths of a GPU's memory. On a CPU small trees share a batch only
    up to 4096 tokens: larger batches do not fit the CPU cache.
    """
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products; weights, log-probabilities and losses are fp32. auto: the
    engine's precision (``policy.dtype``), i.e. fp32 on a CPU and the checkpoint's on a GPU."""
    recompute: bool = False
    """Activation checkpointing: keep only each layer's input, and recompute the layer in the
    backward pass."""
    compile: bool = False
    """Compile each layer except its attention (``torch.compile``), which takes up to a minute at
    startup. Supports Llama, Mistral, Qwen2 and Qwen3 on a GPU.
    """
    max_logits: int | None = None
    """Maximum number of logits held in memory at once; lower it if the loss runs out of memory.
    None: 4 million on a CPU, 64 million on a GPU."""
    share: bool = True
    """Compute each prefix that several sequences share only once."""
    deterministic: bool = False
    """Compute in fixed shapes, so that results have the same bits in any batch. Prefer the
    run's option ``deterministic``, which also covers the inference engine."""

    def __post_init__(self) -> None:
        sizes = {"max_tokens": self.max_tokens, "max_logits": self.max_logits}
        check_none_or_positive("compute", "the size that fits the device", **sizes)
        if self.backend == "fsdp2":
            _log.issue_python_warning(
                "compute.backend=fsdp2 is called fsdp here",
                DeprecatedSettingNameWarning,
                stacklevel=3,
            )
            msgspec.structs.force_setattr(self, "backend", "fsdp")
        if self.shard.compile and not self.compile:
            _log.issue_python_warning(
                "compute.shard.compile is called compute.compile here",
                DeprecatedSettingNameWarning,
                stacklevel=3,
            )
            msgspec.structs.force_setattr(self, "compile", True)


class ReferenceModel(Protocol):
    """A model that computes log-probabilities but is not trained, such as the reference policy of a
    KL penalty.

    It needs only these few methods of a ``Backend``.
    """

    @property
    def packing(self) -> PackingSpec:
        """The settings for packing sequences into batches for this model and device."""
        ...

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        """Return the log-probabilities under this model of all tokens that contribute to the loss.

        Each batch gives one array of shape [E], where E is its number of such tokens.
        """
        ...


class TrainableModel(Protocol):
    """The interface of the model that a run trains.

    One object serves all stages of the run, whether the weights are in this process or sharded over
    others.

    Example:
        backend = model.backend(train.OptimizerSpec(lr=1e-5))
    """

    is_here: bool
    """True if training updates the weights of this process's policy object in place."""

    def backend(self, optim: OptimizerSpec) -> Backend:
        """Return a backend that trains this model in the next training stage, with a fresh
        optimizer."""
        ...

    def with_critic(self, optim: OptimizerSpec, own: OptimizerSpec | None) -> Backend:
        """Return a backend that trains the policy together with a critic.

        ``optim`` is the policy's optimizer and ``own`` the critic's. If ``own`` is None, the critic
        is a value head on the policy's layers. Otherwise it is a separate model that starts as a
        copy of the policy.
        """
        ...

    def reference(self, folder: Path, is_base: bool) -> ReferenceModel:
        """Load the policy saved in ``folder`` as a frozen reference model.

        ``is_base`` is True if the policy was saved before any training.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of each weight.

        Low-rank adapters are merged into the weights that they adapt.
        """
        ...

    def base_tensors_and_adapters(
        self,
    ) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """Yield each weight together with its adapter, without merging them or gathering them from
        ranks.

        Yields its name, a tensor of its shape, and a function that returns the weight with its
        adapters merged. The function is None if the tensor already is the weight.
        """
        ...

    def release_memory(self) -> None:
        """Return unused memory from torch's cache to the device, so that other processes can use
        it."""
        ...

    def close(self) -> None:
        """Free all resources and end the processes that were started."""
        ...


class Backend(Protocol):
    """The interface of a training backend, which computes gradients and updates the weights of one
    model."""

    @property
    def packing(self) -> PackingSpec:
        """The settings for packing sequences into batches for this model and device."""
        ...

    @property
    def version(self) -> int:
        """Version of the policy: the number of optimizer steps made so far."""
        ...

    def forward_backward(self, batches: Many[Batch], loss: LossSpec) -> dict[str, float]:
        """Add the gradient of ``loss`` over ``batches`` to the accumulated gradient.

        Returns the loss and its metrics.

        Raises TrainError if the loss is not finite. The batch is then written to a file, and the
        error names that file and the affected sequence.
        """
        ...

    def optim_step(self) -> dict[str, float]:
        """Clip the accumulated gradient, update the weights, and clear the gradient.

        Increments ``version``. Returns ``grad_norm`` (before clipping) and ``lr``.

        Raises TrainError if the gradient is not finite; the weights stay unchanged.
        """
        ...

    def check_gradient(self) -> None:
        """Raise TrainError if the accumulated gradient is not finite, and clear the gradient in
        that case.

        Otherwise nothing changes.
        """
        ...

    def clear_gradient(self) -> None:
        """Discard the accumulated gradient."""
        ...

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        """Return the current policy's log-probabilities of the tokens that contribute to the loss.

        Each batch gives one array of shape [E], where E is its number of tokens that carry loss.
        The temperature and the truncation (top-p or top-k) are those with which the token was
        sampled.
        """
        ...

    def values(self, batches: Many[Batch]) -> list[Floats]:
        """Return the critic's value estimates, as one array of shape [E] per batch.

        E is the batch's number of tokens that carry loss. Each estimate is for the state just
        before its token. Raises ConfigError if the backend has no critic.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of each parameter, with Hugging Face names.

        The tensors are views, which are valid until the next ``optim_step``.
        """
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the parameters of the model with ``weights``.

        The optimizer state stays unchanged.
        """
        ...

    def save(self, folder: Path) -> Callable[[], None] | None:
        """Write the current weights, optimizer state and random states to ``folder``, creating the
        folder.

        If writing continues in the background, the returned function waits for it to finish.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore the state saved in ``folder``, bit for bit.

        Raises ConfigError, which names the first difference, if the state does not fit this
        backend.
        """
        ...


def resolve_precision(
    compute: TrainerComputeSpec, dtype: torch.dtype, device: str
) -> TrainerComputeSpec:
    """Replace ``precision="auto"`` in ``compute`` with bf16 or fp32.

    It is bf16 if the policy was loaded in a 16-bit ``dtype`` and the device supports bf16.
    Otherwise it is fp32.
    """
    if compute.precision != "auto":
        return compute
    is_half = dtype.itemsize == 2
    precision: Literal["fp32", "bf16"] = "bf16" if is_half and has_bf16(device) else "fp32"
    return msgspec.structs.replace(compute, precision=precision)


def has_bf16(device: str) -> bool:
    """Return True if the device supports bf16.

    Every CPU does, but not every GPU.
    """
    import torch

    return device != "cuda" or torch.cuda.is_bf16_supported()
