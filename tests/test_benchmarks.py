"""The command that runs all benchmarks, over small ones; and peers that are missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FIGURES = """
import json, sys
if __name__ == "__main__":
    print("a table")
    print(json.dumps({"figures": [
        {"name": "speed", "value": 3, "holds": True},
        {"name": "size", "value": len(sys.argv), "holds": False},
        {"name": "peer x: is not installed", "value": None, "holds": False},
        {"name": "reported", "value": 1, "holds": None},
    ]}))
    sys.exit(1)
"""
BROKEN = """
if __name__ == "__main__":
    raise SystemExit(1 / 0)
"""
ENDLESS = """
if __name__ == "__main__":
    while True:
        pass
"""


def _folder(tmp_path: Path, **benchmarks: str) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("all_benchmarks.py", "peers.py", "figures.py", "requirements.txt"):
        shutil.copy(ROOT / "benchmarks" / name, folder)
    for name, text in benchmarks.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def _python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )


def test_one_table_says_what_holds_falls_short_is_missing_or_crashed(tmp_path: Path) -> None:
    folder = _folder(tmp_path, broken=BROKEN, endless=ENDLESS, whole=FIGURES, whole_part=FIGURES)
    done = _python(folder, "all_benchmarks.py", "--quick", "--json", "--limit-s", "3")
    *table, last = done.stdout.splitlines()
    assert (done.returncode, [line.split()[:5:2] for line in table[1:4]]) == (
        1,
        [["broken", "0", "0"], ["endless", "0", "0"], ["whole", "1", "1"]],
    )
    assert [line.partition("crashed: ")[2] for line in table[1:4]] == [
        "exit code 1, without figures",
        "ended after 3 s",
        "",
    ]
    assert table[4:] == [
        "falls short: whole: size",
        "not measured: whole: peer x: is not installed",
    ]
    found = json.loads(last)
    assert found["crashed"].keys() == {"broken", "endless"}
    assert found["figures"][1] == {
        "benchmark": "whole",
        "name": "size",
        "value": 3,
        "holds": False,
    }


def test_peer_that_is_missing_or_has_another_version_does_not_hold(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "requirements.txt").write_text("rlms==0.1.3\npytest==1.0\n")
    code = (
        "import peers, pathlib, sys\n"
        "here = peers.PeerEnvironment(pathlib.Path(sys.prefix), peers.BESIDE.requirements)\n"
        "none = peers.PeerEnvironment(pathlib.Path('none'), peers.BESIDE.requirements)\n"
        "for figure in (*peers.check(False, here, 'rlms', 'pytest'),"
        " *peers.check(False, none, 'pytest'), *peers.check(True, here, 'rlms')):\n"
        "    print(figure.name, figure.holds)\n"
    )
    done = _python(folder, "-c", code)
    assert done.stderr.count("benchmarks/setup installs it") == 3
    assert done.stdout.splitlines() == [
        "peer rlms: is not installed False",
        f"peer pytest: has version {pytest.__version__}, and 1.0 is pinned False",
        "peer pytest: is not installed False",
    ]


def test_exponent_is_fitted_over_the_constant_and_is_zero_without_growth(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    for name in ("growth", "growth_axes", "processes"):
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", folder)
    code = (
        "from growth import exponent\n"
        "sizes = [100, 200, 400]\n"
        "for power in (0.5, 1, 2):\n"
        "    costs = [7 + 3 * size**power for size in sizes]\n"
        "    print(round(exponent(sizes, costs, 7, 0.1), 6))\n"
        "print(exponent(sizes, [7.0, 7.05, 7.02], 7, 0.1))\n"
    )
    done = _python(folder, "-c", code)
    assert done.stdout.split() == ["0.5", "1.0", "2.0", "0.0"], done.stderr
