"""The command ``ramify serve --meter MODEL``: a metering proxy in front of one model.

It counts what each client spends, and enforces a budget for each client.

    ramify serve --meter openai:gpt-5-mini --max-tokens 200000 --max-calls 50

The command prints the address and the key. Any client of OpenAI's APIs that uses them is metered.
Ctrl-C prints what each client has spent. The endpoint itself is in
``ramify/serve/metering_proxy.py``.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.cli.ask import check_prices_known
from ramify.cli.listen_options import SERVE_KEY, client_access_key, listen_address
from ramify.cli.parser import ExitCode, UsageError
from ramify.cli.settings import named_models
from ramify.cli.stop_signals import add_stop_handler
from ramify.cli.terminal_text import StderrMessageWriter, format_dollars, pluralize, write_stderr

if TYPE_CHECKING:
    from ramify.serve.metering_proxy import MeteringProxy
    from ramify.store.folder_store import Store

_OF_RUNS = ("keys", "max_runs", "max_body", "grace", "log", "record", "redact", "record_max_gib")
"""Options of a server that runs an RLM for each request. They do not apply to a metering proxy."""
_NO_KEY = "open_to_this_machine"


def serve_meter(
    settings: dict[str, Any],
    options: dict[str, Any],
    store: Store | None,
    port: int,
    notes: StderrMessageWriter,
) -> int:
    """Serve a metering proxy for the configured model until the user stops it.

    Raises UsageError for an option that the proxy does not support.
    """
    for name in (*_OF_RUNS, _NO_KEY):
        if options.get(name) is not None:
            why = "each caller of a meter needs a key" if name == _NO_KEY else "it is for runs"
            raise UsageError(f"--meter takes no --{name.replace('_', '-')}: {why}; remove it")
    if settings.get("sub_model"):
        raise UsageError("--meter serves one model: remove --sub-model")
    check_prices_known(settings, settings.get("max_cost"))
    asyncio.run(_serve(_meter(settings, options, store, port), notes))
    return ExitCode.ANSWERED


def _meter(
    settings: dict[str, Any], options: dict[str, Any], store: Store | None, port: int
) -> MeteringProxy:
    from ramify.evaluate.systems.base import TaskItemBudget
    from ramify.http_server.machine_capacity import raise_descriptor_limit
    from ramify.serve.metering_proxy import MeteringProxy

    raise_descriptor_limit()
    limits = {name: settings.get(name) for name in TaskItemBudget.__struct_fields__}
    record = Path(options["meter_record"]) if options["meter_record"] else None
    if record is None and store is not None:
        record = store.root / "meter" / time.strftime("%Y%m%d-%H%M%S.jsonl", time.gmtime())
    given = {"max_in_flight": settings.get("max_concurrency")}
    given["reply_tokens"] = settings.get("max_reply_tokens")
    return MeteringProxy(
        named_models().get(settings["model"], settings["model"]),
        budget=TaskItemBudget(**limits),
        name=options["name"] or "",
        address=listen_address(options, "meter", port, store.root if store is not None else None),
        key=client_access_key(options),
        record=record,
        **{name: value for name, value in given.items() if value is not None},
    )


async def _serve(meter: MeteringProxy, notes: StderrMessageWriter) -> None:
    stopped = asyncio.Event()
    add_stop_handler(stopped.set)
    async with meter:
        where = meter.address.socket
        shown = f" on the Unix socket {where}" if where is not None else ""
        write_stderr(
            f"metering {meter.upstream_client.name} at {meter.url}{shown} (Ctrl-C to stop)"
        )
        write_stderr(
            f"key: {meter.key} (send it as a bearer token; set {SERVE_KEY} to choose your own)"
        )
        if meter.record_path is not None:
            notes.say(f"ramify: requests are recorded in {meter.record_path}")
        await stopped.wait()
        for seat in meter.seats.values():
            await seat.cancel_requests()
            usage = seat.usage
            cost = "" if seat.cost is None else f", {format_dollars(seat.cost)}"
            refused = f", {seat.num_refused:,} refused" if seat.num_refused else ""
            write_stderr(
                f"{seat.name}: {pluralize(usage.calls, 'request')}, {usage.input_tokens:,} + "
                f"{usage.output_tokens:,} tokens{cost}{refused}"
            )
