"""The modes direct, free, plan and auto on the suites, with the model for offline use.

    python benchmarks/plans.py --suites         all suites at 8k, 32k and 128k, ≥ 100 items per cell;
                                                writes benchmarks/results/plans_suites.json
    python benchmarks/plans.py --quick          aggregation and pairs at 8k, a few items

The model is ``offline:default``, with its curve, its strategies and its errors as the suites published
them (``tests/extras/suites/test_offline.py`` pins them). It is calibrated first, as a user would do it.
Scores say how modes behave with this model. They say nothing about real models.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "plans_suites.json"
MODEL = "offline:default"
MODES = ("direct", "free", "plan", "auto")
ITEMS = {
    "oolong": 34,
    "oolong_pairs": 25,
    "planted": 34,
    "multihop": 25,
    "code_qa": 34,
    "mrcr": 34,
    "niah": 9,
}
"""Suite -> items of each family: at least 100 in all."""
LENGTHS = ("8k", "32k", "128k")
LONGEST = LENGTHS[-1]
BEATEN = ("oolong", "oolong_pairs")
"""Suites of aggregation and of pairs, on which plans must win."""
MAX_LOSS = 0.02
"""Score that ``auto`` may lose against the best single mode."""
_MORE_THAN_NOTHING = 1e-9


def on_suites(*, quick: bool) -> Iterator[Figure]:
    """Evaluate every cell, and compare the modes."""
    suites = BEATEN if quick else tuple(ITEMS)
    lengths = LENGTHS[:1] if quick else LENGTHS
    with tempfile.TemporaryDirectory() as home:
        calibrated = _calibrate(home, 10 if quick else 100)
        rows = {
            (suite, length): dict(_scores(home, suite, length, 3 if quick else ITEMS[suite]))
            for suite in suites
            for length in lengths
        }
    if not quick:
        table = [{"suite": s, "length": n, **modes} for (s, n), modes in rows.items()]
        data = {"date": f"{datetime.date.today()}", "part_tokens": calibrated, "cells": table}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    for (suite, length), modes in rows.items():
        # Without a scored attempt, as if all were wrong: the plan could not read the texts.
        score = {mode: (modes[mode]["score"] or {"value": 0.0})["value"] for mode in MODES}
        name = f"{suite} at {length}"
        if suite in BEATEN and (length == LONGEST or quick):
            for mode in ("plan", "auto"):
                for other in ("direct", "free"):
                    lead = score[mode] - score[other]
                    least = -MAX_LOSS if quick else _MORE_THAN_NOTHING
                    yield Figure(f"{name}: {mode} minus {other}", lead, "", {**score}, least=least)
        loss = max(score[mode] for mode in MODES if mode != "auto") - score["auto"]
        against = {**score, "items": float(modes["auto"]["items"])}
        yield Figure(f"{name}: best single mode minus auto", loss, "", against, MAX_LOSS)


def _calibrate(home: str, items: int) -> int:
    """Calibrate the model, and return the size of its parts."""
    done = _ramify(home, "calibrate", MODEL, "--items", str(items), "--yes", "--json", "-q")
    found: int = json.loads(done)["part_tokens"]
    return found


def _scores(home: str, suite: str, length: str, items: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (mode, its row over all families) of one suite and length."""
    out = _ramify(
        home,
        *("eval", suite, "--lengths", length, "--modes", ",".join(MODES), "--model", MODEL),
        *("--items", str(items), "--no-store", "--no-validate", "--yes", "--json", "-q"),
    )
    for line in out.splitlines():
        row = json.loads(line)
        if row.get("family") == "all":
            kept = ("items", "score", "difference", "calls", "cost", "reasons")
            yield row["mode"], {name: row[name] for name in kept}


def _ramify(home: str, *words: str) -> str:
    environment = {**os.environ, "RAMIFY_HOME": home, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ramify", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return done.stdout
