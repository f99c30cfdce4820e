"""The figures of ``reality.py`` about mutation tests of the critical modules.

They are read from ``benchmarks/results/mutations.json``, which ``scripts/mutate`` writes, with the
commit of each module: running all mutants takes hours. A second commit is that of newer tests,
which were run on the survivors alone. A module of which some were not run does not
hold, whatever the share of the others. A mutant that changes no behaviour does not count;
``benchmarks/results/equivalent_mutants.json`` has the reasons.

    python benchmarks/reality_mutations.py     print a table
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from figures import Figure, show

RESULTS = Path(__file__).parent / "results" / "mutations.json"
CRITICAL = (
    "ramify/engine/limits.py",
    "ramify/engine/model_requests.py",
    "ramify/engine/truncated_replies.py",  # was a part of model_requests.py
    "ramify/engine/reply_cache_lookup.py",
    "ramify/store/journal.py",
    "ramify/store/durable_files.py",
    "ramify/clients/rate_limited_requests.py",
    "ramify/http_client/http_transport.py",
    "ramify/train/losses/base.py",
)


def measure(quick: bool) -> list[Figure]:
    """Figures of the stored result."""
    modules: dict[str, Any] = json.loads(RESULTS.read_text())["modules"] if RESULTS.exists() else {}
    figures = []
    for path in CRITICAL:
        result = modules.get(path)
        if result is None or result["run"] == result["equivalent"]:
            figures.append(Figure(f"{path}: mutants, not run", None, "killed", {}, least=0.95))
            continue
        counted, left = result["run"] - result["equivalent"], result["mutants"] - result["run"]
        not_run = f", {left} not run" if left else ""
        again = result.get("survivors_again_at", "")
        commits = f"{result['commit']}{again and f' and {again}'}"
        name = f"{path} at {commits}: share of {counted} mutants{not_run}"
        share = result["killed"] / counted
        figures.append(Figure(name, share, "killed", {}, least=0.95, valid=not left))
    return figures


if __name__ == "__main__":
    show(measure(True))
