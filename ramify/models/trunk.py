"""A model as the trainer sees it: hidden states over one packed token axis, and logits of some of
them.

    DenseModel             forest attention
    transformers module    forest attention through its attention interface, if a probe gives the
                           numbers of separate rows; otherwise padded rows of whole paths, with its
                           own attention

A model whose layers keep a state (linear attention, state spaces), use a sliding window or scale
scores in a special way cannot run a forest. It runs on rows, and ``shares`` tells the packer so.

Legend: T tokens of a batch, N rows of hidden states, D width, B rows of a padded batch, L length of
the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ramify.errors import ConfigError
from ramify.models.dense import CausalAttention, DenseModel
from ramify.models.forest_attention import ForestAttention
from ramify.models.routing import MixtureRouters
from ramify.types.sequence import Segment


class ModelTrunk(Protocol):
    """A model without its loss: hidden states and logits."""

    @property
    def shares(self) -> bool:
        """Whether segments may have parents."""
        ...

    def scope(self) -> AbstractContextManager[None]:
        """Context for forward and backward passes; outside it the model is unchanged."""
        ...

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[Segment], rows_N: Tensor
    ) -> Tensor:
        """[N, D] after the last norm, of the rows ``rows_N``, [N] distinct indices."""
        ...

    def logits(self, h_ND: Tensor) -> Tensor:
        """fp32 [N, V]"""
        ...


def trunk_of(model: Any) -> ModelTrunk:
    """The trunk of a model in evaluation mode. Raises ConfigError if its output cannot be computed
    from hidden states."""
    if hasattr(model, "get_base_model"):  # PEFT's adapters are inside the model itself
        model = model.get_base_model()
    return DenseTrunk(model) if isinstance(model, DenseModel) else ModuleTrunk(model)


def fixed_shape_trunk(model: Any) -> ModelTrunk:
    """The trunk of a ``DenseModel`` in fixed shapes. Raises ConfigError for any other model."""
    from ramify.models.fixed_shapes import FixedShapeTrunk

    if not isinstance(model, DenseModel):
        raise ConfigError(
            f"deterministic=true: a {type(model).__name__} cannot compute in fixed shapes; dense "
            "Llama, Mistral, Qwen2 and Qwen3 models can"
        )
    return FixedShapeTrunk(model)


class DenseTrunk:
    """Trunk of a ``DenseModel``. Implements ``ModelTrunk``."""

    shares = True

    def __init__(self, model: DenseModel) -> None:
        self._model = model

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[Segment], rows_N: Tensor
    ) -> Tensor:
        return self._model.hidden(ids_T, positions_T, ForestAttention(segments), rows_N)

    def logits(self, h_ND: Tensor) -> Tensor:
        return self._model.logits(h_ND)


class ModuleTrunk:
    """Trunk of a transformers causal language model. Implements ``ModelTrunk``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._body = model.base_model
        # One for all trunks of a model: the trainer's, and the engine's if it samples from the
        # same module.
        self._current = getattr(self._body, "ramify_forest", None) or _CurrentAttention()
        for module in self._body.modules():
            module.ramify_forest = self._current
        self._routers = MixtureRouters.of(model)
        self._scale = _logit_scale(model.config)
        ids = torch.arange(7, device=model.device) * 13 % model.config.vocab_size
        self.shares = self._can_share(ids)
        self._check_head(ids)

    @contextmanager
    def scope(self) -> Iterator[None]:
        # The engine may sample from the same model, with its own attention and cache.
        original = self._model.config._attn_implementation
        if self.shares:
            register()
            self._model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self._model.set_attn_implementation(original)
            self._current.attend = None

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[Segment], rows_N: Tensor
    ) -> Tensor:
        return self._all_hidden(ids_T, positions_T, segments).index_select(0, rows_N)

    def _all_hidden(self, ids_T: Tensor, positions_T: Tensor, segments: Many[Segment]) -> Tensor:
        if not self.shares:
            return self._on_rows(ids_T, segments)
        return self.attended(ids_T, positions_T, ForestAttention(segments))

    def attended(self, ids_T: Tensor, positions_T: Tensor, attend: CausalAttention) -> Tensor:
        """[T, D], with attention by ``attend``; only inside ``scope``, and only if the model
        ``shares``."""
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

    def _on_rows(self, ids_T: Tensor, segments: Many[Segment]) -> Tensor:
        """Hidden states of whole paths, padded at their ends, which a causal model ignores."""
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
            self._routers.lay_out(index_BL, inside_BL)
        out = self._body(input_ids=ids_T[index_BL.to(ids_T.device)], use_cache=False)
        return cast(Tensor, out.last_hidden_state[inside_BL.to(ids_T.device)])

    def _can_share(self, ids: Tensor) -> bool:
        """Whether a small forest gives the same numbers as its separate paths."""
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
        forest = [Segment(0, 2, -1), Segment(2, 4, 0), Segment(4, 7, 0)]
        with torch.no_grad():
            expected = torch.stack(
                [self._on_rows(ids[row], [Segment(0, len(row), -1)])[-1] for row in rows]
            )
            self.shares = True
            try:
                with self.scope():
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
            row = [Segment(0, len(ids), -1)]
            with self.scope():
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
    """Holder from which the layers of one model get the attention of the current batch."""

    attend: CausalAttention | None = None


NAME = "ramify_forest"
"""Name of the attention function in transformers."""
_MEANINGLESS = {"sliding_window", "is_causal", "position_ids", "cache_position", "use_cache"}
"""Arguments of attention functions that have no effect here, like those that only request more
output (``output_…``); any other argument that is set is rejected."""


def register() -> None:
    """Register the function with transformers under ``NAME``; repeated calls do no harm."""
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
    """transformers' signature: query [1, H, T, d], key and value [1, K, T, d] -> [1, T, H, d]."""
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
    """Transformation of the logits in some families: soft caps (Gemma), a factor (Cohere), a
    divisor (Granite)."""
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
