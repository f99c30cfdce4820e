"""Reads parts of a checkpoint's weights on demand.

A rank reads only its own rows or experts, and holds only a few megabytes of the files at a time.

    stored = stored_tensors(folder, model)         name in the model -> StoredTensor
    stored["model.norm.weight"][...]               the whole tensor
    stored["model.layers.0.mlp.experts.gate_up_proj"][4:8, :16]
                                                   of four experts, each from its own tensor on disk

A mixture of experts has one tensor for all experts of a layer in memory, and one for each expert on
disk; transformers knows how their names correspond (``conversion_mapping``).
``to_checkpoint_tensors`` converts in the other direction.

``train/backends/safetensors_export.py`` writes weights, and ``weights.check_weights`` checks
whether they are what a model needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.errors import StoreError
from ramify.models.weights import IGNORED, weight_files

_AT_ONCE = 64 << 20
"""Number of bytes to read before the open files are closed. Pages that were read count as memory of
the process until then."""
_STACK, _JOIN = "MergeModulelist", "Concatenate"
"""Two conversions of transformers: stacking the experts' tensors into one, and joining gate and up
projections side by side."""


class SafetensorsReader:
    """Opens a checkpoint's safetensors files when they are first read.

    It closes them regularly, because pages that were read count as process memory until then.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._read = 0

    def get_slice(self, path: Path, name: str) -> Any:
        """Return a handle that can read parts of one tensor in a safetensors file.

        Nothing is read yet.
        """
        return self._file(path).get_slice(name)

    def names(self, path: Path) -> list[str]:
        return list(self._file(path).keys())

    def close_files_at_limit(self, num_bytes: int) -> None:
        """Count the bytes read from the checkpoint, and close its files when a limit is reached."""
        self._read += num_bytes
        if self._read > _AT_ONCE:
            self._open.clear()
            self._read = 0

    def _file(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if path not in self._open:
            try:
                self._open[path] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise StoreError(
                    f"{path} cannot be read as safetensors: {error}; copy or download it again"
                ) from None
        return self._open[path]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Indexing reads the selected part from disk.
    """

    files: SafetensorsReader
    path: Path
    name: str
    shape: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return [*self.shape]

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self.files.get_slice(self.path, self.name)[index].clone()
        self.files.close_files_at_limit(found.nbytes)
        return found


@dataclasses.dataclass(frozen=True)
class StackedExpertTensor:
    """The weights of all experts as one tensor [experts, rows, columns].

    On disk they are separate tensors. Each expert has one or more of them, and their rows are
    concatenated.
    """

    parts: Sequence[Sequence[StoredTensor]]
    """Part -> expert -> tensor [rows of the part, columns]."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part[0].shape[0] for part in self.parts)
        return (len(self.parts[0]), rows, *self.parts[0][0].shape[1:])

    def get_shape(self) -> list[int]:
        return [*self.shape]

    def __getitem__(self, index: Any) -> Tensor:
        given = index if isinstance(index, tuple) else (index,)
        whole = [each if isinstance(each, slice) else slice(None) for each in given]
        whole += [slice(None)] * (len(self.shape) - len(whole))
        experts, rows, *rest = whole
        first, last, _ = rows.indices(self.shape[1])
        chosen = range(*experts.indices(self.shape[0]))
        found = [self._read_expert(each, first, last, rest) for each in chosen]
        if found:
            return torch.stack(found)
        return torch.empty(0, last - first, *self._read_expert(0, first, last, rest).shape[1:])

    def _read_expert(self, expert: int, first: int, last: int, rest: list[slice]) -> Tensor:
        pieces, at = [], 0
        for part in self.parts:
            tensor = part[expert]
            start, end = max(first - at, 0), min(last - at, tensor.shape[0])
            if start < end:
                pieces.append(tensor[(slice(start, end), *rest)])
            at += tensor.shape[0]
        return torch.cat(pieces)


Stored = StoredTensor | StackedExpertTensor


def lazy_disk_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return handles of a checkpoint's tensors, by their names on disk.

    No values are read. Raises StoreError if the files are missing or broken.
    """
    files = SafetensorsReader()
    found = {}
    for path in weight_files(folder):
        for name in files.names(path):
            if not name.endswith(IGNORED):
                shape = tuple(files.get_slice(path, name).get_shape())
                found[name] = StoredTensor(files, path, name, shape)
    return found


def stored_tensors(folder: Path, model: Any, names: Sequence[str] = ()) -> Mapping[str, Stored]:
    """Return a checkpoint's tensors, keyed by their names in a model, without reading their values.

    If adapters have changed the names in the model, ``names`` are its original names.

    Tensors that match nothing in the model keep their names on disk. Raises StoreError if the files
    are missing or broken.
    """
    raw = lazy_disk_tensors(folder)
    conversions = _conversions(model)
    if not conversions:
        return raw
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    known: dict[str, Any] = dict.fromkeys(names or model.state_dict(), True)
    found: dict[str, Stored] = {}
    stacks: dict[str, dict[str, list[StoredTensor]]] = {}
    for name in sorted(raw, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if name in known or target not in known:
            found[name] = raw[name]
        elif pattern is None:
            found[target] = raw[name]
        else:
            stacks.setdefault(target, {}).setdefault(pattern, []).append(raw[name])
    order = [pattern for each in converters for pattern in each.source_patterns]
    for target, by_pattern in stacks.items():
        found[target] = StackedExpertTensor(
            [by_pattern[each] for each in order if each in by_pattern]
        )
    return found


def can_read_separately(model: Any) -> bool:
    """Return True if each of the model's tensors can be read from its checkpoint without reading
    others.

    This requires that model and checkpoint differ only in names and in how experts are stacked.
    """
    return all(
        type(operation).__name__ == _STACK
        or (type(operation).__name__ == _JOIN and operation.dim == 1)
        for each in _conversions(model)
        for operation in getattr(each, "operations", ())
    )


def to_checkpoint_tensors(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Convert one tensor of a model to the tensors stored in its checkpoint, and yield their names
    and values.

    The values are views if possible, and may be on the meta device.
    """
    if not _conversions(model):
        yield name, tensor
        return
    from transformers.core_model_loading import revert_weight_conversion

    yield from revert_weight_conversion(model, {name: tensor}).items()


def _conversions(model: Any) -> list[Any]:
    """Return transformers' rules for converting a checkpoint's tensors to a model's tensors.

    They also convert the names.
    """
    if not hasattr(model, "base_model_prefix"):  # our own model has the names of the checkpoint
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before 5.0 nothing was converted
        return []
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return found
