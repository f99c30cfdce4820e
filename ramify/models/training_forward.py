"""The trainer's interface to a model: hidden states and log-probabilities of packed batches.

Log-probabilities are computed for only some of a batch's tokens.

    DenseModel             forest attention
    transformers module    forest attention through its attention interface, if a probe gives the
                           numbers of separate rows; otherwise padded rows of whole paths, with its
                           own attention

A model cannot run on a forest of shared sequences if its layers keep a state (linear attention,
state spaces), use a sliding window or scale scores in a special way. Such a model runs on padded
rows, and ``can_share_prefixes`` is false so that the packer does not share prefixes.

``compute_logprobs_and_entropies`` gives log-probabilities of entries without holding all of their
logits at once:

    h_ED ── chunk ── logits [n, V] ── / temperature ── sampling support ── log-softmax of targets

The output matrix is applied only at entries, in chunks. If all logits together exceed
``max_elements``, each chunk's logits are recomputed in the backward pass, so that memory is bounded
by a chunk and not by the vocabulary. All numbers from the logits on are fp32.

Legend: T tokens of a batch, N rows of hidden states, D width, B rows of a padded batch, L length of
the longest; E entries, n entries of a chunk, V vocabulary, j targets per entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ramify.errors import ConfigError
from ramify.models.batch_invariant_forward import BLOCK, BatchInvariantTrunk, apply_in_blocks
from ramify.models.dense import CausalAttentionKernel, DenseModel
from ramify.models.forest_attention import ForestAttention, LayerRowSelection
from ramify.models.moe_routing import MoeRouters
from ramify.models.onednn_products import is_faster_on_cpu, rounded_rows
from ramify.types.training_sequences import PackedTokenSegment

_LOG2_E = math.log2(math.e)
NEVER = -1e30
"""Logit of an id outside the sampling support. It is finite, so that multiplying it by zero gives
zero."""

Logits = Callable[[Tensor], Tensor]
"""Function that computes fp32 logits [n, V] from hidden states [n, D]."""


class ModelWithoutLoss(Protocol):
    """Interface of a language model for the trainer, without the loss.

    It computes hidden states and logits for packed batches.
    """

    @property
    def can_share_prefixes(self) -> bool:
        """Return True if the sequences of a batch may share their common prefixes."""
        ...

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context manager that prepares the model for forward and backward passes.

        Outside of it, the model is unmodified.
        """
        ...

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[PackedTokenSegment], rows_N: Tensor
    ) -> Tensor:
        """Return the hidden states after the final norm, one row for each token in ``rows_N``.

        These indices are distinct and ascending.
        """
        ...

    def logits(self, h_ND: Tensor) -> Tensor:
        """Return fp32 logits, one row per hidden state."""
        ...


def wrap_for_training(model: Any) -> ModelWithoutLoss:
    """Wrap a model for use by the trainer.

    The model must be in evaluation mode. Raises ConfigError if its output cannot be computed from
    its hidden states.
    """
    if hasattr(model, "get_base_model"):  # PEFT's adapters are inside the model itself
        model = model.get_base_model()
    return DenseTrunkRunner(model) if isinstance(model, DenseModel) else TransformersTrunk(model)


def fixed_shape_trunk(model: Any) -> ModelWithoutLoss:
    """Return an object that runs a ``DenseModel`` in fixed shapes, so that results do not depend on
    the batch.

    Raises ConfigError for any other kind of model.
    """
    if not isinstance(model, DenseModel):
        raise ConfigError(
            f"deterministic=true is not supported for {type(model).__name__}: use a dense Llama, "
            "Mistral, Qwen2 or Qwen3 model, or remove it"
        )
    return BatchInvariantTrunk(model)


