"""The GPU kit: proves every path that needs a GPU, in stages of at most ten minutes.

    scripts/gpu                            all stages on the GPU, and a page with all figures
    scripts/gpu parity engine              only these stages; each can run alone
    scripts/gpu --device cpu --quick       the same code on small models, without a GPU
    scripts/gpu --out FOLDER --trace       other folder (default: $OUT, or build), with traces
    scripts/gpu --wheels                   fetch the packages that a GPU machine may lack

    OUT/gpu/STAGE.json      written again after every figure, so that a lost machine loses little
    OUT/gpu/page.md         all figures of all stages, and the machine

Each stage is a separate process: its failure or its end by the clock leaves the others alone. The
exit code is 1 if a stage failed or measured nothing, or if a figure is outside its range. The last
line is {"figures": […]} of all stages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # trees.py
STAGES = ("parity", "forest", "engine", "train", "sync", "learn", "jail")
STAGE_S = 600
"""Most seconds of a stage."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of: {', '.join(STAGES)}")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--quick", action="store_true", help="small models and few rounds")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", HERE.parents[1] / "build"))
    )
    parser.add_argument("--trace", action="store_true", help="also write traces of the profiler")
    parser.add_argument("--json", action="store_true", help="print the figures as the last line")
    parser.add_argument("--stage-s", type=float, default=STAGE_S, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for stage in asked.stages:
        if stage not in STAGES:
            parser.error(f"unknown stage '{stage}': {', '.join(STAGES)}")
    out = asked.out / "gpu"
    if asked.here:
        return _one(asked.stages[0], asked, out)
    from kit import check

    check(asked.device, out)
    if asked.device == "cpu":
        _import_all()
    stages = asked.stages or STAGES
    ends = {stage: _stage(stage, asked, out) for stage in stages}
    return _page(out, ends, as_json=asked.json)


def _stage(stage: str, asked: argparse.Namespace, out: Path) -> str:
    """Run a stage in a separate process; returns why it failed, or nothing."""
    (out / f"{stage}.json").unlink(missing_ok=True)
    if asked.device == "cpu":
        return _fork(stage, asked, out)
    command = [sys.executable, str(HERE / "run.py"), stage, "--here", "--device", asked.device]
    command += ["--out", str(asked.out), *(["--quick"] if asked.quick else [])]
    command += ["--trace"] if asked.trace else []
    try:
        done = subprocess.run(command, timeout=asked.stage_s)
    except subprocess.TimeoutExpired:
        return f"it was stopped after {asked.stage_s:g} s"
    return "" if done.returncode == 0 else f"it ended with {done.returncode}"


def _fork(stage: str, asked: argparse.Namespace, out: Path) -> str:
    """Run a stage in a fork of this process, which has imported everything: half the CPU time of a
    small stage would be imports. A GPU cannot be used in a fork."""
    process = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(_one(stage, asked, out))
    )
    process.start()
    process.join(asked.stage_s)
    if process.is_alive():
        process.kill()
        process.join()
        return f"it was stopped after {asked.stage_s:g} s"
    return "" if process.exitcode == 0 else f"it ended with {process.exitcode}"


def _import_all() -> None:
    """Import what the stages use. A module that is not there is an error of its stage."""
    from kit import SHAPES

    models = {shape["model_type"] for shape in SHAPES.values()}
    for name in (
        "transformers.models.auto.modeling_auto",
        *(f"transformers.models.{model}.modeling_{model}" for model in models),
        *(f"stage_{stage}" for stage in STAGES),
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _one(stage: str, asked: argparse.Namespace, out: Path) -> int:
    import torch
    from kit import Kit

    if asked.device == "cpu":
        torch.set_num_threads(1)
    kit = Kit(stage, asked.device, out, quick=asked.quick, trace=asked.trace)
    try:
        importlib.import_module(f"stage_{stage}").measure(kit)
    except Exception:  # noqa: BLE001  (what was measured before is written; the other stages continue)
        traceback.print_exc()
        return 1
    if not kit.num_measured:
        print(f"{stage}: no figure was measured", file=sys.stderr)
        return 1
    return 1 if kit.num_failed else 0


def _page(out: Path, ends: dict[str, str], *, as_json: bool) -> int:
    """Write and print all figures of the stages that ``out`` holds."""
    found = {stage: _read(out / f"{stage}.json") for stage in STAGES}
    lines = list(_lines(found, ends))
    (out / "page.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    figures = [figure for each in found.values() if each for figure in each["figures"]]
    mine = [figure for stage in ends for figure in (found[stage] or {"figures": []})["figures"]]
    if as_json:
        print(json.dumps({"figures": figures}))
    return 1 if any(ends.values()) or any(each["holds"] is False for each in mine) else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def _lines(found: dict[str, dict[str, Any] | None], ends: dict[str, str]) -> Iterator[str]:
    machine = next((each["machine"] for each in found.values() if each), {})
    yield "# GPU figures"
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in machine.items())
    for stage, each in found.items():
        if each is None and stage not in ends:
            continue
        yield ""
        yield f"## {stage}" + (" (quick)" if each and each["quick"] else "")
        if ends.get(stage):
            yield f"FAILED: {ends[stage]}"
        if each is None:
            continue
        yield ""
        yield "| figure | value | expected | inside | beside it |"
        yield "| --- | --- | --- | --- | --- |"
        yield from map(_row, each["figures"])


def _row(figure: dict[str, Any]) -> str:
    value = "" if figure["value"] is None else f"{figure['value']:.4g} {figure['unit']}".strip()
    expected = "" if figure["expected"] is None else "{:.3g} to {:.3g}".format(*figure["expected"])
    if figure["floor"] is not None and not expected:
        expected = f"≤ {figure['floor']:.3g}"
    inside = {None: "", True: "yes", False: "NO"}[figure["holds"]]
    beside = "; ".join(
        f"{name} {each if isinstance(each, str) else format(each, '.4g')}"
        for name, each in figure["against"].items()
    )
    return f"| {figure['name']} | {value} | {expected} | {inside} | {beside or figure['note']} |"


if __name__ == "__main__":
    sys.exit(main())
