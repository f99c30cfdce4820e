"""Benchmarks of the engine against `rlms`, `droste` and a bare aiohttp loop, with one scripted HTTP
server.

    python benchmarks/engine.py            print a table; figures are medians of interleaved rounds
    python benchmarks/engine.py --quick    fewer rounds, within five minutes on two cores
    python benchmarks/engine.py --json     also print, as the last line, {"figures": [{"name",
                                           "value", "unit", "against", "floor", "least", "holds"},
                                           …]}

In JSON, "against" maps the names of other libraries to their figures, "floor" is the promised
maximum and "least" the promised minimum; null if nothing is promised.

Absolute times depend on the machine and its load, so quote ratios. The other libraries need their
own environment, which ``benchmarks/setup`` makes. Without it their columns are empty, and a figure
that does not hold names what is missing (``--without-peers`` leaves it out). The exit code is 1 if a
figure misses its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import peers
from contexts import log_text
from figures import Figure, show
from processes import Server, run_command, run_side, scripted_server

Measured = dict[str, Any]
BIG = 50_000_000


class Bench(NamedTuple):
    """Inputs shared by all figures."""

    peers: str | None
    """Python interpreter that has the other libraries."""
    quick: bool
    instant: Server
    slow: Server
    """Server that answers after 50 ms."""
    patient: Server
    """Server that answers after 5 s."""

    def ramify(self, task: str, server: Server, **options: Any) -> Measured:
        return measured_or_empty(run_side(sys.executable, "ramify", task, server.url, **options))

    def raw(self, task: str, server: Server, **options: Any) -> Measured:
        return measured_or_empty(run_side(sys.executable, "raw", task, server.url, **options))

    def peer(self, name: str, task: str, server: Server, **options: Any) -> Measured:
        return (
            measured_or_empty(run_side(self.peers, name, task, server.url, **options))
            if self.peers
            else {}
        )

    def rounds(
        self, sides: dict[str, Callable[[], Measured]], rounds: int = 3
    ) -> dict[str, list[Measured]]:
        """Return the measurements of each side by round. The sides take turns, so that the
        machine's load affects all of them."""
        found: dict[str, list[Measured]] = {name: [] for name in sides}
        for _ in range(1 if self.quick else rounds):
            for name, side in sides.items():
                found[name] += [measured for measured in [side()] if measured]
        return found


def measured_or_empty(measured: Measured) -> Measured:
    """Return ``measured``, or an empty dict if it failed; failures are printed to stderr."""
    if "error" in measured:
        print(measured["error"], file=sys.stderr)
        return {}
    return measured


def middle(rounds: list[Measured], key: str = "seconds", skip: int = 0) -> float | None:
    """Return the median over all rounds, each without its first ``skip`` values."""
    values = [value for measured in rounds for value in measured[key][skip:]]
    return median(values) if values else None


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def present(**values: float | None) -> dict[str, float | str]:
    return {name: value for name, value in values.items() if value is not None}


# --- one completion -------------------------------------------------------------------------------


def three_turns(b: Bench) -> Iterator[Figure]:
    found = b.rounds(
        {
            "raw": lambda: b.raw("in_a_row", b.instant, count=3, repeats=20),
            "ramify": lambda: b.ramify("three", b.instant, repeats=21),
            "rlms": lambda: b.peer("rlms", "three", b.instant, repeats=4),
            "droste": lambda: b.peer("droste", "three", b.instant, repeats=21),
        }
    )
    raw = middle(found.pop("raw")) or 0.0
    warm = {name: middle(rounds, skip=1) for name, rounds in found.items()}
    over = {
        name: (seconds - raw) * 1e3 if seconds is not None else None
        for name, seconds in warm.items()
    }
    floor = over["droste"] if over["droste"] is not None else 10
    yield Figure(
        "3-turn completion, over its raw calls", over.pop("ramify"), "ms", present(**over), floor
    )
    first = first_completions(b, raw)
    yield Figure(
        "the first one of a process, over its raw calls",
        first.pop("ramify", None),
        "ms",
        present(**first),
        50,
    )