class DenseTrunkRunner:
    """Runs a ``DenseModel`` for the trainer, with attention over forests of shared sequences.

    Implements ``ModelWithoutLoss``.
    """

    can_share_prefixes = True

    def __init__(self, model: DenseModel) -> None:
        self._model = model

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[PackedTokenSegment], rows_N: Tensor
    ) -> Tensor:
        needed = LayerRowSelection(self._model.shape.num_layers - 1, rows_N)
        ids_T, positions_T, segments = pad_rows_for_onednn(ids_T, positions_T, segments)
        padding = rows_N[-1:].expand(_missing_rows(rows_N))
        attend = ForestAttention(segments, needed=needed)
        h_ND = self._model.hidden(ids_T, positions_T, attend, torch.cat([rows_N, padding]))
        return h_ND[: len(rows_N)]

    def logits(self, h_ND: Tensor) -> Tensor:
        missing = _missing_rows(h_ND)
        return self._model.logits(F.pad(h_ND, (0, 0, 0, missing)) if missing else h_ND)[: len(h_ND)]


def pad_rows_for_onednn(
    ids_T: Tensor, positions_T: Tensor, segments: Many[PackedTokenSegment]
) -> tuple[Tensor, Tensor, Many[PackedTokenSegment]]:
    """Add unused tokens to a batch so that oneDNN's matrix products are fast.

    They form a segment at the end (see ``onednn_products``). Does nothing if that makes no
    difference.
    """
    missing, num = _missing_rows(ids_T), len(ids_T)
    if not missing:
        return ids_T, positions_T, segments
    unused = PackedTokenSegment(num, num + missing, -1)
    return F.pad(ids_T, (0, missing)), F.pad(positions_T, (0, missing)), [*segments, unused]


def _missing_rows(x_N: Tensor) -> int:
    """Return how many rows to append to a tensor so that oneDNN's matrix products are fast."""
    if x_N.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not is_faster_on_cpu():
        return 0
    return rounded_rows(len(x_N)) - len(x_N)


