"""The command that an error names for a missing extra works for the installation that raises it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ramify.pip_install_command import install_command, install_command_from_record


def record(path: Path, **more: object) -> str:
    return json.dumps({"url": path.as_uri(), **more})


def test_a_clone_is_installed_from_its_folder_with_the_extra(tmp_path: Path) -> None:
    folder = tmp_path / "my ramify"
    folder.mkdir()
    editable = install_command_from_record(record(folder, dir_info={"editable": True}), ("ray",))
    assert shlex.split(editable) == ["pip", "install", "-e", f"{folder}[ray]"]
    plain = install_command_from_record(record(folder, dir_info={}), ("train", "ray"))
    assert shlex.split(plain) == ["pip", "install", f"{folder}[train,ray]"]


def test_a_wheel_is_installed_from_its_file(tmp_path: Path) -> None:
    wheel = tmp_path / "ramify-1.0-py3-none-any.whl"
    wheel.touch()
    command = install_command_from_record(record(wheel, archive_info={}), ("mcp",))
    assert shlex.split(command) == ["pip", "install", f"{wheel}[mcp]"]


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "ramify[otel]"),
        (record(Path("/no/such/folder"), dir_info={}), "ramify[otel]"),
        (
            json.dumps({"url": "https://host/ramify.git", "vcs_info": {"vcs": "git"}}),
            "ramify[otel] @ git+https://host/ramify.git",
        ),
    ],
)
def test_an_index_and_a_repository_are_named(origin: str | None, source: str) -> None:
    assert shlex.split(install_command_from_record(origin, ("otel",))) == ["pip", "install", source]


def test_the_command_of_this_installation_has_the_extra() -> None:
    words = shlex.split(install_command("inputs"))
    assert words[:2] == ["pip", "install"]
    assert words[-1].endswith("[inputs]")