def first_completions(b: Bench, raw: float, processes: int = 5) -> dict[str, float | None]:
    """Return the median milliseconds of the first completion of a process over its raw calls, by
    side. Each side has several processes, which take turns: a single one varies by a third."""
    found: dict[str, list[Measured]] = {}
    for _ in range(processes):
        for name in ("ramify", "rlms", "droste"):
            side = b.ramify if name == "ramify" else partial(b.peer, name)
            if measured := side("three", b.instant, repeats=1):
                found.setdefault(name, []).append(measured)
    return {
        name: median(measured["seconds"][0] - raw for measured in each) * 1e3
        for name, each in found.items()
    }


def one_cell(b: Bench) -> Iterator[Figure]:
    found = b.rounds(
        {
            "ramify": lambda: b.ramify("cell", b.instant, repeats=3000),
            "rlms": lambda: b.peer("rlms", "cell", b.instant, repeats=3000),
        }
    )
    ours, theirs = (middle(found[name], skip=100) for name in ("ramify", "rlms"))
    against = present(**{"rlms, in its own process": theirs and theirs * 1e6})
    yield Figure(
        "`x = 1` in the child process, there and back", ours and ours * 1e6, "µs", against, 100
    )


def big_context(b: Bench) -> Iterator[Figure]:
    found = b.rounds(
        {
            "ramify": lambda: b.ramify("big", b.instant, repeats=3, chars=BIG),
            "rlms": lambda: b.peer("rlms", "big", b.instant, repeats=1, chars=BIG),
        }
    )
    ours, theirs = found["ramify"], found["rlms"]
    yield Figure(
        "50 MB context over 3 turns, logged", middle(ours), "s", present(rlms=middle(theirs)), 0.3
    )
    written, peers = (ratio(middle(side, "bytes"), BIG) for side in (ours, theirs))
    yield Figure("the same: written, in contexts", written, "×", present(rlms=peers), 1.01)


# --- many calls -----------------------------------------------------------------------------------


def twenty_children(b: Bench) -> Iterator[Figure]:
    found = b.rounds(
        {
            "ramify": lambda: b.ramify("children", b.instant, repeats=6),
            "rlms": lambda: b.peer("rlms", "children", b.instant, repeats=1),
        }
    )
    right = all(m["responses"] == ["20"] * len(m["responses"]) for m in found["ramify"])
    ours, theirs = middle(found["ramify"], skip=1), middle(found["rlms"])
    yield Figure("20 one-turn children", ours, "s", present(rlms=theirs), 0.15, right)


def five_hundred(b: Bench) -> Iterator[Figure]:
    for limit in (500, 64, 16):
        found = b.rounds(
            {
                "raw": lambda limit=limit: b.raw(
                    "at_once", b.slow, count=500, limit=limit, repeats=4
                ),
                "ramify": lambda limit=limit: b.ramify("calls", b.slow, limit=limit, repeats=4),
                "rlms": lambda limit=limit: b.peer("rlms", "calls", b.slow, limit=limit, repeats=2),
            }
        )
        seconds = {name: middle(rounds, skip=1) for name, rounds in found.items()}
        right = all(each > 0 for m in found["ramify"] for each in m["seconds"])
        if limit == 500:
            base, name, floor = (
                seconds["raw"],
                "500 sub-calls of 50 ms at limit 500, to the raw loop",
                1.3,
            )
        else:
            base, floor = math.ceil(500 / limit) * 0.05, 1.1
            name = f"500 sub-calls of 50 ms at limit {limit}, to ⌈500/{limit}⌉·50 ms"
        shares = {side: ratio(value, base) for side, value in seconds.items()}
        yield Figure(name, shares.pop("ramify"), "×", present(**shares), floor, right)


def thousand_runs(b: Bench) -> Iterator[Figure]:
    measured = b.ramify("many", b.patient, count=1000)
    right = measured.get("right") == 1000 and b.patient.served()["most_in_flight"] > 950
    yield Figure(
        "1,000 runs at once: memory of the host, per run", measured.get("mb"), "MB", {}, 1.0, right
    )


