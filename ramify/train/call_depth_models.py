"""Choose the model for each depth of a rollout, and enforce the budgets of frozen models.

    Run.depths = (DepthSpec(), DepthSpec(model="openai:gpt-5-mini"))          a frozen model below
    Run.depths = (DepthSpec(model="anthropic:…"), DepthSpec(temperature=0.8))       a frozen root
    Run.depths = (DepthSpec(), DepthSpec(model="children"))      two policies: see ``Run.policies``

The model ``policy`` is ``Run.policy``, and a name without a colon is one of ``Run.policies``. Each
policy learns from its own calls, as if the others were frozen. All other models are frozen: their
token ids are removed before the engine records their replies, so no loss can use them, but the tree
still shows which model answered each call.

Before a request is sent to a frozen model, its cost is reserved in the budgets of the step and of
the run, so neither is ever exceeded. The engine's client pool handles retries and rate limits, as
in ``ask_frozen_model``. Credit assignment is done in ``advantages/``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Client, Price, PromptRenderer, Request
from ramify.clients.providers import is_in_process
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.limits import BudgetLedger, Limits
from ramify.engine.prompt_scaffold import Scaffold, scaffold_of
from ramify.engine.resources import DepthOptions
from ramify.errors import ConfigError, LimitReached, ModelError, RequestRefusedError
from ramify.train.advantages.base import OptimizerStepAdvantages
from ramify.train.config_redaction import check_none_or_positive
from ramify.train.signals.judge_calls import BUDGET, POLICY, JudgeRequestReservation
from ramify.types.message import Reply, Usage
from ramify.types.trajectory import Call, Group, Trajectory, Turn

_TOTALS = ("frozen/cost_total", "frozen/calls_total", "frozen/tokens_total")


class DepthSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that answers the calls at one depth of the call tree, with its sampling settings.

    >>> train.DepthSpec(model="openai:gpt-5-mini", max_reply_tokens=512).model
    'openai:gpt-5-mini'
    """

    model: str = POLICY
    """``policy``: the policy that is trained, or the name of one of ``Run.policies``. Otherwise a
    frozen model, as ``provider:model``."""
    temperature: float | None = None
    """Sampling temperature of the model at this depth; None: the temperature of the rollouts."""
    max_reply_tokens: int | None = None
    """Maximum number of tokens per reply at this depth; None: ``limits.max_reply_tokens``."""
    max_turns: int | None = None
    """Maximum number of model requests per call at this depth; None: ``limits.max_turns``."""
    scaffold: str | None = None
    """Scaffold of the sessions at this depth; None for the run's scaffold. It must have the same
    protocol and stop strings as the run's scaffold, and the root cannot have its own."""
    tools: tuple[str, ...] | None = None
    """Names of the task's tools (``RolloutInitialState.tools``) that sessions at this depth can
    use; None: all."""

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ConfigError(
                "a depth has no model: give depths 'policy', or 'provider:model' for a frozen one"
            )
        check_none_or_positive("depths", "that of the rollouts", temperature=self.temperature)
        check_none_or_positive(
            "depths", "limits.max_reply_tokens", max_reply_tokens=self.max_reply_tokens
        )
        check_none_or_positive("depths", "limits.max_turns", max_turns=self.max_turns)

    def options(self) -> DepthOptions:
        """Return this depth's settings as ``DepthOptions``, the form in which the engine expects
        them."""
        scaffold = None if self.scaffold is None else scaffold_of(self.scaffold)
        return DepthOptions(
            max_turns=self.max_turns,
            max_reply_tokens=self.max_reply_tokens,
            scaffold=scaffold,
            tools=self.tools,
        )

    @property
    def is_frozen(self) -> bool:
        return ":" in self.model


class FrozenModelBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The budget shared by all frozen models (models that are not trained).

    Retries count, and so do failed requests that may be billed.
    """

    step_cost: float | None = None
    """Maximum cost in dollars of one training step and the evaluation before it; None: only
    ``run_cost`` applies."""
    run_cost: float | None = None
    """Maximum cost in dollars of the whole run, over all resumptions; None: no limit."""
    step_calls: int | None = None
    """Maximum number of requests per training step; None: no limit."""
    run_calls: int | None = None
    """Maximum number of requests in the whole run; None: no limit."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        check_none_or_positive("frozen", "no limit", **values)

    @property
    def limits_cost(self) -> bool:
        return self.step_cost is not None or self.run_cost is not None

    def ledger(self, of: str) -> BudgetLedger:
        """Return a new ledger that enforces the limits of one step (``of="step"``) or of the whole
        run (``of="run"``)."""
        cost, calls = getattr(self, f"{of}_cost"), getattr(self, f"{of}_calls")
        limits = Limits(
            max_calls=calls or BUDGET.max_calls,
            max_tokens=BUDGET.max_tokens,
            max_cost=cost or math.inf,
        )
        return BudgetLedger(limits, priced=True)


def check_depths(
    depths: Sequence[DepthSpec], max_depth: int, policies: Sequence[str], *, has_workers: bool
) -> None:
    """Raise ConfigError if the models chosen for the depths of a rollout are invalid.

    No model may be unknown, every policy must be trained, and frozen models cannot be combined with
    rollout workers, because workers cannot share a budget. ``policies`` holds the names of the
    policies other than ``policy``.
    """
    if not depths and not policies:
        return
    # The second model also answers ``llm_query``, whatever the depth.
    served = {each.model for each in depths[: max(2, max_depth + 1)]}
    for spec in depths:
        if not spec.is_frozen and spec.model not in (POLICY, *policies):
            known = ", ".join((POLICY, *policies))
            raise ConfigError(
                f"depths: unknown policy '{spec.model}': give one of {known}, or "
                "'provider:model' for a frozen model"
            )
    for name in policies:
        if name not in served:
            raise ConfigError(
                f"policies.{name} answers no depth up to limits.max_depth={max_depth}: give "
                f'depths an entry with {{"model": "{name}"}}, or remove it'
            )
    if POLICY not in served and (depths or policies):
        raise ConfigError(
            f"depths: no depth up to limits.max_depth={max_depth} has the model 'policy', so "
            "nothing would be trained: give it to one of them"
        )
    frozen = [each.model for each in depths if each.is_frozen]
    if has_workers and frozen:
        raise ConfigError(
            f"depths: rollout workers cannot share the budget of {frozen[0]}: remove the role "
            "rollouts from placement, or give each depth the model 'policy'"
        )


def check_scaffolds(depths: Sequence[DepthSpec], scaffold: Scaffold) -> None:
    """Raise ConfigError if a depth's scaffold is incompatible with the run's scaffold.

    Both must use the same protocol and the same stop texts.
    """
    for depth, spec in enumerate(depths):
        if spec.scaffold is None:
            continue
        if not depth:
            raise ConfigError(
                f"depths: the root's scaffold is the run's: set scaffold={spec.scaffold}, and "
                "leave it out of the first depth"
            )
        own = scaffold_of(spec.scaffold)
        if (own.protocol, own.stop) != (scaffold.protocol, scaffold.stop):
            raise ConfigError(
                f"depths: the scaffold '{spec.scaffold}' of depth {depth} has the protocol "
                f"{own.protocol}, and the run's has {scaffold.protocol}: give scaffolds with the "
                "same protocol and stop texts"
            )


def check_frozen_model_access(depths: Sequence[DepthSpec], frozen: FrozenModelBudget) -> None:
    """Raise ConfigError if a frozen model lacks an API key, or a known price although costs are
    limited."""
    pool = RateLimitedClientPool()
    for spec in depths:
        if spec.is_frozen and not is_in_process(spec.model):
            _connect_frozen(pool, spec, frozen)


def _connect_frozen(
    pool: RateLimitedClientPool, spec: DepthSpec, frozen: FrozenModelBudget
) -> Client:
    client = pool.client(spec.model)
    is_free = is_in_process(spec.model)
    if frozen.limits_cost and client.price is None and not is_free:
        raise ConfigError(
            f"depths: {spec.model} has no known price, so frozen.step_cost and frozen.run_cost "
            "cannot be enforced: give its price (docs/models.md), or limit step_calls and "
            "run_calls"
        )
    return client


