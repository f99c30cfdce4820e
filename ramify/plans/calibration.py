"""Stores how accurately a model answers questions about text parts of several sizes, and derives
the best size from that.

    ramify calibrate MODEL ──> points (size, accuracy, price) ──> a file in the store
    ready_plan("search", model=MODEL) ──> calibration_of(MODEL) ──> part_tokens=4000

This module decides which size is the best, and which stored files are trusted: only those that no
other user can write. A file that is damaged or of another version is reported in a warning and
ignored. ``cli/calibrate_leaf_size_command.py`` does the measurement.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ramify.errors import StoreError
from ramify.logging import ComponentLogger
from ramify.store.durable_files import FILE_MODE, make_folder, write_all
from ramify.store.store import default_root

VERSION = 1
"""Version of the file. A file of another version is not used."""
FOLDER = "calibrations"
TOLERANCE = 0.02
"""Accuracy that a size may lose against the best one."""
_SAVING = 0.10
"""A larger size is only preferred if the smaller one costs this share more for the same text."""
_log = ComponentLogger("plans")


class CalibrationPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How accurate a model's answers are, and what they cost, for text parts of one size."""

    tokens: int
    """Size of the text that a leaf reads, in tokens of three bytes, as in ``split``."""
    items: int
    """Questions that were scored."""
    accuracy: float
    """Share of the questions that were answered rightly."""
    low: float
    """Lower end of the 95 % interval of the accuracy."""
    high: float
    """Upper end of the interval."""
    dollars: float | None
    """Cost of reading a million tokens in leaves of this size; None if the price is not known."""


class PartSizeCalibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How accurate a model's answers about text parts are, measured for parts of several sizes.

    Example:
        found = plans.calibration_of("openai:gpt-5-mini")
        found.part_tokens if found else "not calibrated"
    """

    model: str
    """The model with its provider: ``openai:gpt-5-mini``."""
    date: str
    """Day of the measurement: ``2026-11-27``."""
    points: tuple[CalibrationPoint, ...]
    """At least one, in order of size."""
    tolerance: float = TOLERANCE
    """Accuracy that a larger part may lose against the smallest one, from 0 to 1."""
    version: int = VERSION
    """Form of the stored file."""

    @property
    def part_tokens(self) -> int:
        """Return the size of text parts, in tokens, that is best by accuracy and cost. Among the
        sizes that lose no more accuracy than ``tolerance``, this is the smallest one that reads a
        text at nearly the lowest price. If prices are unknown, it is the largest, which needs the
        fewest calls.

        The measured accuracies are smoothed first, on the assumption that larger parts are never
        answered more accurately than smaller ones.
        """
        smooth = _falling(self.points)
        good = [
            point
            for point, accuracy in zip(self.points, smooth, strict=True)
            if accuracy >= smooth[0] - self.tolerance
        ]
        prices = [point.dollars for point in good]
        known = [price for price in prices if price is not None]
        if len(known) < len(prices):
            return good[-1].tokens
        most = (1 + _SAVING) * min(known)
        return next(point.tokens for point in good if (point.dollars or 0.0) <= most)

    @property
    def size_note(self) -> str:
        """Return a short note that says where the size of a plan's parts comes from, for the
        description of the plan."""
        return f"parts of {self.part_tokens:,} tokens, calibrated {self.date}"


def calibration_of(model: str, root: Path | None = None) -> PartSizeCalibration | None:
    """Return the stored calibration of a model, or None if there is none that can be used. ``root``
    is the folder of the store, which defaults to the user's store.

    Example:
        plans.calibration_of("openai:gpt-5-mini")
    """
    path = calibration_path(model, root)
    try:
        for place in (path.parent, path):
            if place.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                _ignored(path, f"other users can write {place}: chmod go-w {place}")
                return None
        found = msgspec.json.decode(path.read_bytes(), type=PartSizeCalibration)
    except FileNotFoundError:
        return None
    except OSError as error:
        _ignored(path, f"it cannot be read: {error.strerror}")
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _ignored(path, f"it is damaged ({error}): run ramify calibrate {model} again")
        return None
    if found.version != VERSION:
        why = f"it has version {found.version}, and this Ramify reads {VERSION}"
    elif found.model != model or not found.points:
        why = f"it is damaged (a calibration of '{found.model}', {len(found.points)} sizes)"
    else:
        return found
    _ignored(path, f"{why}: run ramify calibrate {model} again")
    return None


def part_size(
    model: Any, given: int | None = None, root: Path | None = None
) -> tuple[int | None, str]:
    """Return the size of a text part, in tokens, that suits a model, and a note on where the size
    comes from. The size is ``given`` if it is set, and otherwise that of the model's stored
    calibration. Returns None and an empty note if there is neither."""
    name = model if isinstance(model, str) else getattr(model, "name", None)
    if given is not None or not isinstance(name, str):
        return given, ""
    found = calibration_of(name, root)
    return (None, "") if found is None else (found.part_tokens, found.size_note)


def store_calibration(calibration: PartSizeCalibration, root: Path | None = None) -> Path:
    """Write a calibration to the store, replacing an earlier one of the same model, and return the
    path of its file. Raises StoreError if the file cannot be written."""
    path = calibration_path(calibration.model, root)
    make_folder(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            write_all(fd, msgspec.json.format(msgspec.json.encode(calibration)) + b"\n", part)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(part, path)
    except OSError as error:
        raise StoreError(f"the calibration {path} cannot be written: {error.strerror}") from None
    return path


def calibration_path(model: str, root: Path | None = None) -> Path:
    """Return the path of the file that holds a model's calibration."""
    return (root or default_root()) / FOLDER / f"{quote(model, safe='')}.json"


def _ignored(path: Path, why: str) -> None:
    _log.warn(f"the calibration {path} is ignored: {why}", stacklevel=3)


def _falling(points: Sequence[CalibrationPoint]) -> list[float]:
    """Smooth measured accuracies into the closest sequence that never rises, by pooling adjacent
    violators. Each point is weighted by its number of questions."""
    pools: list[tuple[float, int, int]] = []
    for point in points:
        mean, weight, num = point.accuracy, max(1, point.items), 1
        while pools and pools[-1][0] < mean:
            other, other_weight, other_num = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, num = weight + other_weight, num + other_num
        pools.append((mean, weight, num))
    return [mean for mean, _, num in pools for _ in range(num)]
