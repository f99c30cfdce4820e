"""``scripts/gpu`` in its CPU form: every stage measures something, and bad input is one error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
STAGES = ("parity", "forest", "engine", "train", "sync", "learn", "jail")


def gpu(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts/gpu"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_every_stage_measures_on_a_cpu(tmp_path: Path) -> None:
    done = gpu("--device", "cpu", "--quick", "--json", "--out", str(tmp_path))
    page = (tmp_path / "gpu/page.md").read_text()
    assert "FAILED" not in page, done.stderr
    figures = []
    for stage in STAGES:
        found = json.loads((tmp_path / f"gpu/{stage}.json").read_text())
        measured = [each for each in found["figures"] if each["value"] is not None]
        assert measured, stage
        assert all(
            each["note"].startswith("skipped: ")
            for each in found["figures"]
            if each not in measured
        )
        assert any(each["expected"] is not None for each in measured), stage
        figures += found["figures"]
    assert json.loads(done.stdout.splitlines()[-1]) == {"figures": figures}
    exact = [each for each in figures if each["floor"] is not None]
    assert len(exact) == 9  # parity of engine and trainer, and the canaries: not a matter of speed
    assert [each["name"] for each in exact if not each["holds"]] == []


def test_bad_input_is_one_line_error(tmp_path: Path) -> None:
    unknown = gpu("paritty", "--device", "cpu")
    assert (unknown.returncode, unknown.stderr.splitlines()[-1]) == (
        2,
        f"scripts/gpu: error: unknown stage 'paritty': {', '.join(STAGES)}",
    )
    (tmp_path / "file").write_text("")
    nowhere = gpu("jail", "--device", "cpu", "--out", str(tmp_path / "file"))
    assert (nowhere.returncode, nowhere.stderr.splitlines()[-1]) == (
        1,
        f"scripts/gpu: cannot write to {tmp_path}/file/gpu (Not a directory): choose another --out",
    )
    if not torch.cuda.is_available():
        none = gpu("jail", "--out", str(tmp_path / "out"))
        assert (none.returncode, none.stderr.splitlines()[-1]) == (
            1,
            "scripts/gpu: no CUDA device here; its CPU form: scripts/gpu --device cpu --quick",
        )