class ModelsByCallDepth:
    """The models that answer calls at each depth of a run's rollouts.

    This class holds one client per depth and enforces the budgets of frozen models, i.e. models
    that are not trained.
    """

    def __init__(
        self,
        depths: Sequence[DepthSpec],
        spec: FrozenModelBudget,
        policy: Client,
        before: Mapping[str, float] | None = None,
        pool: RateLimitedClientPool | None = None,
        others: Mapping[str, Client] | None = None,
    ) -> None:
        """Create the clients that answer calls, one for each depth of the call tree.

        ``policy`` is the client of the trained policy; ``others`` holds the clients of further
        policies by name. If the run is resumed, ``before`` holds its latest metrics, from which the
        amount already spent is read. ``pool`` connects the frozen models; by default a new pool is
        created. Raises ConfigError for a model without a known price if costs are limited.
        """
        # The engine's pool retries; each of its attempts is one attempt here.
        self._pool = pool or RateLimitedClientPool(max_attempts=1)
        self._spec = spec
        self._step, self._run = spec.ledger("step"), spec.ledger("run")
        cost, calls, tokens = ((before or {}).get(name, 0.0) for name in _TOTALS)
        self._run.charge(Usage(input_tokens=int(tokens), calls=int(calls)), cost)
        self._counts: Counter[str] = Counter()
        policies = {**(others or {}), POLICY: policy}
        self.clients: list[Client] = [self._client(each, policies) for each in depths] or [policy]
        """The client of each depth. The last one also serves all deeper calls."""

    def _client(self, spec: DepthSpec, policies: Mapping[str, Client]) -> Client:
        if not spec.is_frozen:
            return CallDepthTemperatureClient(policies[spec.model], spec)
        return FrozenModelClient(_connect_frozen(self._pool, spec, self._spec), spec, self)

    async def ask_frozen_model(self, client: Client, request: Request) -> Reply:
        """Send one request to a frozen model, within the budgets of the step and of the run.

        Raises RequestRefusedError if a budget is exhausted, and ModelError if the request fails.
        """
        budget = JudgeRequestReservation(client, request, self._step, self._run)
        self._counts[f"frozen/{client.name}/calls"] += 1
        try:
            return await self._pool.ask(client, request, budget)
        except LimitReached as reached:
            self._counts[f"frozen/{client.name}/refused"] += 1
            raise RequestRefusedError(
                f"{client.name}: {reached} (the budget of the frozen models: frozen.step_cost, "
                "run_cost, step_calls, run_calls)"
            ) from None
        except ModelError:
            self._counts[f"frozen/{client.name}/failed"] += 1
            raise

    def take_step_metrics(self) -> dict[str, float]:
        """Return metrics of how frozen models were used in the current step, and begin the next
        step's budget.

        They cover the time since the last call of this method. The metrics include cost, calls and
        failures. Returns an empty dict until a frozen model has been asked for the first time.
        """
        step, run = self._step, self._run
        if not run.spent.calls and not any(run.refusals):
            return {}
        values = {name: float(value) for name, value in self._counts.items()}
        values |= {"frozen/cost": step.spent.cost, "frozen/calls": float(step.spent.calls)}
        values |= dict(zip(_TOTALS, (run.spent.cost, *map(float, run.spent[:2])), strict=True))
        # Requests of slow rollouts still in flight settle in the ledger that they were reserved in.
        self._step = self._spec.ledger("step")
        self._counts.clear()
        if any(run.refusals):
            values["frozen/exhausted"] = 1.0
        return values

    async def close(self) -> None:
        await self._pool.close()


class CallDepthTemperatureClient:
    """A client of the trained policy that samples with the temperature set for one depth of the
    call tree.

    Implements ``Client``.
    """

    def __init__(self, client: Client, spec: DepthSpec) -> None:
        self.name = client.name
        self.window = client.window
        self.price: Price | None = client.price
        self.rendering: PromptRenderer | None = getattr(client, "rendering", None)
        self._client = client
        self._spec = spec

    async def complete(self, request: Request) -> Reply:
        return await self._client.complete(_sampled_by(request, self._spec))

    async def close(self) -> None:
        """Do nothing, because the run owns the policy's client and closes it."""


