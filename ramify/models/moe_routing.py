"""Records, balances and replays the expert choices of mixture-of-experts routers.

It records the chosen experts, computes the load-balancing loss of a training step, and replays the
choices of an inference engine.

    router(hidden [R, D]) ── logits [R, E], weights [R, k], experts [R, k]

    L = c E sum_e F_e P_e / N²      F_e  how often the step's tokens chose expert e, in all layers
                                    P_e  the sum of the probabilities that they gave it
                                    N    tokens times layers

This is transformers' ``load_balancing_loss_func`` over a whole step. F has no gradient, so if a
separate pass counts it first, L becomes a sum over tokens, and it does not matter how a step is
divided into batches. The gradient of the loss is added where a router returns its weights, and
reaches the router in the model's own backward pass, even if layers are recomputed or their weights
are gathered again.

In a replay, the router's own ``topk`` returns the experts that were given for a token, so weights
and gradients are computed as they are for chosen experts. This module also matches the rows of a
router to the tokens of a batch, and decides when the load of a step is counted:

    several batches   count every batch ── sum over ranks ── each batch: forward, backward
    one per rank      forward ── sum over ranks ── backward

Each token of a step counts once, however often packing computes it.
``OptimizerWeightAccess.sum_over_ranks`` determines over which ranks the counts are summed.

Legend: T tokens of a batch, R rows of a router (T, or padded rows of paths), E experts, k of them
per token, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ramify.errors import ConfigError
from ramify.models.moe_shape import MoeLayout
from ramify.types.training_sequences import Batch


class ExpertRoutingCounts(NamedTuple):
    """How often the routers of a mixture-of-experts model chose each expert.

    The total probability of each expert is counted, too. The values are sums over tokens, so the
    counts of several batches can be added.
    """

    chosen_LE: Tensor
    """fp64 [layers, experts]: how often each expert was chosen, where each choice counts with the
    token's weight."""
    probability_E: Tensor
    """fp64 [experts]: each expert's probability, summed over tokens and layers."""
    num_tokens: Tensor
    """fp64 scalar: sum of the tokens' weights."""

    def plus(self, other: ExpertRoutingCounts) -> ExpertRoutingCounts:
        return ExpertRoutingCounts(*(a + b for a, b in zip(self, other, strict=True)))

    def balance_loss(self) -> Tensor:
        """Return the load-balancing loss of a training step as a scalar tensor.

        If all experts are used equally, the loss equals the number of experts per token.
        """
        chosen_E, num = self._chosen_counts()
        return len(chosen_E) * (chosen_E * self.probability_E).sum() / num.square()

    def balance_loss_gradient(self) -> Tensor:
        """Return the gradient of the load-balancing loss with respect to a token's expert
        probabilities.

        It has one number per expert.
        """
        chosen_E, num = self._chosen_counts()
        return len(chosen_E) * chosen_E / num.square()

    def _chosen_counts(self) -> tuple[Tensor, Tensor]:
        return self.chosen_LE.sum(0), (self.num_tokens * len(self.chosen_LE)).clamp(min=1e-9)


class ExpertLoad(NamedTuple):
    """Counts of how often each expert was chosen in a training step, or in a part of it.

    Metrics of the expert load are computed from them.
    """

    counts: ExpertRoutingCounts
    weight: float
    """Weight of the load-balancing loss."""

    def merged(self, other: ExpertLoad) -> ExpertLoad:
        return ExpertLoad(self.counts.plus(other.counts), self.weight)

    def to_cpu(self) -> ExpertLoad:
        """Return a copy of the expert load whose tensors are on the CPU."""
        return ExpertLoad(ExpertRoutingCounts(*(each.cpu() for each in self.counts)), self.weight)

    def metrics(self) -> dict[str, float]:
        """Return metrics of how evenly tokens were distributed over the experts.

        They describe one training step. ``router_loss`` is the load-balancing loss times its
        weight, and is left out if the weight is 0. ``expert_load_max`` is the load of a layer's
        busiest expert divided by the layer's mean load, in the worst layer. ``experts_idle`` is the
        number of experts, over all layers, that got no token.
        """
        chosen_LE = self.counts.chosen_LE
        mean_L = chosen_LE.mean(1).clamp(min=1e-9)
        found = {
            "expert_load_max": float((chosen_LE.max(1).values / mean_L).max()),
            "experts_idle": float((chosen_LE == 0).sum()),
        }
        if self.weight:
            found["router_loss"] = self.weight * float(self.counts.balance_loss())
        return found


