"""Freed memory is reused without new page faults. Runs in a separate process because the setting
cannot be undone.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from ramify.train.backends.activation_memory import keep_malloc_memory
kept = keep_malloc_memory() if sys.argv[1] == "kept" else None
def work():
    for _ in range(20):
        blocks = [bytearray(3_000_000) for _ in range(10)]
        del blocks
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_reused_without_page_faults():
    def faults(how: str) -> tuple[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True
        )
        kept, num = done.stdout.split()
        return kept, int(num)

    kept, few = faults("kept")
    if kept == "False":
        pytest.skip("no glibc")
    assert few < 100 < faults("as it is")[1]
