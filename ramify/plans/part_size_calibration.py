"""Stores how accurately a model answers questions about text parts of various sizes, and derives
the best part size.

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
from ramify.store.folder_store import default_root

VERSION = 1
"""Version of the file format. Files of other versions are ignored."""
FOLDER = "calibrations"
TOLERANCE = 0.02
"""Accuracy, as a fraction, that a part size may lose by default compared with the most accurate
one."""
_SAVING = 0.10
"""Fraction by which the cost of a part size may exceed that of the cheapest one. The smallest size
within this limit is chosen."""
_log = ComponentLogger("plans")


class PartSizeAccuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The accuracy and cost of a model's answers for text parts of one size."""

    tokens: int
    """Size of the text part in tokens, counting three bytes as one token as in ``split``."""
    items: int
    """Number of questions that were scored."""
    accuracy: float
    """Fraction of the questions that were answered correctly."""
    low: float
    """Lower end of the 95 % confidence interval of the accuracy."""
    high: float
    """Upper end of the 95 % confidence interval of the accuracy."""
    dollars: float | None
    """Cost of reading a million tokens in parts of this size, or None if the price is unknown."""


class PartSizeCalibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's accuracy on questions about text parts, measured for several part sizes.

    Example:
        found = plans.calibration_of("openai:gpt-5-mini")
        found.part_tokens if found else "not calibrated"
    """

    model: str
    """Model name with its provider, such as ``openai:gpt-5-mini``."""
    date: str
    """Date of the measurement, such as ``2026-11-27``."""
    points: tuple[PartSizeAccuracy, ...]
    """One or more measurements, in ascending order of size."""
    tolerance: float = TOLERANCE
    """Accuracy that a part size may lose compared with the most accurate one, from 0 to 1."""
    version: int = VERSION
    """Version of the file format."""

    @property
    def part_tokens(self) -> int:
        """Return the calibrated size of text parts in tokens, chosen for accuracy and cost.

        Among the sizes within ``tolerance`` of the best accuracy, it is the smallest at which
        reading a text costs almost as little as possible. If prices are unknown, it is the largest,
        which needs the fewest calls.

        The measured accuracies are smoothed first, on the assumption that larger parts are never
        answered more accurately than smaller ones.
        """
        smooth = _fit_non_increasing(self.points)
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
        """Return a short note on the calibrated part size, for the description of a plan."""
        return f"parts of {self.part_tokens:,} tokens, calibrated {self.date}"


def calibration_of(model: str, root: Path | None = None) -> PartSizeCalibration | None:
    """Return a model's stored calibration, or None if it is missing or cannot be used.

    ``root`` is the folder of the store, and defaults to the user's store.

    Example:
        plans.calibration_of("openai:gpt-5-mini")
    """
    path = calibration_path(model, root)
    try:
        for place in (path.parent, path):
            if place.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                _warn_ignored(path, f"other users can write {place}: chmod go-w {place}")
                return None
        found = msgspec.json.decode(path.read_bytes(), type=PartSizeCalibration)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_ignored(path, f"it cannot be read: {error.strerror}")
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _warn_ignored(path, f"it is damaged ({error}): run ramify calibrate {model} again")
        return None
    if found.version != VERSION:
        why = f"it has version {found.version}, and this Ramify reads {VERSION}"
    elif found.model != model or not found.points:
        why = f"it is damaged (a calibration of '{found.model}', {len(found.points)} sizes)"
    else:
        return found
    _warn_ignored(path, f"{why}: run ramify calibrate {model} again")
    return None


def part_size(
    model: Any, given: int | None = None, root: Path | None = None
) -> tuple[int | None, str]:
    """Return the size of text parts that suits a model, in tokens.

    A note on the origin of this size is returned, too. ``given`` is used if it is set, and
    otherwise the model's stored calibration. Returns None and an empty note if there is neither.
    """
    name = model if isinstance(model, str) else getattr(model, "name", None)
    if given is not None or not isinstance(name, str):
        return given, ""
    found = calibration_of(name, root)
    return (None, "") if found is None else (found.part_tokens, found.size_note)


def store_calibration(calibration: PartSizeCalibration, root: Path | None = None) -> Path:
    """Write a calibration to the store and return the path of its file.

    An earlier calibration of the same model is replaced. Raises StoreError if the file cannot be
    written.
    """
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
    """Return the path of the file that stores a model's calibration."""
    return (root or default_root()) / FOLDER / f"{quote(model, safe='')}.json"


def _warn_ignored(path: Path, why: str) -> None:
    _log.issue_python_warning(f"the calibration {path} is ignored: {why}", stacklevel=3)


def _fit_non_increasing(points: Sequence[PartSizeAccuracy]) -> list[float]:
    """Return measured accuracies smoothed so that they never increase with the part size.

    The method is pooling of adjacent violators. Each point is weighted by its number of questions.
    """
    pools: list[tuple[float, int, int]] = []
    for point in points:
        mean, weight, num = point.accuracy, max(1, point.items), 1
        while pools and pools[-1][0] < mean:
            other, other_weight, other_num = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, num = weight + other_weight, num + other_num
        pools.append((mean, weight, num))
    return [mean for mean, _, num in pools for _ in range(num)]
