"""A model as the trainer sees it: hidden states over one packed axis of tokens, and logits of some
of them.

    Dense                    forest attention
    transformers module      forest attention through its attention interface, where a probe gives the numbers of separate
                             rows; else padded rows of whole paths, by its own attention

A model whose layers keep a state (linear attention, state spaces), look through a sliding window or
scale scores in some way of their own cannot take a forest; it runs on rows, and ``shares`` tells
the packer so.

Legend: T tokens of a batch, N rows of hidden states, D width, B rows of a padded batch, L the
longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.models.dense import CausalAttention, DenseModel
from ramify.models.forest_attention import ForestAttention
from ramify.types.sequence import Segment


class ModelTrunk(Protocol):
    """Everything of a model but what a loss does with it."""

    @property
    def shares(self) -> bool:
        """Whether segments may have parents."""
        ...

    def scope(self) -> AbstractContextManager[None]:
        """To be entered around forward and backward passes; outside it the model is as it was."""
        ...

    def hidden(
        self, ids_T: Tensor, positions_T: Tensor, segments: Many[Segment], rows_N: Tensor
    ) -> Tensor:
        """[N, D] after the last norm: those of ``rows_N``, [N] different indices."""
        ...

    def logits(self, h_ND: Tensor) -> Tensor:
        """fp32 [N, V]"""
        ...


def trunk_of(model: Any) -> ModelTrunk:
    """The trunk of a model in evaluation mode; ConfigError where its output cannot be computed from
    hidden states."""
    if hasattr(model, "get_base_model"):  # adapters of PEFT stand inside the model itself
        model = model.get_base_model()
    return DenseTrunk(model) if isinstance(model, DenseModel) else ModuleTrunk(model)


class DenseTrunk:
    """Implements ``ModelTrunk``."""

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
    """Implements ``ModelTrunk`` for a causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._body = model.base_model
        # One for all trunks of a model: the trainer's, and the engine's where it samples from the
        # same module.
        self._current = getattr(self._body, "ramify_forest", None) or _CurrentAttention()
        for module in self._body.modules():
            module.ramify_forest = self._current
        self._scale = _logit_scale(model.config)
        ids = torch.arange(7, device=model.device) * 13 % model.config.vocab_size
        self.shares = self._can_share(ids)
        self._check_head(ids)

    @contextmanager
    def scope(self) -> Iterator[None]:
        # The model may be the one that the engine samples from, with its own attention and cache.
        own = self._model.config._attn_implementation
        if self.shares:
            register()
            self._model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self._model.set_attn_implementation(own)
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
        """[T, D], with attention by ``attend``; inside ``scope``, and only where it ``shares``."""
        # Stays set until the scope ends: layers that are computed again in the backward pass look
        # for it then.
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
        """Segments are whole paths: padded at their ends, where a causal model does not look."""
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
        out = self._body(input_ids=ids_T[index_BL.to(ids_T.device)], use_cache=False)
        return cast(Tensor, out.last_hidden_state[inside_BL.to(ids_T.device)])

    def _can_share(self, ids: Tensor) -> bool:
        """Whether a small forest gives what its paths give by themselves."""
        config = self._model.config
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            return False
        rows = [[0, 1, 2, 3], [0, 1, 4, 5, 6]]
        positions = torch.tensor([0, 1, 2, 3, 2, 3, 4], device=ids.device)
        forest = [Segment(0, 2, -1), Segment(2, 4, 0), Segment(4, 7, 0)]
        with torch.no_grad():
            wanted = torch.stack(
                [self._on_rows(ids[row], [Segment(0, len(row), -1)])[-1] for row in rows]
            )
            self.shares = True
            try:
                with self.scope():
                    h_TD = self._all_hidden(ids, positions, forest)
            except (NotImplementedError, ValueError, TypeError, RuntimeError):
                return False
        tolerance = 1e-3 if wanted.dtype == torch.float32 else 5e-2
        return bool(
            torch.allclose(h_TD[[3, 6]].float(), wanted.float(), rtol=tolerance, atol=tolerance)
        )

    def _check_head(self, ids: Tensor) -> None:
        with torch.no_grad():
            row = [Segment(0, len(ids), -1)]
            with self.scope():
                ours = self.logits(
                    self._all_hidden(ids, torch.arange(len(ids), device=ids.device), row)
                )
            theirs = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
        if not torch.allclose(ours, theirs, rtol=5e-2, atol=5e-2):
            raise ConfigError(
                f"{type(self._model).__name__}: its logits are not its output matrix times its "
                "hidden states (largest "
                f"difference {float((ours - theirs).abs().max()):.3g}), so its log-probabilities "
                "cannot be trained here"
            )


class _CurrentAttention:
    """Where the layers of one model find the attention of the batch that they compute."""

    attend: CausalAttention | None = None


NAME = "ramify_forest"
"""Of the attention function, as transformers knows it."""
_MEANINGLESS = {"sliding_window", "is_causal", "position_ids", "cache_position", "use_cache"}
"""Arguments of attention functions that change nothing here, as those that only ask for more output
(``output_…``) do not; any other that is set is refused."""


def register() -> None:
    """Make the function known to transformers, under ``NAME``; once is enough, more does no
    harm."""
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
        for name, each in more.items()
        if each is not None and name not in _MEANINGLESS and not name.startswith("output_")
    ]
    if unknown or attention_mask is not None or dropout:
        raise NotImplementedError(
            f"forest attention knows no {', '.join(unknown) or 'mask or dropout'}"
        )
    attend = module.ramify_forest.attend
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(module.layer_idx, *(x[0].transpose(0, 1) for x in (query, key, value)), scale)[
        None
    ], None


def _logit_scale(config: Any) -> Callable[[Tensor], Tensor]:
    """What some families do with logits: soft caps (Gemma), a factor (Cohere), a divisor
    (Granite)."""
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
