"""Checkpoints in which every rank writes its own shard, with ``torch.distributed.checkpoint``.

    FOLDER/shards/__0_0.distcp, __1_0.distcp, .metadata   weights.NAME, optim.NAME.exp_avg, …
    FOLDER/trainer.pt                                     steps, options, random states;
                                                          written by rank 0 (``fsdp.py``)

A checkpoint can be read by any number of ranks. It holds only what is trained: for a model with
adapters, only these. Decides names and what must fit. Not here: when a checkpoint is complete
(``train/checkpoint.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from ramify.errors import ConfigError, StoreError
from ramify.train.backends.optimizers import CombinedOptimizer

FOLDER = "shards"
_WEIGHTS, _OPTIM = "weights", "optim"


class RandomState(NamedTuple):
    """Random states of one rank."""

    cpu: Tensor
    cuda: Tensor | None


class CheckpointWrite:
    """A checkpoint that is being written."""

    def __init__(self, work: Callable[[], object], in_background: bool) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = (
            threading.Thread(target=self._run, name="ramify-shards") if in_background else None
        )
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    def wait(self) -> None:
        """Wait until it is written. Raises StoreError if a rank could not write."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise StoreError(
                f"a rank's shards cannot be written: {_reason(self._error)}"
            ) from self._error

    def _run(self) -> None:
        try:
            self._work()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (raised again by wait)
            self._error = error


def save(
    folder: Path,
    weights: Mapping[str, Any],
    optimizers: CombinedOptimizer,
    group: Any,
    in_background: bool,
) -> CheckpointWrite:
    """Write this rank's current shard; in the background, from a copy."""
    state = _state(weights, _moments(weights, optimizers))
    if in_background:
        state = {
            kind: {name: _copied(each) for name, each in part.items()}
            for kind, part in state.items()
        }
    return CheckpointWrite(
        lambda: write_shards(state, checkpoint_id=folder / FOLDER, process_group=group),
        in_background,
    )


def load(
    folder: Path, weights: Mapping[str, Any], optimizers: CombinedOptimizer, group: Any
) -> None:
    """Read this rank's shard of a checkpoint that ``check`` has accepted."""
    shapes = sizes(folder)
    parameters = {name: owner.detach() for name, owner in weights.items()}
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    for name, moment in moments.items():
        prefix = f"{_OPTIM}.{name}."
        for key in (owner.removeprefix(prefix) for owner in shapes if owner.startswith(prefix)):
            is_number = not shapes[prefix + key]
            moment[key] = (
                torch.zeros((), device=weights[name].device)
                if is_number
                else torch.zeros_like(parameters[name])
            )
    read_shards(_state(parameters, moments), checkpoint_id=folder / FOLDER, process_group=group)
    owners = {
        parameter: owner
        for owner in optimizers.each
        for group in owner.param_groups
        for parameter in group["params"]
    }
    for name, moment in moments.items():
        owners[weights[name]].state.pop(weights[name], None)
        if moment:
            owners[weights[name]].state[weights[name]] = dict(moment)


def sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything in a checkpoint. Raises ConfigError if there is none."""
    try:
        metadata = FileSystemReader(folder / FOLDER).read_metadata()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no state of ranks: {FOLDER}/.metadata is missing"
        ) from None
    return {
        name: tuple(getattr(each, "size", ()))
        for name, each in metadata.state_dict_metadata.items()
    }


def check(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError, naming the first tensor that differs, unless the trained tensors of the
    checkpoint have exactly the ``shapes``."""
    prefix = f"{_WEIGHTS}."
    there = {
        name.removeprefix(prefix): size
        for name, size in sizes(folder).items()
        if name.startswith(prefix)
    }
    for name in sorted(there.keys() | shapes.keys()):
        saved, ours = there.get(name), shapes.get(name)
        if saved != ours:
            raise ConfigError(
                f"{folder} is from another model: '{name}' is {saved} there and {ours} here"
            )


def random_state(device: torch.device) -> RandomState:
    return RandomState(
        torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    )


def set_random_state(device: torch.device, state: RandomState) -> None:
    torch.set_rng_state(state.cpu)
    if state.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.cuda, device)


def _moments(
    weights: Mapping[str, Any], optimizers: CombinedOptimizer
) -> dict[str, dict[str, Tensor]]:
    """Name -> its optimizer state."""
    states = {
        parameter: state for each in optimizers.each for parameter, state in each.state.items()
    }
    return {name: dict(states.get(parameter, {})) for name, parameter in weights.items()}


def _state(
    weights: Mapping[str, Any], moments: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    optim = {
        f"{name}.{key}": each for name, moment in moments.items() for key, each in moment.items()
    }
    return {_WEIGHTS: {name: each.detach() for name, each in weights.items()}, _OPTIM: optim}


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which does not change with the weights."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (found, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {type(found).__name__}: {found}"
    return f"{type(error).__name__}: {error}"
