"""Meter the model requests of external systems in ``ramify eval … --with SYSTEM``.

A metering endpoint counts and limits each client's spending.

    each model ──> one meter, which records every request
    each cell  ──> attempts of the system or runs of Ramify, each with its own key and equal budget

The budget of an attempt is that of --max-calls, --max-tokens and --max-cost, or the defaults of
Ramify's runs, and its time is --max-seconds. The attempts are in ``ramify/evaluate/systems/``, and
the meter is in ``ramify/serve/metering_proxy.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.parser import UsageError
from ramify.cli.settings import named_models

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.evaluate.evaluation_matrix import EvalMatrixCell, EvalMatrixPlan
    from ramify.evaluate.run_evaluation import AttemptRunner, RlmAttemptRunner
    from ramify.evaluate.systems.base import TaskItemBudget
    from ramify.serve.metering_proxy import MeteringProxy

_NOT_METERED = {
    "sub_model": "systems are compared with one model",
    "mcp": "only runs of Ramify would have these tools",
}
"""Setting that only Ramify's own runs support -> why it would make a comparison with other systems
unfair."""


def check_settings_comparable(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for settings that would make a comparison with other systems unfair.

    Only Ramify's own runs support such settings.
    """
    for name, why in _NOT_METERED.items():
        if settings.get(name):
            raise UsageError(f"--with and --{name.replace('_', '-')}: {why}; remove one of them")


class EvalMatrixMeteringProxies:
    """The metering proxies of an evaluation matrix, one for each model.

    They count the requests of external systems. There are none if only Ramify itself is evaluated.
    """

    def __init__(self, meters: Mapping[str, MeteringProxy]) -> None:
        self._meters = meters

    def attempt_maker(
        self, cell: EvalMatrixCell, rlm: RLM, runs: RlmAttemptRunner
    ) -> AttemptRunner:
        """Return an object that makes the attempts of one cell (combination) of the evaluation
        matrix.

        Attempts are made by an external system or by Ramify. If external systems take part, every
        attempt is metered and has the same budget.
        """
        from ramify.evaluate.systems.attempt import (
            MeteredRlmAttemptRunner,
            SystemAttemptRunner,
            parse_system,
        )

        if not self._meters:
            return runs
        meter = self._meters[cell.plan.model]
        budget = _budget_of(rlm, meter)
        if not cell.system:
            return MeteredRlmAttemptRunner(runs, meter.open_account, budget)
        system = parse_system(cell.system, timeout_s=rlm.limits.max_seconds)
        return SystemAttemptRunner(system, meter.open_account, budget)


@asynccontextmanager
async def open_meters(
    plan: EvalMatrixPlan, root: Path | None
) -> AsyncIterator[EvalMatrixMeteringProxies]:
    """Open a metering proxy for each model of an evaluation matrix during a ``with`` block.

    There are none if the evaluation has no external systems. Requests are recorded in the store's
    folder ``root``, unless it is None.
    """
    from ramify.http_server.machine_capacity import raise_descriptor_limit
    from ramify.serve.metering_proxy import MeteringProxy

    meters: dict[str, MeteringProxy] = {}
    async with contextlib.AsyncExitStack() as stack:
        for cell in plan.cells if plan.has_systems else ():
            name = cell.plan.model
            if name in meters:
                continue
            raise_descriptor_limit()
            record = None
            if root is not None:
                record = root / "meter" / f"{plan.id}-{len(meters)}.jsonl"
            model = named_models().get(name, name)
            meter = MeteringProxy(model, record=record)
            meters[name] = await stack.enter_async_context(meter)
        yield EvalMatrixMeteringProxies(meters)


def _budget_of(rlm: RLM, meter: MeteringProxy) -> TaskItemBudget:
    """Return the budget of each compared system, which equals the limits of Ramify's own runs."""
    from ramify.engine.limits import DEFAULT_MAX_COST
    from ramify.evaluate.systems.base import TaskItemBudget

    limits, is_priced = rlm.limits, meter.upstream_client.price is not None
    dollars = limits.max_cost or DEFAULT_MAX_COST
    return TaskItemBudget(limits.max_calls, limits.max_tokens, dollars if is_priced else None)