def moe_layout(model: Any) -> MoeLayout | None:
    """Return how many experts a transformers model has, and which layers contain them.

    Returns None if the model has no routers of a known kind.
    """
    routers = MoeRouters.of_model(model)
    if routers is None:
        return None
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    return MoeLayout(routers.layers, num_layers, routers.top_k, routers.num_experts)


class MoeRouters:
    """The routers of a mixture-of-experts model.

    Between ``begin_counting`` and ``reset``, their choices are counted, and given experts may
    replace them. At other times, they work as usual.
    """

    def __init__(self, routers: list[nn.Module], layers: tuple[int, ...]) -> None:
        """Attach hooks to the routers of a mixture-of-experts model.

        ``layers`` holds each router's layer index.
        """
        self.layers = layers
        self.top_k: int = getattr(routers[0], "top_k", 0)
        self.num_experts: int = getattr(routers[0], "num_experts", 0)
        self._num_layers = len(routers)
        self._weight_T: Tensor | None = None
        self._row_R: Tensor | None = None
        self._counts: dict[int, tuple[Tensor, Tensor]] | None = None
        self._pull_E: Tensor | None = None
        self._given_LTk: Tensor | None = None
        self._replays: list[_GivenExperts] = []
        self._recorded: dict[int, Tensor] | None = None
        for layer, router in enumerate(routers):
            router.register_forward_pre_hook(partial(self._begin_replay, layer))
            router.register_forward_hook(self._end_replay, always_call=True)
            router.register_forward_hook(partial(self._record_routing, layer))

    @classmethod
    def of_model(cls, model: Any) -> MoeRouters | None:
        """Return the mixture-of-experts routers of a transformers model.

        Every call for the same model returns the same object. Returns None if the model has no
        routers of a known kind.
        """
        if hasattr(model, "get_base_model"):  # PEFT's adapters are inside the model itself
            model = model.get_base_model()
        body = getattr(model, "base_model", model)
        if (known := getattr(body, "ramify_routers", None)) is not None:
            return known  # type: ignore[no-any-return]
        recorded = getattr(model, "_can_record_outputs", None) or {}
        recorded = recorded or getattr(body, "_can_record_outputs", None) or {}
        kind = recorded.get("router_logits")
        kind = getattr(kind, "target_class", kind)
        if not isinstance(kind, type):
            return None
        router_class = cast("type[nn.Module]", kind)
        found = {
            name: module
            for name, module in body.named_modules()
            if isinstance(module, router_class)
        }
        if not found:
            return None
        layers = tuple(
            next((int(part) for part in name.split(".") if part.isdigit()), 0) for name in found
        )
        body.ramify_routers = cls(list(found.values()), layers)
        return body.ramify_routers  # type: ignore[no-any-return]

    def start_recording(self) -> None:
        """Start recording which experts the routers choose in each forward pass."""
        self._recorded = {}

    def recorded_experts(self, rows_N: Tensor | None) -> list[tuple[int, ...]]:
        """Return the experts that the latest forward pass chose for each token, layer by layer.

        The experts are given by their ids. ``rows_N`` selects tokens by index, and defaults to all
        tokens.
        """
        assert self._recorded is not None
        chosen_TLk = torch.stack([self._recorded[each] for each in sorted(self._recorded)], 1)
        chosen_NLk = chosen_TLk if rows_N is None else chosen_TLk[rows_N]
        return list(map(tuple, chosen_NLk.flatten(1).tolist()))

    def begin_counting(self, weight_T: Tensor, given_TJ: Tensor | None = None) -> None:
        """Start counting the routers' choices of experts in the next forward pass.

        ``weight_T`` is the weight with which each token counts.

        If ``given_TJ`` is set, it holds L x k expert ids for each token, which replace the router's
        choices; -1 lets the router choose. Raises ConfigError if the number of ids does not fit the
        model's layers.
        """
        self._weight_T, self._row_R, self._counts = weight_T, None, {}
        self._given_LTk = None
        if given_TJ is not None:
            if given_TJ.shape[1] % self._num_layers:
                raise ConfigError(
                    f"the engine reports {given_TJ.shape[1]} experts per token, which do not fit "
                    f"{self._num_layers} layers with experts: it serves a different model"
                )
            self._given_LTk = given_TJ.view(len(given_TJ), self._num_layers, -1).transpose(0, 1)

    def set_token_layout(self, token_BL: Tensor, inside_BL: Tensor) -> None:
        """Set the positions of the tokens in a padded batch for the next forward pass.

        ``token_BL`` is the index of the token at each position, and ``inside_BL`` is False for
        padding.
        """
        if self._weight_T is not None:
            self._row_R = torch.where(inside_BL, token_BL, -1).flatten().to(self._weight_T.device)

    def finish_counting(self) -> ExpertRoutingCounts:
        """Stop counting expert choices, and return the counts of the forward pass.

        Raises ConfigError if a router did not return logits, weights and experts.
        """
        counts, self._counts = self._counts or {}, None
        assert self._weight_T is not None
        if len(counts) < self._num_layers:
            raise ConfigError(
                f"{self._num_layers - len(counts)} of {self._num_layers} routers do not return "
                "logits, weights and experts: this mixture-of-experts model cannot be trained"
            )
        chosen, probability = zip(*(counts[layer] for layer in sorted(counts)), strict=True)
        total = self._weight_T.sum(dtype=torch.float64)
        return ExpertRoutingCounts(torch.stack(chosen), torch.stack(probability).sum(0), total)

    def set_balance_gradient(self, pull_E: Tensor) -> None:
        """Include the gradient of the load-balancing loss in the next backward pass.

        ``pull_E`` is the gradient with respect to one token's expert probabilities.
        """
        self._pull_E = pull_E

    def reset(self) -> None:
        """Stop counting, replaying and balancing the routers' choices of experts.

        The routers work as usual until the next ``begin_counting``.
        """
        self._weight_T = self._row_R = self._counts = self._pull_E = self._given_LTk = None

    def _weight(self) -> Tensor:
        """Return the token weight of each row that a router processes.

        Padding has the weight zero.
        """
        assert self._weight_T is not None
        if self._row_R is None:
            return self._weight_T
        return torch.where(self._row_R >= 0, self._weight_T[self._row_R.clamp(min=0)], 0.0)

    def _begin_replay(self, layer: int, module: nn.Module, given: Any) -> None:
        if self._given_LTk is None:
            return
        given_Rk = self._given_LTk[layer]
        if self._row_R is not None:
            inside_R1 = (self._row_R >= 0)[:, None]
            given_Rk = torch.where(inside_R1, given_Rk[self._row_R.clamp(min=0)], -1)
        self._replays.append(_GivenExperts(given_Rk))
        self._replays[-1].__enter__()  # type: ignore[no-untyped-call]

    def _end_replay(self, module: nn.Module, given: Any, output: Any) -> None:
        if not self._replays:
            return
        replay = self._replays.pop()
        replay.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not replay.is_used:
            raise ConfigError(
                f"{type(module).__name__} does not choose its experts with a single top-k over "
                "all of them: remove rl.rollout.replay_routes"
            )

    def _record_routing(self, layer: int, module: nn.Module, given: Any, output: Any) -> Any:
        if not isinstance(output, tuple) or len(output) != 3:
            return None
        if self._weight_T is None:
            if self._recorded is not None:
                self._recorded[layer] = output[2].detach()
            return None
        logits_RE, weights_Rk, experts_Rk = output
        weight_R = self._weight()
        if self._counts is not None:  # not in a pass that recomputes a layer
            with torch.no_grad():
                self._counts[layer] = _counts(logits_RE, experts_Rk, weight_R.double())
        if not torch.is_grad_enabled() or not logits_RE.requires_grad:
            return None
        balanced = _Balanced.apply(weights_Rk, logits_RE, weight_R, self)  # type: ignore[no-untyped-call]
        return logits_RE, balanced, experts_Rk

    def balance_loss_gradient(self, logits_RE: Tensor, weight_R: Tensor) -> Tensor | None:
        """Return the gradient of the load-balancing loss with respect to a router's logits.

        Returns None if ``set_balance_gradient`` was not called.
        """
        if self._pull_E is None:
            return None
        p_RE = logits_RE.float().softmax(-1)
        pull_E = self._pull_E.to(p_RE)
        # The gradient of <pull, softmax(logits)> with respect to the logits.
        gradient = p_RE * (pull_E - (p_RE * pull_E).sum(-1, keepdim=True))
        return (weight_R[:, None] * gradient).to(logits_RE.dtype)


