"""Figures of training beyond one process: ranks (``scale_fsdp.py``).

    python benchmarks/scale.py            a table; --quick for fewer rounds, within three minutes on two cores
    python benchmarks/scale.py --json     also prints, as its last line, {"figures": [{"name", "value", …}, …]}
    python benchmarks/scale.py --compile  also compiles layers, which takes minutes

Times are ratios of what was measured in turns on this machine. Exits with 1 where a figure misses what is promised.
"""

from __future__ import annotations

import argparse
import json
import sys

import scale_fsdp
from engine import show


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of training beyond one process.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--compile", action="store_true", help="compiled layers too")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on the last line")
    options = parser.parse_args()
    found = list(scale_fsdp.figures(options.quick, options.compile))
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