class TransformersTrunk:
    """Runs a causal language model of transformers for the trainer.

    It uses forest attention if the model supports it, and padded rows otherwise. Implements
    ``ModelWithoutLoss``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._body = model.base_model
        # One for all trunks of a model: the trainer's, and the engine's if it samples from the
        # same module.
        self._current = getattr(self._body, "ramify_forest", None) or _CurrentAttention()
        for module in self._body.modules():
            module.ramify_forest = self._current
        self._routers = MoeRouters.of_model(model)
        self._scale = _logit_scale(model.config)
        ids = torch.arange(7, device=model.device) * 13 % model.config.vocab_size
        self.can_share_prefixes = self._can_share(ids)
        self._check_head(ids)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        # The engine may sample from the same model, with its own attention and cache.
        original = self._model.config._attn_implementation
        if self.can_share_prefixes:
            register_attention()
            self._model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self._model.set_attn_implementation(original)
            self._current.attend = None

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[PackedTokenSegment], rows_N: Tensor
    ) -> Tensor:
        return self._all_hidden(ids_T, positions_T, segments).index_select(0, rows_N)

    def _all_hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[PackedTokenSegment]
    ) -> Tensor:
        if not self.can_share_prefixes:
            return self._on_rows(ids_T, segments)
        return self.hidden_with_attention(ids_T, positions_T, ForestAttention(segments))

    def hidden_with_attention(
        self, ids_T: Tensor, positions_T: Tensor, attend: CausalAttentionKernel
    ) -> Tensor:
        """Return each token's final hidden state, computed with the given attention.

        The model's own attention is not used. Call this only within ``forward_context``, and only
        for a model that supports shared prefixes.
        """
        # Stays set until the scope ends: layers that are recomputed in the backward pass need it
        # again.
        self._current.attend = attend
        out = self._body(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=None,
            use_cache=False,
        )
        return cast(Tensor, out.last_hidden_state[0])

    def logits(self, h_ND: Tensor) -> Tensor:
        return self._scale(self._model.get_output_embeddings()(h_ND).float())

    def _on_rows(self, ids_T: Tensor, segments: Many[PackedTokenSegment]) -> Tensor:
        """Return the hidden states of whole sequences, computed as one padded batch.

        Each sequence is one row. Padding at the end of a row does not affect a causal model.
        """
        if any(segment.parent >= 0 for segment in segments):
            raise ConfigError(
                "this model runs on rows, but the batch has shared segments: pack it with "
                "share=False"
            )
        lengths = [segment.end - segment.start for segment in segments]
        index_BL = torch.zeros(len(segments), max(lengths), dtype=torch.long)
        inside_BL = torch.zeros(index_BL.shape, dtype=torch.bool)
        for row, (segment, length) in enumerate(zip(segments, lengths, strict=True)):
            index_BL[row, :length] = torch.arange(segment.start, segment.end)
            inside_BL[row, :length] = True
        if self._routers is not None:
            self._routers.set_token_layout(index_BL, inside_BL)
        out = self._body(input_ids=ids_T[index_BL.to(ids_T.device)], use_cache=False)
        return cast(Tensor, out.last_hidden_state[inside_BL.to(ids_T.device)])

    def _can_share(self, ids: Tensor) -> bool:
        """Return True if sequences can share prefixes without a change in the model's results.

        A small forest is compared with its separate sequences.
        """
        config = self._model.config
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            return False
        # A convolution mixes neighbors on the token axis, whatever their paths. When freshly
        # initialized, it has too little effect for the comparison below.
        convolutions = (each for each in self._body.modules() if isinstance(each, nn.Conv1d))
        if any(each.kernel_size != (1,) for each in convolutions):
            return False
        rows = [[0, 1, 2, 3], [0, 1, 4, 5, 6]]
        positions = torch.tensor([0, 1, 2, 3, 2, 3, 4], device=ids.device)
        forest = [
            PackedTokenSegment(0, 2, -1),
            PackedTokenSegment(2, 4, 0),
            PackedTokenSegment(4, 7, 0),
        ]
        with torch.no_grad():
            expected = torch.stack(
                [self._on_rows(ids[row], [PackedTokenSegment(0, len(row), -1)])[-1] for row in rows]
            )
            self.can_share_prefixes = True
            try:
                with self.forward_context():
                    h_TD = self._all_hidden(ids, positions, forest)
                    other = ids.clone()
                    other[2:4] = ids[[3, 2]]
                    moved_TD = self._all_hidden(other, positions, forest)
            except (NotImplementedError, ValueError, TypeError, RuntimeError):
                return False
        is_exact = expected.dtype == torch.float32
        tolerance, leak = (1e-3, 1e-5) if is_exact else (5e-2, 1e-2)
        # Other tokens on the sibling's path must not reach this path, however little.
        return bool(
            torch.allclose(h_TD[[3, 6]].float(), expected.float(), rtol=tolerance, atol=tolerance)
            and torch.allclose(h_TD[4:].float(), moved_TD[4:].float(), rtol=leak, atol=leak)
        )

    def _check_head(self, ids: Tensor) -> None:
        with torch.no_grad():
            row = [PackedTokenSegment(0, len(ids), -1)]
            with self.forward_context():
                logits = self.logits(
                    self._all_hidden(ids, torch.arange(len(ids), device=ids.device), row)
                )
            expected = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
        if not torch.allclose(logits, expected, rtol=5e-2, atol=5e-2):
            raise ConfigError(
                f"{type(self._model).__name__}: its logits are not its output matrix times its "
                "hidden states (largest difference "
                f"{float((logits - expected).abs().max()):.3g}), so its log-probabilities cannot "
                "be trained here"
            )


class _CurrentAttention:
    """The attention function for the current batch, stored where all layers of a model can find
    it."""

    attend: CausalAttentionKernel | None = None


NAME = "ramify_forest"
"""Name under which the attention function is registered in transformers."""
_MEANINGLESS = {"sliding_window", "is_causal", "position_ids", "cache_position", "use_cache"}
"""Arguments of attention functions that have no effect here. The same holds for arguments that
request more output (``output_…``). Any other argument that is set is rejected."""


def register_attention() -> None:
    """Register Ramify's attention function with transformers under the name ``ramify_forest``.

    Repeated calls are harmless.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention for transformers with the current forest attention.

    Queries, keys and values are [1, heads, tokens, head size]. Returns the output [1, tokens,
    heads, head size] and no attention weights.
    """
    unknown = [
        name
        for name, argument in more.items()
        if argument is not None and name not in _MEANINGLESS and not name.startswith("output_")
    ]
    if unknown or attention_mask is not None or dropout:
        raise NotImplementedError(
            f"forest attention does not support {', '.join(unknown) or 'mask or dropout'}"
        )
    attend = module.ramify_forest.attend
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(module.layer_idx, *(x[0].transpose(0, 1) for x in (query, key, value)), scale)[
        None
    ], None


def _logit_scale(config: Any) -> Callable[[Tensor], Tensor]:
    """Return the function with which a model family scales its logits.

    It is a soft cap (Gemma), a factor (Cohere) or a divisor (Granite). For other models, the
    function changes nothing.
    """
    cap, factor = (
        getattr(config, "final_logit_softcapping", None),
        getattr(config, "logit_scale", None),
    )
    divisor = getattr(config, "logits_scaling", None)
    if cap:
        return lambda z: cap * torch.tanh(z / cap)
    if factor and factor != 1:
        return lambda z: z * factor
    return (lambda z: z / divisor) if divisor and divisor != 1 else (lambda z: z)


# --- log-probabilities of entries


class LmHeadRequest(NamedTuple):
    """A request for log-probabilities and entropies of the tokens that contribute to the loss.

    Each entry is a token that contributes to the loss, and has target ids, a temperature and a
    sampling support.
    """

    targets: Tensor
    """[E, j] target ids."""
    temperature: Tensor | None = None
    """[E] temperatures, or None if all are 1."""
    kept: tuple[Tensor, Tensor] | None = None
    """The sampling supports, as offsets [E + 1] and ids. The support of entry e is ``ids[offsets[e]
    : offsets[e + 1]]``, and empty if all ids were allowed."""
    entropy: Literal["no", "value", "gradient"] = "no"


def compute_logprobs_and_entropies(
    h_ED: Tensor,
    logits: Logits,
    request: LmHeadRequest,
    num_ids: int,
    max_elements: int,
    *,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the target log-probabilities and the entropy (in nats) of each token in the loss.

    An entry is a token that contributes to the loss. Entropies that were not requested are zero.
    Logits are computed in chunks of at most ``max_elements`` numbers, to limit memory.

    ``num_ids`` is the vocabulary size. If ``fixed`` is true, chunks have the same fixed shape as in
    the engine of a deterministic run.
    """
    num = len(h_ED)
    size = BLOCK if fixed else max(1, max_elements // num_ids)
    if num <= size and not fixed:
        return _compute_chunk(h_ED, logits, request)
    if fixed and num <= max(1, max_elements // num_ids):
        pairs = [
            _fixed_chunk(
                h_ED[at : at + size], logits, _slice_request(request, at, min(at + size, num))
            )
            for at in range(0, num, size)
        ]
        return torch.cat([each for each, _ in pairs]), torch.cat([each for _, each in pairs])
    parts = []
    for start in range(0, num, size):
        part = _slice_request(request, start, min(start + size, num))
        parts.append(
            checkpoint(
                _fixed_chunk if fixed else _compute_chunk,
                h_ED[start : start + size],
                logits,
                part,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    logprobs, entropies = zip(*cast("list[tuple[Tensor, Tensor]]", parts), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _compute_chunk(h_nD: Tensor, logits: Logits, request: LmHeadRequest) -> tuple[Tensor, Tensor]:
    z_nV = logits(h_nD)
    if request.temperature is not None:
        z_nV = z_nV / request.temperature[:, None]
    if request.kept is not None:
        z_nV = z_nV.masked_fill(_outside_support(*request.kept, z_nV.shape[1]), NEVER)
    if z_nV.device.type == "cpu" and request.entropy != "gradient":
        wanted = request.entropy == "value"
        logprobs, entropies = _LogprobsOnCpu.apply(z_nV, request.targets, wanted)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", (logprobs, entropies))
    total_n1 = z_nV.logsumexp(-1, keepdim=True)
    logprobs = z_nV.gather(1, request.targets) - total_n1
    return logprobs, _entropy(z_nV, total_n1, request)


class _LogprobsOnCpu(torch.autograd.Function):
    """Computes the target log-probabilities and entropies of logits on a CPU.

    Log-probabilities are [n, j]. Entropies are [n] and have no gradients. The probabilities are
    computed once for all purposes, and as powers of 2, because a CPU computes ``exp2`` in a fourth
    of the time of ``exp``.
    """

    @staticmethod
    def forward(
        ctx: Any, z_nV: Tensor, targets_nj: Tensor, needs_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        highest_n1 = z_nV.amax(-1, keepdim=True)
        p_nV = (z_nV - highest_n1).mul_(_LOG2_E).exp2_()
        sums_n1 = p_nV.sum(-1, keepdim=True)
        total_n1 = sums_n1.log().add_(highest_n1)
        entropies = torch.zeros_like(total_n1[:, 0])
        if needs_entropy:
            entropies = total_n1[:, 0] - torch.linalg.vecdot(p_nV, z_nV) / sums_n1[:, 0]
        ctx.save_for_backward(p_nV, sums_n1, targets_nj)
        ctx.mark_non_differentiable(entropies)
        return z_nV.gather(1, targets_nj) - total_n1, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        p_nV, sums_n1, targets_nj = ctx.saved_tensors
        dz_nV = p_nV * (grads[0].sum(-1, keepdim=True) / -sums_n1)
        return dz_nV.scatter_add_(1, targets_nj, grads[0]), None, None


def _fixed_chunk(h_nD: Tensor, logits: Logits, request: LmHeadRequest) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies of at most ``BLOCK`` tokens.

    They are computed as one padded block.
    """
    num = len(h_nD)
    z_nV = apply_in_blocks(logits, h_nD)
    if request.temperature is not None:
        z_nV = z_nV / request.temperature[:, None]
    if request.kept is not None:
        z_nV = z_nV.masked_fill(_outside_support(*request.kept, z_nV.shape[1]), NEVER)
    logprobs_nV = apply_in_blocks(lambda z: z.log_softmax(-1), z_nV)
    entropy = _entropy(logprobs_nV, logprobs_nV.new_zeros(num, 1), request)
    return logprobs_nV.gather(1, request.targets), entropy


def _entropy(z_nV: Tensor, total_n1: Tensor, request: LmHeadRequest) -> Tensor:
    """Return the entropy of each row of logits.

    The log-sum-exp of each row is given. Returns zeros if entropies were not requested.
    """
    if request.entropy == "no":
        return torch.zeros_like(total_n1[:, 0])
    with torch.set_grad_enabled(request.entropy == "gradient" and torch.is_grad_enabled()):
        return total_n1[:, 0] - ((z_nV - total_n1).exp() * z_nV).sum(-1)


def _outside_support(offsets: Tensor, ids: Tensor, num_ids: int) -> Tensor:
    """Return a mask [entries, ids] of the token ids that the sampling settings ruled out.

    Rows of unrestricted entries are all False.
    """
    sizes = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(sizes), device=ids.device), sizes)
    outside = (sizes > 0)[:, None].repeat(1, num_ids)
    outside[rows, ids[offsets[0] : offsets[-1]]] = False
    return outside


def _slice_request(request: LmHeadRequest, start: int, end: int) -> LmHeadRequest:
    temperature = None if request.temperature is None else request.temperature[start:end]
    kept = None if request.kept is None else (request.kept[0][start : end + 1], request.kept[1])
    return LmHeadRequest(request.targets[start:end], temperature, kept, request.entropy)
