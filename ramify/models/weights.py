"""Reads and writes a policy's weights as safetensors in Hugging Face's layout, in one file or in
several files with an index.

Before weights are copied into a model, they are compared with it, and an error names the first
tensor that does not fit. Writing casts the weights if requested, stores a matrix that is used twice
only once, and splits files larger than five gigabytes.

A fingerprint of weights is equal for equal bits, on every device, and different if one bit or the
order of rows changes. A parameter's bytes are read as 64-bit integers w_i, padded with zeros, and Σ
w_i · (2i + 1) is taken modulo 2^64. Name, shape and precision are hashed together with this sum.
Integer sums do not depend on the order in which a device adds. With i = W r + c the sum is Σ_c (2c
+ 1) Σ_r w_rc + 2W Σ_r r Σ_c w_rc: sums of rows and columns, at the speed of memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ramify.errors import ConfigError, StoreError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
IGNORED = ("rotary_emb.inv_freq",)
"""Suffixes of keys in old checkpoints that are ignored, because their values are computed
instead."""
_UNCHECKED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)
"""Configuration fields that do not affect the computation."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name, memory-mapped from disk.

    Raises StoreError if there are no files or a file is broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"{path} cannot be read as safetensors: {error}; copy or download it again"
            ) from None
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED)}


def check_weights(module: nn.Module, weights: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the weights do not fit the module.

    The error names the first tensor that is missing, unexpected or of the wrong shape.
    """
    expected = module.state_dict()
    shared = _find_shared_parameters(module)
    for name, tensor in expected.items():
        if name not in weights:
            if name in shared and shared[name] in weights:
                continue
            raise ConfigError(
                f"{where} has no tensor '{name}', which its config.json requires: the checkpoint "
                "is incomplete"
            )
        if weights[name].shape != tensor.shape:
            raise ConfigError(
                f"{where}: tensor '{name}' is {_shape(weights[name])}, but {_shape(tensor)} in "
                "the configuration: the weights belong to another config.json"
            )
    if extra := next((name for name in weights if name not in expected), None):
        raise ConfigError(
            f"{where} has a tensor '{extra}' that the model of its config.json does not have"
        )


def load_weights(
    module: nn.Module, weights: Mapping[str, Tensor], where: str = "the checkpoint"
) -> None:
    """Copy weights into a module's parameters, in place and in the parameters' precision.

    Raises ConfigError if the weights do not fit the module.
    """
    check_weights(module, weights, where)
    expected = module.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            expected[name].copy_(tensor)


def write_weights(module: nn.Module, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a module's parameters to a folder as safetensors, cast to ``dtype`` if it is given."""
    from huggingface_hub import save_torch_state_dict

    state = module.state_dict()
    shared = _find_shared_parameters(module)
    tensors = {name: _cast(tensor, dtype) for name, tensor in state.items() if name not in shared}
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})


def config_difference(ours: Any, theirs: Any) -> str:
    """Describe the first relevant field in which two Hugging Face configurations differ.

    Returns an empty string if there is none.
    """
    mine, other = ours.to_dict(), theirs.to_dict()
    for name in ["model_type", *sorted(mine.keys() | other.keys())]:
        if name not in _UNCHECKED and mine.get(name) != other.get(name):
            return f"{name}: {mine.get(name)!r} here, {other.get(name)!r} there"
    return ""


def weight_files(folder: Path) -> Iterator[Path]:
    """Yield the paths of a checkpoint's safetensors files.

    Raises StoreError if any are missing.
    """
    if (folder / _SINGLE).is_file():
        yield folder / _SINGLE
        return
    index = folder / _INDEX
    if not index.is_file():
        raise StoreError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}: give a folder with safetensors weights"
        )
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{index} is not an index of safetensors files: {error!r}; copy or download it again"
        ) from None
    for name in names:
        if not (folder / name).is_file():
            raise StoreError(
                f"{folder}: {_INDEX} names {name}, which is missing: the download is incomplete"
            )
        yield folder / name


def _find_shared_parameters(module: nn.Module) -> dict[str, str]:
    """Return the parameters that have two names, such as an output matrix tied to the embedding.

    Returns a dict from the second name to the first.
    """
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            shared[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return shared


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return (
        tensor.detach().to(dtype)
        if dtype is not None and tensor.is_floating_point()
        else tensor.detach()
    )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


_COLUMNS = 1024
_ROWS, _GPU_ROWS = 128, 8192
"""Number of rows that are summed at a time, on a CPU and on a GPU. On a CPU, they fit into its
cache."""
_WORD = 8
"""Size in bytes of the integers that are summed for a fingerprint."""


def fingerprint(module: nn.Module) -> str:
    """Return a fingerprint of all parameters of a module, as sixteen hexadecimal digits.

    Equal weights give equal fingerprints on every device.
    """
    return tensors_fingerprint(module.named_parameters())


def tensors_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a fingerprint of named tensors, as sixteen hexadecimal digits.

    Their order does not matter.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        checksum = _tensor_checksum(tensor.detach())
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {checksum}\n".encode())
    return digest.hexdigest()


def _tensor_checksum(tensor: Tensor) -> int:
    bytes_N = tensor.contiguous().flatten().view(torch.uint8)
    line = _COLUMNS * _WORD
    num_rows = len(bytes_N) // line
    total = _sum_of_lines(bytes_N[: num_rows * line], 0)
    if rest := len(bytes_N) - num_rows * line:
        last = torch.zeros(line, dtype=torch.uint8, device=tensor.device)
        last[:rest] = bytes_N[num_rows * line :]
        total += _sum_of_lines(last, num_rows)
    return total % (1 << 64)


def _sum_of_lines(bytes_N: Tensor, first: int) -> int:
    """Return the contribution of some rows of a tensor to its fingerprint.

    It is a weighted sum of 64-bit words. ``bytes_N`` are whole rows of ``_COLUMNS`` words, and
    ``first`` is the index of the first of these rows in the tensor.
    """
    if bytes_N.storage_offset() % _WORD:
        bytes_N = bytes_N.clone()
    words_RC, device = bytes_N.view(torch.int64).view(-1, _COLUMNS), bytes_N.device
    columns_C, rows = torch.zeros(_COLUMNS, dtype=torch.int64, device=device), 0
    at_once = _ROWS if device.type == "cpu" else _GPU_ROWS
    for start in range(0, len(words_RC), at_once):
        part_RC = words_RC[start : start + at_once]
        numbers_R = torch.arange(len(part_RC), device=device) + (first + start)
        columns_C += part_RC.sum(0)
        rows += int((part_RC.sum(1) * numbers_R).sum())
    odd_C = 2 * torch.arange(_COLUMNS, device=device) + 1
    return int((columns_C * odd_C).sum()) + 2 * _COLUMNS * rows
