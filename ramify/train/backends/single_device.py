"""The training backend for one device, a CPU or a GPU.

Its results are the reference that all other backends must reproduce.

    forward_backward   for each batch: trunk ── hidden states of entries ── head ── loss ── backward
    optim_step         clip ── AdamW, or Muon and AdamW ── clear

The backend computes bf16 products from fp32 weights (``base.decided`` chooses the precision), can
recompute activations in the backward pass, and stops the step if a loss is not finite. Gradients
accumulate over batches, so the batch size changes memory but not the step. Losses are in
``losses/``, and attention is in ``models/training_forward.py``.

Legend: T tokens, E entries, D width, k teacher tokens per entry.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ramify.actors.rank_group import PeerRankFailedError
from ramify.errors import ConfigError, TrainError
from ramify.models.dense import ARCHITECTURES, DenseModel, compile_layers
from ramify.models.load import Policy
from ramify.models.moe_routing import MoeRouters, RouterLoadBalancingLoss, configured_balance_weight
from ramify.models.training_forward import (
    LmHeadRequest,
    compute_logprobs_and_entropies,
    fixed_shape_trunk,
    wrap_for_training,
)
from ramify.models.weights import load_weights
from ramify.progress import heartbeat
from ramify.train.backends.activation_memory import (
    keep_malloc_memory,
    max_logit_elements,
    max_tokens_in_memory,
    packing_cost_model,
    set_activation_checkpointing,
)
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec, resolve_precision
from ramify.train.backends.optimizers import (
    CombinedOptimizer,
    OptimizerWeightAccess,
    SingleProcessWeightSharding,
)
from ramify.train.data.pack import PackingSpec
from ramify.train.losses import CriticOnlyLoss
from ramify.train.losses import total_loss as losses
from ramify.train.losses.total_loss import BatchLossInputs, LossSpec, LossTally
from ramify.types.training_sequences import Batch, Floats, SequenceUnit

_STATE = "backend.pt"
VALUE_HEAD = "value_head"
EntryOutput = Literal["no", "value", "gradient", "values alone"]
"""The quantity to compute at each token with loss: log-probabilities without entropy, with entropy,
with the entropy's gradient, or only the critic's values."""
_FILL_TOKENS = 4096


class SingleBackend:
    """The training backend for one device.

    It computes gradients and updates the weights in this process.
    """

    def __init__(
        self,
        policy: Policy,
        optim: OptimizerSpec | None = None,
        compute: TrainerComputeSpec | None = None,
        *,
        dumps: Path | None = None,
        critic: bool = False,
        spread: OptimizerWeightAccess | None = None,
    ) -> None:
        """Prepare ``policy`` for training.

        Its weights are converted to fp32 and trained in place.

        ``dumps`` is the folder for batches with a non-finite loss, by default the working
        directory. ``critic`` adds a value head on the trunk, initialized to 0. If this process is
        one of several ranks, ``spread`` describes how the weights are sharded over them; None if
        this process holds all weights. With sharding, the value head is part of the model
        (``VALUE_HEAD``).
        """
        self._config = policy.config
        self._optim = optim or OptimizerSpec()
        self._spread = spread or SingleProcessWeightSharding(policy.device)
        self._device = self._spread.device
        self.compute = resolve_precision(
            compute or TrainerComputeSpec(), policy.dtype, self._device.type
        )
        """Settings such as precision and prefix sharing, with the defaults of this device filled
        in."""
        self._dumps = dumps or Path()
        self.model: nn.Module = policy.model.float()
        """The policy's network, whose gradients the backend computes."""
        if self._device.type == "cpu" and spread is None:  # a rank does the opposite
            # It saves time, but a rank, which gathers and frees layers, would keep far more memory.
            keep_malloc_memory()
        with torch.no_grad():
            trunk = wrap_for_training if not self.compute.deterministic else fixed_shape_trunk
            # Wrapping tests the model, for which sharded weights are gathered.
            self.trunk = self._spread.run_with_weights(lambda: trunk(self.model))
            """The network in two halves: hidden states, and their logits."""
        self._router_weight = configured_balance_weight(policy.config)
        routers = MoeRouters.of_model(self.model)
        self._balance = (
            None
            if routers is None
            else RouterLoadBalancingLoss(routers, self._spread.sum_over_ranks)
        )
        if isinstance(self.model, DenseModel):
            compile_layers(self.model, "inductor" if self.compute.compile else None)
        elif self.compute.compile:
            raise ConfigError(
                f"compute.compile=true supports only {', '.join(ARCHITECTURES)}, but this model "
                f"is a {type(self.model).__name__}: remove it"
            )
        set_activation_checkpointing(self.model, self.compute.recompute)
        self.value_head: nn.Module | None = None
        if critic and spread is None:
            self.value_head = value_head(policy.config.hidden_size).to(self._device)
        elif critic:
            self.value_head = self.model.get_submodule(VALUE_HEAD)
        self.trained_modules = _trained_module(self.model, self.value_head)
        """The network with its value head, if there is one."""
        self._optimizers = CombinedOptimizer(
            self.trained_modules, self._optim, self._spread.muon_class
        )
        self._num_steps = 0
        is_cuda = self._device.type == "cuda"
        self._max_logits = self.compute.max_logits or max_logit_elements(is_cuda)
        self._window = policy.window
        self.packing = PackingSpec(
            self.compute.max_tokens
            or max_tokens_in_memory(
                policy.config, self._device, self.compute.recompute, self.compute.precision
            ),
            self.compute.share and self.trunk.can_share_prefixes,
            packing_cost_model(self.model, policy.config, self._device.type),
            _FILL_TOKENS if self._device.type == "cpu" else None,
        )

    @property
    def version(self) -> int:
        return self._num_steps

    def forward_backward(self, batches: Many[Batch], loss: LossSpec) -> dict[str, float]:
        if loss.is_over_sequences:
            losses.check_sequences_unsplit(batches, loss.sequence)
        if losses.selects_tokens(loss):
            batches = losses.mark_selected_tokens(batches, loss, self.logprobs(batches))
        self.prepare_expert_loads(batches, loss)
        tally = LossTally()
        for batch in batches:
            tally.merge(self.add(batch, loss))
        return tally.metrics()

    def prepare_expert_loads(self, batches: Many[Batch], loss: LossSpec) -> None:
        """Compute the load of each expert over all batches of the step, if the model is a mixture
        of experts.

        Call this before ``add``, which sees only one batch at a time.
        """
        given = loss.router_aux_loss_coef
        weight = self._router_weight if given is None else given
        if self._balance is not None:
            with self.trunk.forward_context():
                self._balance.count_expert_choices(
                    batches,
                    weight,
                    self._device,
                    lambda each: self._loss_inputs(each, "values alone"),
                )
        elif weight:
            raise ConfigError(
                f"loss.router_aux_loss_coef={weight:g} needs a mixture-of-experts model whose "
                f"routers transformers records, which {self._config.model_type} is not: remove it"
            )

    def add(self, batch: Batch, loss: LossSpec) -> LossTally:
        """Add the gradient of one batch to the accumulated gradient, and return the batch's
        metrics.

        Call ``prepare_expert_loads`` with all batches of the step first.
        """
        with self.trunk.forward_context(), self._routing_context(batch):
            entries = self._loss_inputs(batch, _output_of(loss, batch), loss.sequence)
            value, measured = losses.compute(loss, entries)
            is_finite = bool(torch.isfinite(value))
            # Before the backward pass, in which the others would wait for a rank that has stopped.
            if not self._spread.all_ranks_agree(is_finite):
                self._raise_non_finite(batch, entries, loss, is_finite)
            if self._balance is not None:
                # It also prepares the gradient that the backward pass adds at the routers.
                measured.add_experts(self._balance.collect_expert_load())
            value.backward()  # type: ignore[no-untyped-call]
        heartbeat()
        return measured

    def optim_step(self) -> dict[str, float]:
        lr = self._optim.lr_at(self._num_steps)
        gradients, norm = self._gradients()
        max_norm = self._optim.max_grad_norm
        if max_norm is not None and norm > max_norm:
            self._spread.scale(gradients, max_norm / norm)
        if gradients:
            self._optimizers.step(lr)
        self.clear_gradient()
        self._num_steps += 1
        return {"grad_norm": norm, "lr": lr}

    def check_gradient(self) -> None:
        self._gradients()

    def clear_gradient(self) -> None:
        self.trained_modules.zero_grad(set_to_none=True)

    def _gradients(self) -> tuple[list[Tensor], float]:
        """Return the accumulated gradients and their norm.

        If the norm is not finite, clear the gradients and raise TrainError.
        """
        gradients = [p.grad for p in self.trained_modules.parameters() if p.grad is not None]
        norm = self._spread.global_norm(gradients)
        if not math.isfinite(norm):
            self.clear_gradient()
            raise TrainError(
                f"the gradient of step {self._num_steps + 1} is not finite, though its loss is; "
                "the weights are unchanged: lower optim.lr, or try compute.precision=fp32"
            )
        return gradients, norm

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        found = []
        with torch.no_grad(), self.trunk.forward_context():
            for batch in batches:
                with self._routing_context(batch):
                    found.append(self._loss_inputs(batch, "no").logprobs.cpu().numpy())
        return found

    def top_logprobs(self, batches: Many[Batch], top: int = 0) -> list[dict[str, npt.NDArray[Any]]]:
        """Return each batch's token log-probabilities, and optionally those of the likeliest
        tokens.

        The result for a batch is a dict of named arrays. ``logprobs`` [E] has those of the E tokens
        that carry loss. If ``top`` is above 0, ``top_ids`` and ``top`` [E, top] hold the likeliest
        tokens at each position and their log-probabilities. If the batch has a stream
        ``teacher_ids``, ``candidates`` [E, k] has the log-probabilities of the k tokens that it
        lists at each position.
        """
        results = []
        with torch.no_grad(), self.trunk.forward_context():
            for batch in batches:
                if top:
                    heartbeat()
                    columns = self._top_logprobs(batch, top)
                else:
                    entries = self._loss_inputs(batch, "no")
                    columns = {"logprobs": entries.logprobs}
                    if entries.teacher_ids_logprobs is not None:
                        columns["candidates"] = entries.teacher_ids_logprobs
                results.append({name: column.cpu().numpy() for name, column in columns.items()})
        return results

    def values(self, batches: Many[Batch]) -> list[Floats]:
        if self.value_head is None:
            raise ConfigError("this backend has no critic: create it with one, as rl.critic does")
        results = []
        with torch.no_grad(), self.trunk.forward_context():
            for batch in batches:
                values = self._loss_inputs(batch, "values alone").values
                assert values is not None
                results.append(values.cpu().numpy())
        return results

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        load_weights(self.model, weights)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "weights": dict(self.weights()),
            "value_head": {} if self.value_head is None else self.value_head.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "optim": msgspec.json.encode(self._optim).decode(),
            "num_steps": self._num_steps,
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state_all() if self._device.type == "cuda" else [],
        }
        torch.save(state, folder / _STATE)

    def load(self, folder: Path) -> None:
        try:
            state = torch.load(folder / _STATE, map_location=self._device, weights_only=True)
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no trainer state: {_STATE} is missing") from None
        self._check_fit(folder, state)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state["weights"][name])
        if self.value_head is not None:
            self.value_head.load_state_dict(state["value_head"])
        self._optimizers.load_state_dict(state["optimizers"])
        self._num_steps = state["num_steps"]
        torch.set_rng_state(state["random"].cpu())
        if state["cuda_random"] and self._device.type == "cuda":
            torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda_random"]])

    @property
    def trained_parameters_and_optimizer(self) -> tuple[dict[str, nn.Parameter], CombinedOptimizer]:
        """The trained parameters by name, and the optimizer that updates them."""
        return {
            name: each for name, each in self.model.named_parameters() if each.requires_grad
        }, self._optimizers

    def set_num_steps(self, num_steps: int) -> None:
        """Set the number of completed steps, after the weights and the optimizer state were
        restored from a checkpoint."""
        self._num_steps = num_steps

    # --- one batch

    def _routing_context(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        return (
            contextlib.nullcontext()
            if self._balance is None
            else self._balance.track_batch_routing(batch, self._device)
        )

    def _loss_inputs(
        self, batch: Batch, entropy: EntryOutput, unit: SequenceUnit = "call"
    ) -> BatchLossInputs:
        check_context_window(batch, self._window)
        heartbeat()
        streams = {name: self._tensor(column) for name, column in batch.streams.items()}
        logprobs, entropies, values = self._spread.run_with_weights(
            lambda: self._run_model(batch, streams, entropy)
        )
        places, num_sequences = losses.sequence_index_of_entries(batch, unit)
        return BatchLossInputs(
            logprobs=logprobs[:, 0],
            streams=streams,
            denominators=batch.denominators,
            entropy=entropies if entropy in ("value", "gradient") else None,
            teacher_ids_logprobs=logprobs[:, 1:] if logprobs.shape[1] > 1 else None,
            sequences=(self._tensor(places), num_sequences),
            values=None if values is None else values[:, 0],
        )

    def _run_model(
        self, batch: Batch, streams: Mapping[str, Tensor], entropy: EntryOutput
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the forward pass of the network on one batch.

        Returns log-probabilities [E, j] and entropies [E] at the E tokens with loss, and the
        critic's values [E, 1]. The values are None if the model has no value head.
        """
        with self._autocast():
            # After a shared prefix, entries share its last hidden state, which is computed once.
            rows, places = (
                self._tensor(each) for each in np.unique(batch.sources, return_inverse=True)
            )
            tokens = self._tensor(batch.token_ids), self._tensor(batch.positions)
            h_ED = self.trunk.hidden(*tokens, batch.segments, rows).index_select(0, places)
            if entropy == "values alone":
                logprobs, entropies = (
                    h_ED.new_zeros(len(h_ED), 1, dtype=torch.float32),
                    h_ED.new_zeros(0),
                )
            else:
                request = self._head_request(batch, streams, entropy)
                logprobs, entropies = compute_logprobs_and_entropies(
                    h_ED,
                    self.trunk.logits,
                    request,
                    self._config.vocab_size,
                    self._max_logits,
                    fixed=self.compute.deterministic,
                )
        # The value head is outside of autocast: in bf16, a value has only three digits.
        return (
            logprobs,
            entropies,
            None if self.value_head is None else self.value_head(h_ED.float()),
        )

    def _top_logprobs(self, batch: Batch, num: int) -> dict[str, Tensor]:
        """Return the log-probabilities of each loss token and of the ``num`` likeliest tokens at
        its position.

        The logits are divided by the token's sampling temperature. They are those of the token
        itself, of the ``num`` likeliest tokens at its position, and of its candidate tokens if the
        batch has any.
        """
        temperature, targets = (
            self._tensor(batch.streams["temperature"]),
            self._tensor(batch.targets)[:, None],
        )
        wanted = targets
        if "teacher_ids" in batch.streams:
            wanted = torch.cat([targets, self._tensor(batch.streams["teacher_ids"]).long()], 1)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        with self._autocast():
            rows, places = (
                self._tensor(each) for each in np.unique(batch.sources, return_inverse=True)
            )
            tokens = self._tensor(batch.token_ids), self._tensor(batch.positions)
            h_ED = self.trunk.hidden(*tokens, batch.segments, rows).index_select(0, places)
            size = max(1, (1 << 22) // self._config.vocab_size)
            for start in range(0, len(h_ED), size):
                at = slice(start, start + size)
                z_nV = self.trunk.logits(h_ED[at]) / temperature[at, None]
                logprobs_nV = z_nV.log_softmax(-1)
                parts.append((logprobs_nV.gather(1, wanted[at]), *logprobs_nV.topk(num)))
        logprobs, top, top_ids = (torch.cat(each) for each in zip(*parts, strict=True))
        columns = {"logprobs": logprobs[:, 0], "top": top, "top_ids": top_ids}
        return columns if wanted is targets else {**columns, "candidates": logprobs[:, 1:]}

    def _head_request(
        self,
        batch: Batch,
        streams: Mapping[str, Tensor],
        entropy: Literal["no", "value", "gradient"],
    ) -> LmHeadRequest:
        targets = self._tensor(batch.targets)[:, None]
        if "teacher_ids" in streams:
            targets = torch.cat([targets, streams["teacher_ids"].long()], 1)
        temperature = (
            streams["temperature"] if bool((batch.streams["temperature"] != 1).any()) else None
        )
        kept = None
        if batch.kept is not None and len(batch.kept.ids):
            kept = (self._tensor(batch.kept.offsets), self._tensor(batch.kept.ids))
        return LmHeadRequest(targets, temperature, kept, entropy)

    def _raise_non_finite(
        self, batch: Batch, entries: BatchLossInputs, loss: LossSpec, is_finite: bool
    ) -> NoReturn:
        """Write a batch with a non-finite loss to a file, and raise TrainError.

        The error names the first affected sequence.
        """
        self.trained_modules.zero_grad(set_to_none=True)
        if is_finite:
            raise PeerRankFailedError(
                f"the loss of step {self._num_steps + 1} is not finite on another rank"
            )
        bad = ~torch.isfinite(losses.loss_per_entry(loss, entries).detach())
        index, token = (
            batch.owners[int(bad.int().argmax())].tolist()
            if bool(bad.any())
            else batch.owners[0].tolist()
        )
        self._dumps.mkdir(parents=True, exist_ok=True)
        path = self._dumps / f"not-finite-step-{self._num_steps + 1}.npz"
        arrays = {
            name: getattr(batch, name)
            for name in ("token_ids", "positions", "sources", "targets", "owners")
        }
        segments = np.array([[each.start, each.end, each.parent] for each in batch.segments])
        names = np.array([f"{index} {name}" for index, name in batch.sequences.items()])
        logprobs = entries.logprobs.detach().cpu().numpy()
        arrays |= {"segments": segments, "sequences": names, "logprobs": logprobs, **batch.streams}
        np.savez(path, **arrays)
        raise TrainError(
            f"the loss of step {self._num_steps + 1} is not finite at {int(bad.sum())} entries, "
            f"the first being token {token} of sequence {batch.sequences[index]}; the batch is in "
            f"{path}, the weights are unchanged"
        )

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)

    # --- precision and memory

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _check_fit(self, folder: Path, state: dict[str, Any]) -> None:
        """Raise ConfigError if a saved training state does not fit this run's model, critic or
        optimizer.

        The error names the first difference.
        """
        saved, ours = state["weights"], dict(self.weights())
        for name in sorted(saved.keys() | ours.keys()):
            shapes = [tuple(each[name].shape) if name in each else None for each in (saved, ours)]
            if shapes[0] != shapes[1]:
                raise ConfigError(
                    f"{folder} was saved from a different model: '{name}' is {shapes[0]} there, "
                    f"but {shapes[1]} in this run"
                )
        if (self.value_head is not None) != bool(state.get("value_head")):
            raise ConfigError(
                f"{folder} was saved {'without' if self.value_head is not None else 'with'} a "
                "critic, unlike this run: use the same algorithm"
            )
        there = msgspec.json.decode(state["optim"])
        here = msgspec.json.decode(msgspec.json.encode(self._optim))
        if there["kind"] != here["kind"]:
            raise ConfigError(
                f"{folder} was saved with optim.kind={there['kind']}, but this run has "
                f"{here['kind']}: use the same"
            )


def check_context_window(batch: Batch, window: int) -> None:
    """Raise ConfigError if a token sequence in ``batch`` is longer than the policy's context
    window."""
    longest = int(batch.positions.max()) + 1
    if longest > window:
        names = ", ".join(sorted(batch.sequences.values())[:3])
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit the policy's window of {window}; it is "
            f"one of: {names}"
        )


def _output_of(loss: LossSpec, batch: Batch) -> EntryOutput:
    if "rl" not in batch.denominators:
        return "no"
    if isinstance(loss.policy, CriticOnlyLoss):
        return "values alone"
    return "gradient" if loss.entropy else "value"


def value_head(width: int) -> nn.Linear:
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _trained_module(model: nn.Module, value_head: nn.Module | None) -> nn.Module:
    """Return one module with everything that the optimizer updates: the model and its value head,
    if there is one."""
    return (
        model
        if value_head is None or hasattr(model, VALUE_HEAD)
        else nn.ModuleDict({"model": model, VALUE_HEAD: value_head})
    )
