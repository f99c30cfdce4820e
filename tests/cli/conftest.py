"""A separate simulated machine for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)
