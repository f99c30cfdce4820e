"""An IPython kernel as a session: start it, run one cell, then many. Prints JSON; needs ipykernel
and jupyter_client.

    python benchmarks/sandbox_ipykernel.py STARTS CELLS
"""

from __future__ import annotations

import json
import sys
import time

from jupyter_client.manager import start_new_kernel

starts, cells = map(int, sys.argv[1:])
first_s: list[float] = []
cell_s: list[float] = []
for _ in range(starts):
    began = time.perf_counter()
    manager, client = start_new_kernel(kernel_name="python3")
    client.execute_interactive("x = 1", timeout=60)
    first_s.append(time.perf_counter() - began)
    for _ in range(cells // starts):
        began = time.perf_counter()
        client.execute_interactive("x = 1", timeout=60)
        cell_s.append(time.perf_counter() - began)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
print(json.dumps({"first_s": first_s, "cell_s": cell_s}))
