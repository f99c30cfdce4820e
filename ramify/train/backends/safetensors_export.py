"""Write a model to a Hugging Face folder one tensor at a time, so that memory never holds more than
one tensor.

    config.json, and model.safetensors
    or model-00001-of-00003.safetensors … and model.safetensors.index.json

The format is a length, a JSON header with names, types, shapes and offsets, and then the values.
Since shapes are known beforehand, the header is written first and values follow as they arrive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ramify.models.stored_weights import lazy_disk_tensors, to_checkpoint_tensors

_MAX_BYTES = 5_000_000_000
"""Default maximum size in bytes of one exported weight file; larger models are split into several
files."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorManifest(NamedTuple):
    """The names, shapes and precision of the weights to export.

    They must be known before the first value is written.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Map the name of each tensor to its shape, in the order in which the values will arrive."""
    dtype: torch.dtype | None = None
    """Precision of the exported weights; None: fp32."""


def export(
    folder: Path,
    config: Any,
    weights: TensorManifest,
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int = _MAX_BYTES,
) -> None:
    """Write a model's configuration and weights to ``folder``, creating the folder.

    Raises ValueError if a tensor does not have the name and shape that the manifest ``weights``
    announces.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = weights.dtype or torch.float32
    parts = _split_into_files(weights.shapes, dtype.itemsize, max_bytes)
    remaining = iter(tensors)
    for index, part in enumerate(parts):
        with (folder / _name(index, len(parts))).open("wb") as file:
            _write_header(file, {name: weights.shapes[name] for name in part}, dtype)
            for name in part:
                found, tensor = next(remaining)
                if (found, tuple(tensor.shape)) != (name, weights.shapes[name]):
                    raise ValueError(
                        f"got '{found}' {tuple(tensor.shape)}, expected '{name}' "
                        f"{weights.shapes[name]}"
                    )
                file.write(_bytes(tensor, dtype))
    if len(parts) > 1:
        places = {
            name: _name(index, len(parts)) for index, part in enumerate(parts) for name in part
        }
        total = sum(math.prod(shape) for shape in weights.shapes.values()) * dtype.itemsize
        index_json = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index_json, indent=2) + "\n"
        )
    _write_config(folder, config, dtype)


def export_model(
    folder: Path,
    config: Any,
    model: Any,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
) -> None:
    """Export a model as a checkpoint with the tensor names and layout of the published model.

    ``tensors`` yields the weights under the names that the loaded model uses, and they are renamed
    here. ``shapes`` has the shape of each tensor, in the same order. ``model`` may be on the meta
    device.
    """

    def on_disk(found: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in found:
            yield from to_checkpoint_tensors(model, name, tensor)

    empty = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
    written = {name: tuple(each.shape) for name, each in on_disk(empty)}
    export(folder, config, TensorManifest(written, dtype), on_disk(tensors))


def convert_checkpoint_dtype(source: Path, folder: Path, config: Any, dtype: torch.dtype) -> None:
    """Copy a checkpoint from ``source`` to ``folder`` and convert its weights to the precision
    ``dtype``.

    One tensor is in memory at a time.
    """
    stored = lazy_disk_tensors(source)
    weights = TensorManifest({name: each.shape for name, each in stored.items()}, dtype)
    export(folder, config, weights, ((name, each[...]) for name, each in stored.items()))


def _split_into_files(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int
) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        num = math.prod(shape) * itemsize
        if parts[-1] and size + num > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += num
    return parts


def _name(index: int, num: int) -> str:
    return "model.safetensors" if num == 1 else f"model-{index + 1:05d}-of-{num:05d}.safetensors"


def _write_header(file: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of eight
    file.write(len(text).to_bytes(8, "little") + text)


def _bytes(tensor: Tensor, dtype: torch.dtype) -> Any:
    return (tensor.detach().to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy()).data


def _write_config(folder: Path, config: Any, dtype: torch.dtype) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    written = config.__class__.from_dict(config.to_dict())
    written.architectures, written.dtype = [known.__name__], dtype
    written.save_pretrained(folder)
