"""The expert load of a mixture over one optimizer step: when it is counted, and over which ranks.

    several batches   count every batch ── sum over ranks ── each batch: forward, backward
    one per rank      forward ── sum over ranks ── backward

A step's tokens count once each, however often packing computes them. Decides the weight of the
load-balancing loss. Not here: what routers chose, the loss and its gradient
(``models/routing.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any

import torch

from ramify.errors import ConfigError
from ramify.models.routing import ExpertLoad, MixtureRouters, RoutedCounts
from ramify.train.backends.optimizers import WeightLayout
from ramify.train.losses.loss import LossSpec
from ramify.types.sequence import Batch


class StepBalance:
    """The load-balancing loss of one model."""

    def __init__(self, model: Any, config: Any, layout: WeightLayout) -> None:
        """``config``: Hugging Face configuration. ``layout``: where the ranks are."""
        self._routers = MixtureRouters.of(model)
        is_on = getattr(config, "output_router_logits", False)
        self._configured = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) * is_on
        self._kind: str = getattr(config, "model_type", "this model")
        self._layout = layout
        self._step: RoutedCounts | None = None

    def count(self, batches: Many[Batch], loss: LossSpec, run: Callable[[Batch], object]) -> None:
        """Count the whole step before its first backward pass, if its loss needs that. ``run``: a
        forward pass. Raises ConfigError if there is a weight but no routers."""
        self._step = None
        if len(batches) < 2 or not self._weight(loss):
            return
        counts: RoutedCounts | None = None
        for batch in batches:
            with self.passing(batch), torch.no_grad():
                run(batch)
                found = self._counted()
                counts = found if counts is None else counts.plus(found)
        assert counts is not None
        self._step = self._summed(counts)

    @contextmanager
    def passing(self, batch: Batch) -> Iterator[None]:
        """Around the forward and backward pass of a batch, which is sent to the experts that an
        engine reported for it."""
        if self._routers is None:
            yield
            return
        weight, device = batch.token_weights, self._layout.device
        weight_T = torch.ones(len(batch)) if weight is None else torch.from_numpy(weight)
        self._routers.begin(weight_T.to(device), _given(batch, device))
        try:
            yield
        finally:
            self._routers.end()

    def load(self, loss: LossSpec) -> ExpertLoad | None:
        """The load of the batch whose forward pass is over. Its backward pass will add the gradient
        of the loss. Raises ConfigError if there is a weight but no routers."""
        weight = self._weight(loss)
        if self._routers is None:
            return None
        counts = self._counted()
        if weight:
            step = self._summed(counts) if self._step is None else self._step
            self._routers.balance(weight * step.balance_pull())
        return ExpertLoad(counts, weight)

    def _weight(self, loss: LossSpec) -> float:
        """Weight of the loss, by the recipe or else the checkpoint."""
        given = loss.router_aux_loss_coef
        weight = self._configured if given is None else given
        if weight and self._routers is None:
            raise ConfigError(
                f"loss.router_aux_loss_coef={weight:g} is for a mixture of experts whose routers "
                f"transformers records, and {self._kind} is none: leave it out"
            )
        return weight

    def _counted(self) -> RoutedCounts:
        assert self._routers is not None
        return self._routers.counted()

    def _summed(self, counts: RoutedCounts) -> RoutedCounts:
        return RoutedCounts(*map(self._layout.total, counts))


def _given(batch: Batch, device: torch.device) -> torch.Tensor | None:
    """[T, J] the experts of each token that predicts an entry, -1 for others; None if unknown."""
    if batch.routes is None:
        return None
    given_TJ = torch.full((len(batch), batch.routes.shape[1]), -1)
    is_known = batch.routes[:, 0] >= 0
    given_TJ[torch.from_numpy(batch.sources[is_known])] = torch.from_numpy(batch.routes[is_known])
    return given_TJ.to(device)
