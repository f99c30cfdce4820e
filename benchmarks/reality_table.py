"""Runs the catalogue of misbehaviours, and the figures of ``reality.py`` about it.

    behaviour × protocol × always or once × plain or TLS ──▶ one run ──▶ Observation
                                                                 │
              faults of the row  ◀── compared with the Outcome ──┘

    python benchmarks/reality_table.py                   print every row that has faults
    python benchmarks/reality_table.py --only gzip       rows whose name contains this
    python benchmarks/reality_table.py --quick           each behaviour once, in turn

Each run asks one question, which the model answers directly, and is stored. Its server is a real one
on loopback. Waits run on a fast clock (``FastLoop``). Through LiteLLM, some behaviours have
another outcome, which ``docs/models.md`` names; their rows are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from figures import Figure
from reality_catalogue import BEHAVIOURS, HALF, RIGHT, TRUTH, Behaviour, Outcome, reply
from reality_providers import run_fast
from reality_wire import (
    ELSEWHERE,
    WIRES,
    MisbehavingServer,
    Step,
    Wire,
    WireRequest,
    http,
    said,
    self_signed,
    server_tls,
)

from ramify import RLM, Limits, RamifyError, RunSuspendedError, Stop, Store
from ramify.cli.parser import ExitCode, exit_code_of_run
from ramify.types.message import Usage

SPEED = 100.0
"""How much faster than real time the clock of a run is."""
GUARD_S = 60.0
"""Real seconds after which a run counts as hanging. The longest has one idle time-out."""
PATIENCE_S = {True: 3.0, False: 3000.0}
"""Patience by whether the server always misbehaves: enough for one retry, or for one time-out."""
LIMIT_S = 6000.0
"""Longest run, in seconds of its clock."""


class Row(NamedTuple):
    """One run of the table."""

    behaviour: Behaviour
    wire: Wire
    is_always: bool
    """False if only the first reply misbehaves."""
    is_tls: bool

    def __str__(self) -> str:
        how = "always" if self.is_always else "once"
        return f"{self.behaviour.name} | {self.wire.name} | {how} | {'TLS' if self.is_tls else 'plain'}"


class Observation(NamedTuple):
    """What happened in one run."""

    end: str
    """As in ``Outcome``, or ``hang``, or ``raw`` for an exception that is not ours."""
    answer: Any
    usage: Usage
    num_asked: int
    """Requests that the server received."""
    num_bad: int
    """Part of them that it answered wrongly."""
    asked_stream: bool
    """True if the first request asked for a stream."""
    error: str


async def observe(row: Row, folder: Path) -> Observation:
    """Run one row."""
    num_bad, asked_stream = 0, False

    def answer(asked: WireRequest) -> Iterable[Step]:
        nonlocal num_bad, asked_stream
        asked_stream = asked_stream or asked.wants_stream
        if asked.path == ELSEWHERE:  # a client follows a redirect
            num_bad += 1
            return [http(b"", 404)]
        if num_bad and not row.is_always:
            return said(row.wire, asked, row.wire.body(TRUTH))
        num_bad += 1
        end = row.behaviour.outcome(row.wire, asked.wants_stream).end
        return row.behaviour.answer(row.wire, asked, TRUTH if end == "answer" else HALF)

    tls = server_tls(*self_signed(folder)) if row.is_tls else None
    limits = Limits(patience_s=PATIENCE_S[row.is_always], max_seconds=LIMIT_S, max_cost=None)
    with tempfile.TemporaryDirectory() as place:
        store = Store(Path(place))
        async with MisbehavingServer(answer, tls) as server:
            end, found, error = "raw", None, ""
            try:
                async with RLM(row.wire.model(server.root), limits=limits, store=store) as rlm:
                    result = await rlm.start("text", "What is it?")
                found, end = result.answer, _end(result.stop, result.answer)
                error = result.error or ""
            except RunSuspendedError as suspended:
                end, error = "suspended", str(suspended)
            except RamifyError as failure:
                end, error = "error", str(failure)
            except Exception as failure:  # noqa: BLE001  this is what the table looks for
                error = f"{type(failure).__name__}: {failure}"
        runs = store.runs()
        usage = runs[0].usage if runs else Usage()
        return Observation(end, found, usage, server.num_asked, num_bad, asked_stream, error)


def _end(stop: Stop, answer: Any) -> str:
    code = exit_code_of_run(stop, answer)
    names = {ExitCode.ANSWERED: "answer", ExitCode.ERROR: "error", ExitCode.SUSPENDED: "suspended"}
    return names.get(code, "cut")


def faults(row: Row, seen: Observation) -> list[str]:
    """Differences between what was seen and what must follow; empty if there are none."""
    outcome = row.behaviour.outcome(row.wire, seen.asked_stream)
    end = outcome.end if row.is_always or not outcome.is_retried else "answer"
    found = []
    if seen.end != end:
        found.append(f"ended as {seen.end} instead of {end}: {seen.error[:160]}")
    if seen.end == "answer" and seen.answer not in (TRUTH, *row.behaviour.says):
        found.append(f"WRONG ANSWER {seen.answer!r:.80}")
    if not found:
        found += _booking_faults(outcome, seen, int(is_closed_by_litellm(row)))
    return found


def is_closed_by_litellm(row: Row) -> bool:
    """True if ``catalogue.LITELLM_OVER_TLS`` holds for the row."""
    return row.behaviour.closes and row.is_tls and row.wire.name == "litellm"


def _booking_faults(outcome: Outcome, seen: Observation, most_extra: int) -> list[str]:
    """Up to ``most_extra`` unknown calls may be booked for requests that were not received."""
    num_good = seen.num_asked - seen.num_bad
    booked = {"nothing": 0, "bound": seen.num_bad, "reported": seen.num_bad}[outcome.booked]
    unknown = seen.num_bad if outcome.booked == "bound" else 0
    got = (seen.usage.calls, seen.usage.unknown_calls)
    wanted = (booked + num_good, unknown)
    if any(got == (wanted[0] + extra, wanted[1] + extra) for extra in range(most_extra + 1)):
        return []
    return [f"booked (calls, unknown) {got} instead of {wanted} for {seen.num_asked} requests"]


def rows(quick: bool, only: str = "") -> Iterator[Row]:
    """Every row, or each behaviour once: protocols, always or once, and TLS take turns."""
    wires = [wire for wire in WIRES if _is_installed(wire)]
    chosen = [each for each in BEHAVIOURS if only in each.name]
    if not quick:
        for each in itertools.product(chosen, wires, (True, False), (False, True)):
            yield Row(*each)
        return
    combinations = list(itertools.product((False, True), (True, False), wires))
    for at, behaviour in enumerate(chosen):
        is_tls, is_always, wire = combinations[at % len(combinations)]
        yield Row(behaviour, wire, is_always, is_tls)


def _is_installed(wire: Wire) -> bool:
    return wire.name != "litellm" or importlib.util.find_spec("litellm") is not None


@contextlib.contextmanager
def environment(folder: Path) -> Iterator[None]:
    """Keys for every protocol, no proxy, and the servers' certificate as the only authority."""
    before = dict(os.environ)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        os.environ.pop(name, None)
        os.environ.pop(name.lower(), None)
    certificate, _ = self_signed(folder)
    os.environ.update(
        ANTHROPIC_API_KEY="sk-none", OPENAI_API_KEY="sk-none", SSL_CERT_FILE=str(certificate)
    )
    levels = {name: logging.getLogger(name).level for name in ("ramify", "LiteLLM", "asyncio")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of LiteLLM and its packages
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        os.environ.clear()
        os.environ.update(before)


def run_row(row: Row, folder: Path, speed: float = SPEED) -> Observation:
    if row.wire.name == "litellm":
        _forget_connections()

    async def guarded() -> Observation:
        async with asyncio.timeout(GUARD_S * speed):
            return await observe(row, folder)

    try:
        return run_fast(guarded(), speed)
    except TimeoutError:
        return Observation("hang", None, Usage(), 0, 0, False, "")


def _forget_connections() -> None:
    """LiteLLM keeps connections of event loops that are closed."""
    import litellm

    litellm.in_memory_llm_clients_cache.flush_cache()


def _warm_up(row: Row, folder: Path) -> None:
    """Make one good request on the real clock: the first one imports packages for many seconds."""
    good = reply("good", lambda wire, text: wire.body(text), RIGHT)
    run_row(row._replace(behaviour=good), folder, speed=1.0)


class Table(NamedTuple):
    """Outcome of all rows that were run."""

    num_rows: int
    num_weaker: int
    """Rows that docs/models.md names as weaker through LiteLLM."""
    faults: dict[str, list[str]]
    """By the text of the row."""
    ends: dict[str, str]


def run_table(which: Iterable[Row], verbose: bool = False) -> Table:
    found: dict[str, list[str]] = {}
    ends: dict[str, str] = {}
    num_weaker, warm = 0, set[str]()
    with tempfile.TemporaryDirectory() as place, environment(Path(place)):
        for row in which:
            if row.wire.name not in warm:
                warm.add(row.wire.name)
                _warm_up(row, Path(place))
            began = time.perf_counter()
            seen = run_row(row, Path(place))
            ends[str(row)] = seen.end
            is_weaker = bool(row.behaviour.weaker) and row.wire.name == "litellm"
            num_weaker += is_weaker or is_closed_by_litellm(row)
            wrong = faults(row, seen)
            if wrong:
                found[str(row)] = wrong
            if verbose or wrong:
                took = time.perf_counter() - began
                print(
                    f"{row} | {seen.end} {took:.1f} s | {'; '.join(wrong) or 'as expected'}",
                    flush=True,
                )
    return Table(len(ends), num_weaker, found, ends)


def misbehaviours(quick: bool) -> Iterator[Figure]:
    """Yield the figures of the table."""
    table = run_table(rows(quick))
    wrong = sum("WRONG" in fault for each in table.faults.values() for fault in each)
    ends = list(table.ends.values())
    yield Figure("behaviours in the table", len(BEHAVIOURS), "behaviours", {}, least=120)
    yield Figure("rows of the table that were run", table.num_rows, "runs", {})
    yield Figure("rows with exit code 0 and a wrong answer", wrong, "runs", {}, floor=0)
    yield Figure("rows that ended with a raw exception", ends.count("raw"), "runs", {}, floor=0)
    yield Figure("rows that took longer than the limits", ends.count("hang"), "runs", {}, floor=0)
    yield Figure("rows with another outcome or booking", len(table.faults), "runs", {}, floor=0)
    yield Figure("rows for which LiteLLM is documented as weaker", table.num_weaker, "runs", {})


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the catalogue of misbehaviours.")
    parser.add_argument("--quick", action="store_true", help="each behaviour once")
    parser.add_argument("--only", default="", help="rows of behaviours whose name contains this")
    parser.add_argument("--wire", default="", help="rows of this protocol")
    parser.add_argument("--short", action="store_true", help="only always, and without TLS")
    parser.add_argument("-v", action="store_true", help="print every row")
    options = parser.parse_args()
    chosen = (
        row
        for row in rows(options.quick, options.only)
        if options.wire in row.wire.name
        and not (options.short and (row.is_tls or not row.is_always))
    )
    table = run_table(chosen, options.v)
    print(f"{table.num_rows} rows, {len(table.faults)} with faults, {table.num_weaker} weaker")
    return 1 if table.faults else 0


if __name__ == "__main__":
    sys.exit(main())
