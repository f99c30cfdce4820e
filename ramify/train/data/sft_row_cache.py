"""Store the token sequences of supervised fine-tuning in the run's folder.

A resumed run then continues with exactly the same data.

    assemble ── demonstrations ──tokenized──> rows ──> OUT/sft_rows.npz
    resume   ────────────────────────────────────────> the same rows

On resumption, no demonstrator is asked again, nothing is tokenized again, and trajectories that
were added to a store since then do not change the order of the steps. The sequences are made in
``train/sft_training_data.py``.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ramify.logging import ComponentLogger
from ramify.types.training_sequences import TokenSequence

ROWS_FILE = "sft_rows.npz"
_log = ComponentLogger("train")
_STREAMS = ("token_ids", "mask", "sampler_logprobs", "advantages", "rl")
_OPTIONAL = ("ce", "kd")


def settings_hash(config: Any) -> str:
    """Return a hash of the settings that the stored token sequences depend on.

    Stored sequences with the same hash can be reused.
    """
    return hashlib.sha256(
        msgspec.json.encode(config, enc_hook=repr, order="deterministic")
    ).hexdigest()


def write_rows(path: Path, rows: Sequence[TokenSequence], key: str) -> None:
    """Write token sequences to a NumPy archive at ``path``, together with a hash of their settings.

    ``key`` is this hash of the settings that the sequences depend on. An existing file is replaced
    atomically.
    """
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(row, name) for row in rows]) for name in _STREAMS
    }
    for name in _OPTIONAL:
        streams = [getattr(row, name) for row in rows]
        if any(stream is not None for stream in streams):
            arrays[name] = np.concatenate(
                [
                    np.zeros(len(row), np.float32) if stream is None else stream
                    for row, stream in zip(rows, streams, strict=True)
                ]
            )
    arrays["lengths"] = np.array([len(row) for row in rows], np.int64)
    arrays["names"] = np.array([row.name for row in rows])
    arrays["items"] = np.array([row.item for row in rows])
    arrays["key"] = np.array(key)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_rows(path: Path, key: str) -> list[TokenSequence] | None:
    """Read the token sequences that ``write_rows`` stored at ``path``.

    Returns None if the file does not exist, or if it was written with another ``key``, because the
    settings differ. A damaged file is reported and ignored.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if str(arrays["key"]) != key:
            return None
        cuts = np.cumsum(arrays["lengths"])[:-1]
        streams: dict[str, Any] = {
            name: np.split(arrays[name], cuts) for name in (*_STREAMS, *_OPTIONAL) if name in arrays
        }
        return [
            TokenSequence(
                name=str(name),
                item=str(item),
                **{stream: values[index] for stream, values in streams.items()},
            )
            for index, (name, item) in enumerate(zip(arrays["names"], arrays["items"], strict=True))
        ]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        _log.warning(
            "rows_unreadable",
            f"{path} cannot be read ({error}): the demonstrations are made and tokenized again",
            shown=True,
        )
        return None