# --- the command ----------------------------------------------------------------------------------


def ask_command(b: Bench) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "big.log")
        file.write_text(log_text(1_000_000))
        url, home = (
            b.instant.url,
            {"RAMIFY_HOME": f"{folder}/home", "OPENAI_BASE_URL": b.instant.url},
        )
        ours = [
            *command(),
            "ask",
            "<<scene:three>>",
            str(file),
            "--model",
            "openai:test",
            "--quiet",
        ]
        theirs = [
            "--base-url",
            url,
            "--api-key",
            "none",
            "--model",
            "test",
            "-q",
            "<<scene:three.python>>",
            str(file),
        ]
        bills: dict[str, list[Any]] = {"ramify": [], "droste": []}
        for _ in range(8 if b.quick else 25):
            bills["ramify"].append(run_command(ours, **home))
            if b.peers:
                bills["droste"].append(
                    run_command([str(Path(b.peers).with_name("droste")), *theirs])
                )
    bad = [bill for side in bills.values() for bill in side if bill.code]
    if bad:
        measured_or_empty(
            {"error": f"{len(bad)} commands failed, the first with: {bad[0].output.strip()[-300:]}"}
        )
    for name, unit, key in (("wall time", "s", "seconds"), ("peak memory", "MB", "peak_mb")):
        value, base = (
            median(getattr(bill, key) for bill in side) if side else None for side in bills.values()
        )
        floor = 1.1 * base if base is not None else None
        yield Figure(
            f"`ramify ask` over 1 MB, 3 turns: {name}",
            value,
            unit,
            present(droste=base),
            floor,
            not bad,
        )


def command() -> list[str]:
    """Return the installed command, or its equivalent if it is not installed."""
    installed = Path(sys.executable).with_name("ramify")
    return (
        [str(installed)]
        if installed.exists()
        else [sys.executable, "-c", "from ramify.__main__ import main; main()"]
    )


def imports(b: Bench) -> Iterator[Figure]:
    code = {"ramify": "import ramify", "ramify.RLM": "import ramify; ramify.RLM"}
    peers = (
        {"rlms": "import rlm", "droste": "import droste", "httpx": "import httpx"}
        if b.peers
        else {}
    )
    found: dict[str, list[float]] = {name: [] for name in ("nothing", *code, *peers)}
    for _ in range(5 if b.quick else 15):
        for name in found:
            python = b.peers if name in peers else sys.executable
            found[name].append(
                run_command([str(python), "-c", {**code, **peers}.get(name, "pass")]).seconds
            )
    bare = median(found.pop("nothing"))
    took = {name: median(seconds) - bare for name, seconds in found.items()}
    ours, all_of_it = took.pop("ramify"), took.pop("ramify.RLM")
    yield Figure("import ramify", ours, "s", present(**took), 0.2)
    yield Figure("import ramify; ramify.RLM", all_of_it, "s", present(**took), took.get("rlms"))


# --- promises -------------------------------------------------------------------------------------


def endless_loop(b: Bench) -> Iterator[Figure]:
    limit_s = 1.0
    ours = b.ramify("loop", b.instant, limit_s=limit_s)
    never: dict[str, float | str] = {}
    if b.peers:
        stopped = run_side(b.peers, "rlms", "loop", b.instant.url, timeout_s=8, limit_s=limit_s)
        never = {
            "rlms": "never"
            if "not done" in stopped.get("error", "")
            else stopped["seconds"][0] - limit_s
        }
    over = ours["seconds"][0] - limit_s if ours else None
    yield Figure(
        "endless loop, past its limit, variables kept",
        over,
        "s",
        never,
        0.2,
        ours.get("kept", False),
    )
    whole = b.ramify("deadline", b.instant, limit_s=2.0)
    over = whole["seconds"][0] - 2.0 if whole else None
    yield Figure("a run in an endless loop, past its deadline", over, "s", {}, 0.2)


def served_by(server: Server, work: Callable[[], Measured]) -> tuple[Measured, dict[str, int]]:
    """Return the result of ``work``, and what the server counted while it ran."""
    before = server.served()
    measured = work()
    after = server.served()
    return measured, {name: after[name] - before[name] for name in after}


