"""The best size of a calibration, its file, and the plans that use it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ramify import ConfigError, plans
from ramify.plans.part_size_calibration import calibration_path, part_size, store_calibration

MODEL = "offline:default"


def calibration(
    *points: tuple[int, float, float | None], tolerance: float = 0.02
) -> plans.PartSizeCalibration:
    """Points as (size, accuracy, dollars per million tokens)."""
    measured = (
        plans.PartSizeAccuracy(size, 40, accuracy, accuracy - 0.1, 1.0, dollars)
        for size, accuracy, dollars in points
    )
    return plans.PartSizeCalibration(MODEL, "2026-11-27", tuple(measured), tolerance)


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([(2000, 1.0, None), (4000, 0.99, None), (8000, 0.9, None)], 4000),
        # The larger size saves less than a tenth.
        ([(2000, 1.0, 0.25), (4000, 0.99, 0.20), (8000, 0.99, 0.19), (16000, 0.9, 0.1)], 4000),
        ([(2000, 1.0, 0.2), (4000, 1.0, 0.19)], 2000),
        # One wrong reply at the smallest size is an error of the measurement.
        ([(2000, 0.95, 1.0), (4000, 1.0, 0.5), (8000, 0.6, 0.2)], 4000),
        ([(2000, 0.4, 1.0)], 2000),
    ],
)
def test_best_size_is_the_cheapest_of_the_accurate_ones(
    points: list[tuple[int, float, float | None]], best: int
) -> None:
    assert calibration(*points).part_tokens == best


def test_plans_use_the_stored_size_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    assert plans.calibration_of(MODEL) is None
    stored = calibration((2000, 1.0, None), (6000, 1.0, None))
    path = store_calibration(stored)
    assert path.stat().st_mode & 0o777 == 0o600
    assert plans.calibration_of(MODEL) == stored
    assert plans.calibration_of("offline:perfect") is None
    found = plans.strategy_for("Who signed it?", model=MODEL)
    assert found.reason.endswith("; parts of 6,000 tokens, calibrated 2026-11-27")
    assert found.plan == plans.ready_plan("search", model=MODEL) == plans.search(6000)
    own = plans.strategy_for("Who signed it?", model=MODEL, part_tokens=500)
    assert (own.plan, "calibrated" in own.reason) == (plans.search(500), False)
    assert plans.strategy_for("Who?", name="summarise").plan == plans.summarise()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is damaged"),
        ('{"model": "a"}', "is damaged"),
        (None, "has version 0, and this Ramify reads 1"),
        ("", "is damaged"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_ignored(
    tmp_path: Path, text: str | None, why: str
) -> None:
    path = store_calibration(calibration((2000, 1.0, None)), tmp_path)
    old = json.dumps({**json.loads(path.read_bytes()), "version": 0})
    path.write_text(old if text is None else text)
    with pytest.warns(UserWarning, match=f"{path.name} is ignored: it .*{why[3:]}.* again"):
        assert part_size(MODEL, None, tmp_path) == (None, "")


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_file_that_others_can_write_is_ignored(tmp_path: Path, place: str) -> None:
    path = store_calibration(calibration((2000, 1.0, None)), tmp_path)
    os.chmod(path if place == "file" else path.parent, 0o772)
    with pytest.warns(UserWarning, match="other users can write .*chmod go-w"):
        assert plans.calibration_of(MODEL, tmp_path) is None


def test_a_name_of_a_model_is_never_a_path(tmp_path: Path) -> None:
    path = calibration_path("x:../../etc/passwd", tmp_path)
    assert path.parent == tmp_path / "calibrations"
    with pytest.raises(ConfigError, match="unknown plan"):
        plans.strategy_for("Who?", name="serch", model=MODEL)
