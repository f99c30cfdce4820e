"""Code shared by studies of many training runs: reusable runs, a page that is filled in, and a
report.

A run is a separate process with one torch thread. A finished run is reused, and an interrupted one
continues.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from figures import Figure, show

from ramify.train.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[1]


def python(*arguments: str, quiet: bool = False) -> float:
    """Run a Python command with one thread, and return the CPU seconds of the process and all its
    children. Raises SystemExit if it fails."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def is_trained(folder: Path) -> bool:
    return (folder / "policy" / "config.json").is_file()


def train(folder: Path, recipe: str, *overrides: str) -> Path:
    """Train a run to its end, or continue it, unless it is finished. Returns its folder."""
    if not is_trained(folder):
        path = (
            ["--resume", str(folder)]
            if CheckpointStore(folder).all()
            else [recipe, *overrides, "--out", str(folder)]
        )
        python("-m", "ramify", "train", *path, "--plain")
    return folder


def parser(question: str, quick: str, name: str, num_seeds: int) -> argparse.ArgumentParser:
    """Return the option parser of the study ``name``."""
    found = argparse.ArgumentParser(description=question)
    found.add_argument("--quick", action="store_true", help=quick)
    found.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    found.add_argument("--seeds", type=int, nargs="+", default=list(range(num_seeds)))
    found.add_argument(
        "--report", action="store_true", help="train nothing; report the finished runs"
    )
    found.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / name, help="where runs are kept"
    )
    return found


def folder_of(options: argparse.Namespace) -> Path:
    """Create and return the folder of a study's runs."""
    folder: Path = options.runs.resolve() / ("quick" if options.quick else "whole")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Insert each text between the marks of its name. Raises SystemExit if the page lacks the
    marks."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, mark, rest = text.partition(begin)
        if not mark or end not in rest:
            raise SystemExit(f"{page} has no place for {name}: {begin.strip()} … {end}")
        text = head + begin + part + end + rest.partition(end)[2]
    page.write_text(text, encoding="utf-8")


def tell(found: Sequence[Figure], as_json: bool) -> int:
    """Print the figures. Returns the exit code: 1 if one misses its limit."""
    show(list(found))
    if as_json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0
