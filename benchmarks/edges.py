"""Benchmarks of the edges: what strangers can do to a run from outside the jail.

    python benchmarks/edges.py                   print a table; --quick: within five minutes
    python benchmarks/edges.py --json            also print, as the last line, {"figures":
                                                 [{"name", …}, …]}
    python benchmarks/edges.py --only replies    only one part

    rendezvous   processes of another user beside training runs      edges_rendezvous.py
    http         strangers at the ports of our servers               edges_http.py
    terminal     hostile text through every command, on a terminal   edges_terminal.py
    replies      hostile replies of a model server                   edges_replies.py

Each part is a module of this folder with ``measure(quick) -> list[Figure]``. The exit code is 1 if
a figure misses its limit. Decides which parts run. Not here: the attacks themselves.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from figures import Figure, show

PARTS = [
    name
    for name in ("rendezvous", "http", "terminal", "replies")
    if Path(__file__).with_name(f"edges_{name}.py").exists()
]


def measure(part: str, quick: bool) -> list[Figure]:
    """Return the figures of one part. Its module is imported only now, because a part may need an
    extra that the other parts do not need."""
    figures: list[Figure] = importlib.import_module(f"edges_{part}").measure(quick)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, within five minutes")
    parser.add_argument("--only", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    parts = [options.only] if options.only else PARTS
    found = [figure for part in parts for figure in measure(part, options.quick)]
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