def usage_is_exact(b: Bench) -> Iterator[Figure]:
    sides = {
        "ramify": lambda: b.ramify("usage", b.instant),
        "rlms": lambda: b.peer("rlms", "usage", b.instant),
    }
    wrong: dict[str, float | None] = {}
    for name, work in sides.items():
        reported, served = served_by(b.instant, work)
        off = (
            [abs(reported[key] - served[key]) for key in ("input", "output")] if reported else None
        )
        wrong[name] = sum(off) if off is not None else None
    yield Figure(
        "usage with 20 children: tokens off the server's",
        wrong.pop("ramify"),
        "",
        present(**wrong),
        0,
    )
    reported, served = served_by(b.instant, lambda: b.ramify("lost", b.instant))
    missed = sum(served[key] - reported[key] for key in ("input", "output")) if reported else None
    marked = reported.get("unknown") == 1 and reported.get("calls") == served["answered"]
    missed = max(missed, 0) if missed is not None else None
    yield Figure("a dropped reply: tokens below the server's, marked", missed, "", {}, 0, marked)


def budgets_hold(b: Bench) -> Iterator[Figure]:
    beyond = []
    for limit in (3, 40, 150):
        reported, served = served_by(
            b.instant, lambda limit=limit: b.ramify("budget", b.instant, max_calls=limit)
        )
        beyond.append(max(served["answered"] - limit, 0) if reported else math.inf)
    yield Figure("budget of calls: requests beyond it", finite(max(beyond)), "", {}, 0)

    limit = 50_000
    ours, served = served_by(
        b.instant, lambda: b.ramify("budget", b.instant, max_tokens=limit, max_reply_tokens=256)
    )
    over = max(served["input"] + served["output"] - limit, 0) if ours else None
    _, served = served_by(b.instant, lambda: b.peer("rlms", "tokens", b.instant, limit=limit))
    against = present(
        rlms=max(served["input"] + served["output"] - limit, 0) if served["answered"] else None
    )
    yield Figure("budget of 50,000 tokens: tokens beyond it", over, "", against, 0)

    with tempfile.NamedTemporaryFile("w", suffix=".json") as prices:
        prices.write('{"openai:test": {"input": 1.0, "output": 4.0}}')
        prices.flush()
        options = {"env": {"RAMIFY_PRICES": prices.name}, "max_cost": 0.05, "max_reply_tokens": 256}
        ours, served = served_by(b.instant, lambda: b.ramify("budget", b.instant, **options))
    dollars = (served["input"] + 4 * served["output"]) / 1e6
    valid = bool(ours) and abs(ours["cost"] - dollars) < 1e-9
    yield Figure(
        "budget of $0.05: dollars beyond it",
        max(dollars - 0.05, 0.0) if ours else None,
        "$",
        {},
        0,
        valid,
    )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


FIGURES = {
    figure.__name__: figure
    for figure in (
        three_turns,
        twenty_children,
        five_hundred,
        one_cell,
        big_context,
        thousand_runs,
        ask_command,
        imports,
        endless_loop,
        usage_is_exact,
        budgets_hold,
    )
}


# --- the command line -----------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the engine beside those of others.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds; within five minutes on two cores"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=FIGURES, help=f"of: {', '.join(FIGURES)}"
    )
    peers.add_option(parser)
    options = parser.parse_args()
    figures = list(peers.check(options.without_peers, peers.BESIDE, "rlms", "droste"))
    others = None if options.without_peers else peers.BESIDE.python_with("rlms", "droste")
    with ExitStack() as stack:
        servers = (
            stack.enter_context(scripted_server(latency_s)) for latency_s in (0.0, 0.05, 5.0)
        )
        bench = Bench(others, options.quick, *servers)
        for name in options.only or FIGURES:
            for figure in FIGURES[name](bench):
                print(f"{figure.name}: {figure.value} {figure.unit}", file=sys.stderr)
                figures.append(figure)
    show(figures)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    return 1 if any(figure.holds is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