class FrozenModelClient:
    """A client of a frozen model, i.e. a model that is not trained.

    It removes token ids from the replies, so that nothing is learned from them. Implements
    ``Client``.
    """

    def __init__(self, client: Client, spec: DepthSpec, models: ModelsByCallDepth) -> None:
        self.name = client.name
        self.window = client.window
        self.price: Price | None = client.price
        self._client = client
        self._spec = spec
        self._models = models

    async def complete(self, request: Request) -> Reply:
        request = _sampled_by(request, self._spec)
        sampling = msgspec.structs.replace(request.sampling, logprobs=False)
        request = msgspec.structs.replace(request, sampling=sampling, known=None)
        reply = await self._models.ask_frozen_model(self._client, request)
        return _without_ids(reply)

    async def close(self) -> None:
        """Do nothing, because ``ModelsByCallDepth`` closes the pool that all frozen models
        share."""


def _sampled_by(request: Request, spec: DepthSpec) -> Request:
    """Return ``request`` with the temperature configured for its call depth, unless it is a greedy
    request.

    A greedy request has temperature 0.
    """
    if spec.temperature is None or request.sampling.temperature == 0:
        return request
    sampling = msgspec.structs.replace(request.sampling, temperature=spec.temperature)
    return msgspec.structs.replace(request, sampling=sampling)


def temperature_by_call(depths: Sequence[DepthSpec], names: Mapping[str, str], usual: float) -> Any:
    """Return the temperature at which each call was sampled, for use in the loss.

    If no depth sets its own temperature, return the number ``usual``. Otherwise return a function
    from a call to its temperature. ``names`` maps each policy to the model name under which it
    answers calls.
    """

    def of(call: Call) -> float:
        by_depth = depths[min(call.depth, len(depths) - 1)]
        # Code in a session may ask for a model by name, which need not be that of the depth.
        named = (each for each in (by_depth, *depths) if names.get(each.model) == call.model)
        given = next(named, by_depth).temperature
        return usual if given is None else given

    return of if any(each.temperature is not None for each in depths) else usual


class OwnCallsAlgorithm(msgspec.Struct, frozen=True):
    """Wraps a policy's algorithm so that the policy learns only from the calls it answered.

    Implements ``Algorithm``.
    """

    outcome: Any
    """The algorithm that computes the advantages of the outcome, to which the terms are added: a
    name, a map with ``name`` and options, or an object."""
    model: str
    """Name under which the policy answers calls."""

    @property
    def has_group_baseline(self) -> bool:
        return bool(self.outcome.has_group_baseline)

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        own = mask_other_calls(groups, self.model)
        assigned: OptimizerStepAdvantages = self.outcome.assign_advantages(
            own, weights, every_token=every_token
        )
        return assigned


def mask_other_calls(groups: Sequence[Group], model: str) -> list[Group]:
    """Return a copy of ``groups`` in which only calls answered by ``model`` have token ids.

    The ids of all other calls are removed, so that nothing is learned from them.
    """
    return [
        msgspec.structs.replace(
            group,
            trajectories=[_keep_ids_of_model(each, model) for each in group.trajectories],
            greedy=None if group.greedy is None else _keep_ids_of_model(group.greedy, model),
        )
        for group in groups
    ]


def _keep_ids_of_model(trajectory: Trajectory, model: str) -> Trajectory:
    calls = [
        call
        if call.model == model
        else msgspec.structs.replace(call, turns=_drop_turn_ids(call.turns))
        for call in trajectory.calls
    ]
    return msgspec.structs.replace(trajectory, calls=calls)


def _drop_turn_ids(turns: Sequence[Turn]) -> list[Turn]:
    return [msgspec.structs.replace(turn, reply=_without_ids(turn.reply)) for turn in turns]


def _without_ids(reply: Reply) -> Reply:
    return msgspec.structs.replace(
        reply, prompt_ids=None, token_ids=None, logprobs=None, versions=None, kept=None
    )
