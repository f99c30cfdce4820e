"""Stress of collective operations between ranks: do gathers over gloo corrupt the heap?

    python benchmarks/gather_stress.py                   as many gathers as 60 quick runs of
                                                         `scale.py --part ranks` make
    python benchmarks/gather_stress.py --checks          the same under glibc's malloc checks
    python benchmarks/gather_stress.py --gathers 50000   fewer

Two ranks train small models and gather every gradient after each step, and every 20 steps they
start another model, as those runs do. A rank that ends by a signal leaves a core file in the
current folder (if /proc/sys/kernel/core_pattern allows it) and ends the stress with an error that
names the signal. With ``--checks`` every freed block is overwritten, and every block is checked
when it is freed, so that a wild write is found where it happens and not when the block is used.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Iterator
from ctypes.util import find_library
from typing import Any

GATHERS = 60 * 3670
"""Gathers of one tensor in 60 runs of `scale.py --part ranks --quick`."""
STEPS = 20
_CHECKS = {"MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Stress of gathers between ranks.")
    parser.add_argument("--gathers", type=int, default=GATHERS, help="gathers of one tensor")
    parser.add_argument("--checks", action="store_true", help="use glibc's malloc checks")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.checks and "MALLOC_CHECK_" not in os.environ:
        debug = find_library("c_malloc_debug") or "libc_malloc_debug.so.0"
        environment = {**os.environ, **_CHECKS, "LD_PRELOAD": debug}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    began, done = time.monotonic(), 0
    for done in gathers(options.ranks, options.gathers):
        print(f"{done} gathers, {time.monotonic() - began:.0f} s", flush=True)
    print(f"no rank was lost in {done} gathers over {options.ranks} ranks")
    return 0


def gathers(num_ranks: int, wanted: int) -> Iterator[int]:
    """Gather ``wanted`` tensors; yields the number so far after each model."""
    import scale_fsdp
    import torch
    from transformers import AutoModelForCausalLM

    from ramify.train.backends.base import OptimizerSpec
    from ramify.train.backends.fsdp import FsdpRanks

    torch.set_num_threads(1)
    ranks = FsdpRanks(scale_fsdp.compute_spec(num_ranks))
    dense = scale_fsdp.dense().model.state_dict()
    gpt2: dict[str, Any] = AutoModelForCausalLM.from_config(scale_fsdp.GPT2).state_dict()
    gpt2 = {name: each for name, each in gpt2.items() if name != "lm_head.weight"}
    work, done = scale_fsdp.batches(300)[:3], 0
    kinds = [
        (scale_fsdp.DENSE, dense, scale_fsdp.OPTIM),
        (scale_fsdp.DENSE, dense, OptimizerSpec(kind="muon", lr=1e-4)),
        (scale_fsdp.GPT2, gpt2, scale_fsdp.OPTIM),
    ]
    try:
        while done < wanted:
            for config, start, optim in kinds:
                model = ranks.shard_model(config, start)
                backend = model.create_backend(optim)
                for _ in range(STEPS):
                    backend.forward_backward(work, scale_fsdp.LOSS)
                    for _ in range(10):  # the gathers are under stress, not the steps
                        done += sum(1 for _ in model.gradients())
                    backend.optim_step()
                done += sum(1 for _ in model.weights())
                model.drop()
                yield done
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.exit(main())
