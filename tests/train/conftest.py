"""Training keeps token ids of files in the user's store: tests have their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path_factory.getbasetemp() / "user-store"))