def _counts(logits_RE: Tensor, experts_Rk: Tensor, weight_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return how often each expert was chosen, and the sum of its routing probabilities.

    Each row counts with its weight.
    """
    chosen_E = weight_R.new_zeros(logits_RE.shape[-1])
    chosen_E.index_add_(0, experts_Rk.flatten(), weight_R.repeat_interleave(experts_Rk.shape[-1]))
    return chosen_E, (logits_RE.float().softmax(-1) * weight_R[:, None]).sum(0)


class _GivenExperts(TorchFunctionMode):
    """Context manager that replaces a router's choice of experts with preset ones.

    It changes the result of the router's ``topk``. The router's own choice is kept where the given
    id is -1.
    """

    def __init__(self, given_Rk: Tensor) -> None:
        super().__init__()
        self._given_Rk = given_Rk
        self.is_used = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found[1].shape != self._given_Rk.shape:
            return found
        self.is_used = True
        experts_Rk = torch.where(self._given_Rk >= 0, self._given_Rk, found[1])
        return torch.return_types.topk((args[0].gather(-1, experts_Rk), experts_Rk))


class _Balanced(torch.autograd.Function):
    """An autograd function that adds the load-balancing gradient to a router's logits.

    Routing weights pass through it unchanged. Its backward pass adds the gradient of the
    load-balancing loss to that of the router's logits.
    """

    @staticmethod
    def forward(
        ctx: Any, weights_Rk: Tensor, logits_RE: Tensor, weight_R: Tensor, routers: MoeRouters
    ) -> Tensor:
        ctx.save_for_backward(logits_RE, weight_R)
        ctx.routers = routers
        return weights_Rk.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, ctx.routers.balance_loss_gradient(*ctx.saved_tensors), None, None


class RouterLoadBalancingLoss:
    """The load-balancing loss for a model's routers, computed for one optimizer step at a time."""

    def __init__(self, routers: MoeRouters, total: Callable[[Tensor], Tensor]) -> None:
        """Create the load-balancing loss for a model's routers.

        ``total`` sums a tensor over the data-parallel ranks.
        """
        self._routers = routers
        self._total = total
        self._weight = 0.0
        self._step: ExpertRoutingCounts | None = None

    def count_expert_choices(
        self, batches: Many[Batch], weight: float, device: torch.device, run: Callable[[Batch], Any]
    ) -> None:
        """Count how often the batches of an optimizer step choose each expert.

        Call this at the beginning of the step, because the gradient needs the counts of the whole
        step. This runs all forward passes once in advance. It is skipped if there is only one batch
        or the loss has no weight. ``run`` runs the forward pass of one batch.
        """
        self._weight = weight
        self._step = None
        if len(batches) < 2 or not weight:
            return
        counts: ExpertRoutingCounts | None = None
        for batch in batches:
            with self.track_batch_routing(batch, device), torch.no_grad():
                run(batch)
                found = self._routers.finish_counting()
                counts = found if counts is None else counts.plus(found)
        assert counts is not None
        self._step = self._total_counts(counts)

    @contextmanager
    def track_batch_routing(self, batch: Batch, device: torch.device) -> Iterator[None]:
        """Make the routers count and replay a batch's expert choices, within a ``with`` block.

        Within it, the routers count the batch's tokens, and use the experts that an engine reported
        for them, if any.
        """
        weight = batch.token_weights
        weight_T = torch.ones(len(batch)) if weight is None else torch.from_numpy(weight)
        self._routers.begin_counting(weight_T.to(device), _reported_experts(batch, device))
        try:
            yield
        finally:
            self._routers.reset()

    def collect_expert_load(self) -> ExpertLoad:
        """Return the expert load of the forward pass that has just run.

        Also prepare the batch's backward pass to add the gradient of the load-balancing loss.
        """
        counts = self._routers.finish_counting()
        if self._weight:
            step = self._total_counts(counts) if self._step is None else self._step
            self._routers.set_balance_gradient(self._weight * step.balance_loss_gradient())
        return ExpertLoad(counts, self._weight)

    def _total_counts(self, counts: ExpertRoutingCounts) -> ExpertRoutingCounts:
        return ExpertRoutingCounts(*map(self._total, counts))


def configured_balance_weight(config: Any) -> float:
    """Return the weight of the load-balancing loss in a Hugging Face configuration, or 0 if the
    loss is off."""
    is_on = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) * is_on


def _reported_experts(batch: Batch, device: torch.device) -> Tensor | None:
    """Return the experts that the engine reported for each token, as one row of ids per token.

    Only tokens in the loss have reported experts. Other tokens have -1. Returns None if the batch
    has no such reports.
    """
    if batch.routes is None:
        return None
    given_TJ = torch.full((len(batch), batch.routes.shape[1]), -1)
    is_known = batch.routes[:, 0] >= 0
    given_TJ[torch.from_numpy(batch.sources[is_known])] = torch.from_numpy(batch.routes[is_known])
    return given_TJ.to(device)
