"""The tutorials in ``examples/*.ipynb``: each runs as for a reader and reproduces its output.

A cell whose output depends on the machine has the tag ``varies``: it is run but not compared. To
store new outputs: ``jupyter execute --inplace --NotebookClient.record_timing=False FILE``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
BIN = Path(sys.executable).parent


def read(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook."""
    cells: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["cells"]
    return cells


def printed(cell: dict[str, Any]) -> str:
    """Return the text that a cell printed and the value of its last line."""
    return "".join(
        "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
        for output in cell["outputs"]
        if output.get("name") != "stderr"
    )


def environment(folder: Path) -> dict[str, str]:
    """Return an environment without keys or settings, with temporary files in ``folder``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"RAMIFY_|PYTEST_|[A-Z]+_API_KEY|[A-Z]+_BASE_URL", name)
    }
    own = {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HTTPS_PROXY": "http://127.0.0.1:9",  # only loopback is reachable
        "NO_PROXY": "127.0.0.1",
    }
    return kept | own


def test_all_five_notebooks_exist() -> None:
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["ask", "own_reward", "read_run", "serve", "train"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_reproduces_its_stored_output(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    done = subprocess.run(
        [BIN / "jupyter-execute", "--inplace", str(copy)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for shown, ran in zip(read(path), read(copy), strict=True):
        if ran["cell_type"] == "code" and "varies" not in ran["metadata"].get("tags", []):
            assert printed(ran) == printed(shown), f"{path.name}, {ran['id']}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_asserts_its_claims_and_has_no_local_paths(path: Path) -> None:
    code = ["".join(cell["source"]) for cell in read(path) if cell["cell_type"] == "code"]
    assert sum("assert " in each for each in code) >= 3
    assert re.findall(r"/(?:root|work|home|tmp|Users)/\w+", path.read_text("utf-8")) == []
