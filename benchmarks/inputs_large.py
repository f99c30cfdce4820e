"""Contexts larger than memory: what asking a folder of large texts takes.

    python benchmarks/inputs.py --part large

A folder of 20 GB (2 GB with --quick) is loaded and asked in a separate process: a session counts,
searches and slices each text. The files are sparse: of each 16 MiB, the first is UTF-8 text and the
rest zeros, which are characters like any others. The memory is that of the process, of the fork
server and of all sessions together, without the pages of the mapped files: the proportional share
of anonymous and shared memory (``smaps_rollup``), sampled while it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure

_FILE_BYTES = 256 << 20
_STEP_BYTES = 16 << 20
_TEXT_BYTES = 1 << 20
_MAX_MB = 600
_MAX_STORE_KB = 1000
_CODE = """
import random, time
found = {}
for name, text in context.items():
    middle = len(text) // 2
    place = text.rfind('größe 7,')
    part = text[place:place + 8]
    found[name] = [len(text), text.count('größe 7,'), place, part, len(text[middle:middle + 999])]
places = [random.randrange(len(text)) for _ in range(200)]
started = time.perf_counter()
for place in places:
    text[place]
each_us = (time.perf_counter() - started) / 200 * 1e6
FINAL([found, each_us])
"""


def figures(quick: bool) -> Iterator[Figure]:
    num_files = 8 if quick else 80
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        texts.mkdir()
        for number in range(num_files):
            _write(texts / f"{number:02}.log", number)
        size_gb = num_files * _FILE_BYTES / 1e9
        report, peak_mb = _asked(texts, Path(folder) / "store")
        digest_s = sum(map(_hashing_s, texts.iterdir()))
    expected = {f"{number:02}.log": _expected(number) for number in range(num_files)}
    found = {name: values[1:4] for name, values in report["answer"][0].items()}
    right = found == expected
    name = f"a folder of {size_gb:.0f} GB"
    yield Figure(
        f"{name}: memory beside the mapped files",
        round(peak_mb),
        "MB",
        {"GB of text": round(size_gb, 1)},
        floor=_MAX_MB,
        valid=right,
    )
    yield Figure(
        f"{name}: CPU time of loading (characters, lines, hash)",
        round(report["load_s"] / digest_s, 2),
        "× SHA-256 alone",
        {"CPU seconds": round(report["load_s"], 1), "of SHA-256": round(digest_s, 1)},
        floor=3.0,
        valid=right,
    )
    yield Figure(
        f"{name}: growth of the store per GB",
        round(report["store_bytes"] / size_gb / 1e3),
        "kB",
        {},
        floor=_MAX_STORE_KB,
        valid=right,
    )
    yield Figure(
        "a character at a position of a mapped text that is not ASCII",
        round(report["answer"][1]),
        "µs",
        {},
        valid=right,
    )


def _lines(number: int) -> bytes:
    """The text at each step of a file."""
    line = "".join(f"größe {digit}, Datei {number}\n" for digit in range(10)).encode()
    return line * (_TEXT_BYTES // len(line))


def _write(path: Path, number: int) -> None:
    text = _lines(number)
    with path.open("wb") as file:
        for at in range(0, _FILE_BYTES, _STEP_BYTES):
            file.seek(at)
            file.write(text)
        file.truncate(_FILE_BYTES)


def _expected(number: int) -> list[Any]:
    """Count and last place of ``größe 7,``, and the text there."""
    text, steps = _lines(number).decode(), _FILE_BYTES // _STEP_BYTES
    step_chars = len(text) + _STEP_BYTES - len(text.encode())
    place = step_chars * (steps - 1) + text.rfind("größe 7,")
    return [text.count("größe 7,") * steps, place, "größe 7,"]


def _asked(texts: Path, store: Path) -> tuple[dict[str, Any], float]:
    """Ask over ``texts`` in another process. Returns its report and the largest sum of memory, in
    MB."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(texts), str(store)], stdout=subprocess.PIPE, text=True
    )
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, sum(map(_own_mb, _tree(process.pid))))
        time.sleep(0.05)
    assert process.stdout is not None
    report: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    return report, peak


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            for child in map(int, children):
                yield from _tree(child)


def _own_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        parts = [line.split() for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
        return sum(int(part[1]) for part in parts) / 1024
    return 0.0


def _hashing_s(path: Path) -> float:
    """CPU time of hashing a file, in seconds."""
    started = time.process_time()
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")
    return time.process_time() - started


def _ask(texts: str, store: str) -> None:
    """Load and ask, and print a report: runs in a separate process."""
    import ramify

    started = time.process_time()
    loaded = ramify.load(texts)
    load_s = time.process_time() - started
    model = ramify.ScriptedClient([f"```repl\n{_CODE}\n```"] * 2)
    limits = ramify.Limits(max_seconds=3600)
    sandbox = ramify.JailSpec(cell_s=3000, allow_weaker=True)
    kept = ramify.Store(store)
    before = kept.size()
    with ramify.RLM(model, store=kept, limits=limits, sandbox=sandbox) as rlm:
        answer = rlm.completion(loaded, "How often is a size 7?").answer
    report = {"load_s": load_s, "answer": answer, "store_bytes": kept.size() - before}
    print(json.dumps(report))


if __name__ == "__main__":
    _ask(*sys.argv[1:])
