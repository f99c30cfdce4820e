"""The wheel: built from this checkout, then installed and used in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ramify

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
]
ASK = """\
import ramify, sys
from ramify import testing
with ramify.RLM(testing.ScriptedClient(["```repl\\nFINAL(len(context))\\n```"]),
                sandbox=ramify.SandboxSpec(provider="inprocess", allow_weaker=True)) as rlm:
    print(rlm.completion("x" * 50_000, "How long is it?").answer, ramify.__file__)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nothing but the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    subprocess.run([*pip, *build, str(ROOT)], check=True, timeout=200)
    (wheel,) = folder.glob("ramify-*.whl")
    assert wheel.name == f"ramify-{ramify.__version__}-py3-none-any.whl"
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    into = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *into], check=True, timeout=200)
    # The dependencies are those of this environment. Its .pth files do not apply there, so an
    # editable installation of the package stays out of sight.
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def output(python: Path, folder: Path, *words: str) -> str:
    """Output of a command that runs in ``folder``, outside the checkout."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    done = subprocess.run(
        [*words],
        cwd=folder,
        env={**kept, "HOME": str(folder), "RAMIFY_HOME": str(folder / "runs")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_is_installed(python: Path, tmp_path: Path) -> None:
    command = str(python.with_name("ramify"))
    assert output(python, tmp_path, command, "--version") == f"ramify {ramify.__version__}"


def test_installed_package_answers_a_question(python: Path, tmp_path: Path) -> None:
    answer, place = output(python, tmp_path, str(python), "-c", ASK).split()
    assert (answer, Path(place).is_relative_to(python.parents[1])) == ("50000", True)


def test_wheel_contains_every_package_file(python: Path) -> None:
    """Modules, lists of public names, static files of the viewer, prices, the packaged policy."""
    (installed,) = python.parents[1].glob("lib/python*/site-packages/ramify")
    tracked = subprocess.run(
        ["git", "ls-files", "ramify"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    missing = [name for name in tracked if not (installed.parent / name).is_file()]
    assert missing == []
    for name in ("viewer/static/index.html", "models/tiny/config.json", "train/__init__.pyi"):
        assert (installed / name).is_file()


@pytest.mark.parametrize("text", sorted(set(REQUIREMENTS)))
def test_each_requirement_has_lower_and_upper_bound(text: str) -> None:
    operators = {each.operator for each in Requirement(text).specifier}
    assert operators == {">=", "<"}
