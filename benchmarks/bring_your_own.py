"""Benchmarks of the parts that users bring: environments, data sets, rewards, recipes, and mistakes
in them.

    python benchmarks/bring_your_own.py                   print a table; --quick: within five minutes
    python benchmarks/bring_your_own.py --json            also print, as the last line, {"figures":
                                                          [{"name", …}, …]}
    python benchmarks/bring_your_own.py --only mistakes   only one part

    environments   Gymnasium and verifiers: two steps, equal returns   bring_your_own_environments.py
    frozen_lake    FrozenLake from random weights                      bring_your_own_frozen_lake.py
    data           data sets in foreign formats; resuming after SFT    bring_your_own_data.py
    rewards        a reward model over HTTP; batches of a step         bring_your_own_rewards.py
    quickstarts    quickstarts of other libraries, redone here         bring_your_own_quickstarts.py
    mistakes       wrong configurations                                bring_your_own_mistakes.py

Each part is a module of this folder with ``measure(quick) -> list[Figure]``. A part that cannot be
measured, for example because a package of it is not installed, is a figure that does not hold. The
exit code is 1 if a figure misses its limit. Not here: the measurements themselves.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback

from figures import Figure, show

PARTS = ("environments", "frozen_lake", "data", "rewards", "quickstarts", "mistakes")


def measure(part: str, quick: bool) -> list[Figure]:
    """Return the figures of one part. Its module is imported only now, because a part may need an
    extra that the other parts do not need."""
    try:
        figures: list[Figure] = importlib.import_module(f"bring_your_own_{part}").measure(quick)
    except Exception as error:  # noqa: BLE001 -- one part must not hide the figures of the others
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        return [Figure(f"{part}: not measured ({reason})", None, "", {}, 0)]
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
