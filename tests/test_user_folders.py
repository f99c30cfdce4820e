"""The folders of a user's files are those that ``platformdirs`` names."""

import sys
from pathlib import Path

import platformdirs
import pytest

from ramify.user_folders import user_folder

KINDS = {"config": "XDG_CONFIG_HOME", "data": "XDG_DATA_HOME", "cache": "XDG_CACHE_HOME"}


@pytest.mark.parametrize("given", [None, "", "/somewhere/else", "relative", "~/mine"])
@pytest.mark.parametrize("kind", KINDS)
def test_folder_is_that_of_the_platform(
    kind: str, given: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(KINDS[kind], raising=False)
    if given is not None:
        monkeypatch.setenv(KINDS[kind], given)
    expected = getattr(platformdirs, f"user_{kind}_path")("ramify")
    assert user_folder(kind) == expected  # type: ignore[arg-type]
    if given == "/somewhere/else" and sys.platform == "linux":
        assert expected == Path("/somewhere/else/ramify")
