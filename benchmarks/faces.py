"""Benchmarks of the front ends: the page (``faces_view.py``), the page of a run in detail
(``faces_run_page.py``), its list of runs (``faces_runs.py``), what people do at it
(``faces_tasks.py``), its layout (``faces_layout.py``), its verdict on training runs
(``faces_training.py``), labelling (``faces_labels.py``), sharing and comparing
(``faces_share.py``), its links between values and calls (``faces_provenance.py``), and the server
of runs (``faces_serve.py``).

    python benchmarks/faces.py            print a table; --quick for fewer rounds, within five
                                          minutes
    python benchmarks/faces.py --json     also print, as the last line, {"figures": [{"name", …},
                                          …]}

The exit code is 1 if a figure misses its limit. Without a browser the page's figures are empty.
"""

from __future__ import annotations

import argparse
import json
import sys

import faces_labels
import faces_layout
import faces_provenance
import faces_run_page
import faces_runs
import faces_serve
import faces_share
import faces_tasks
import faces_training
import faces_view
from figures import show


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of ramify view and ramify serve.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    parts = (
        faces_view,
        faces_run_page,
        faces_runs,
        faces_tasks,
        faces_layout,
        faces_training,
        faces_labels,
        faces_share,
        faces_provenance,
        faces_serve,
    )
    found = [figure for part in parts for figure in part.figures(options.quick)]
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
