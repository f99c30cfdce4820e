"""Save and load checkpoints in which every rank writes its own shard, with
``torch.distributed.checkpoint``.

    FOLDER/shards/__0_0.distcp, __1_0.distcp, .metadata   weights.NAME, optim.NAME.exp_avg, …
    FOLDER/trainer.pt                                     steps, options, random states;
                                                          written by rank 0 (``fsdp.py``)

A checkpoint can be read by any number of ranks, on any mesh. It holds only what is trained: for a
model with adapters, only these. A parameter that is two matrices side by side is stored as these
two (NAME.0, NAME.1): a rank may hold a part of each, which is not one block of the parameter.
``train/checkpoint.py`` decides when a checkpoint is complete.
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
from torch.distributed.tensor import DTensor, Shard

from ramify.errors import ConfigError, StoreError
from ramify.train.backends.optimizers import CombinedOptimizer

FOLDER = "shards"
_WEIGHTS, _OPTIM = "weights", "optim"


class RankRandomStates(NamedTuple):
    """The states of one rank's random number generators."""

    cpu: Tensor
    cuda: Tensor | None


class ShardedTrainingState(NamedTuple):
    """This rank's shard of a model's training state, in the form that checkpoints store."""

    weights: Mapping[str, Any]
    """Map the name of each trained parameter to this rank's shard of it."""
    optimizers: CombinedOptimizer
    packed: Mapping[str, int]
    """Map each parameter that joins two matrices to the dimension along which they are joined."""


class PendingCheckpointWrite:
    """A checkpoint write that may still be running in the background."""

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
        """Wait until the checkpoint has been written by all ranks.

        Raises StoreError if a rank could not write its shard.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise StoreError(
                f"a rank's shards cannot be written: {_error_text(self._error)}"
            ) from self._error

    def _run(self) -> None:
        try:
            self._work()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (raised again by wait)
            self._error = error


def save(
    folder: Path, trained: ShardedTrainingState, group: Any, in_background: bool
) -> PendingCheckpointWrite:
    """Write this rank's shard of a checkpoint.

    With ``in_background``, a copy of the current state is written while training continues.
    """
    state = _state(trained, trained.weights, _moments(trained.weights, trained.optimizers))
    if in_background:
        state = {
            kind: {name: _copy_to_cpu(each) for name, each in part.items()}
            for kind, part in state.items()
        }
    return PendingCheckpointWrite(
        lambda: write_shards(state, checkpoint_id=folder / FOLDER, process_group=group),
        in_background,
    )


def load(folder: Path, trained: ShardedTrainingState, group: Any) -> None:
    """Read this rank's shard of a checkpoint into the weights and the optimizer.

    Call ``check_shapes_match`` first to make sure that the checkpoint fits.
    """
    weights, optimizers, packed = trained
    shapes = tensor_shapes(folder)
    parameters = {name: owner.detach() for name, owner in weights.items()}
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    for name, moment in moments.items():
        prefix = f"{_OPTIM}.{name}."
        for owner in [each for each in shapes if each.startswith(prefix)]:
            key, is_number = owner.removeprefix(prefix), not shapes[owner]
            if name in packed and not is_number:
                key = key.rpartition(".")[0]
            if key in moment:
                continue
            moment[key] = (
                torch.zeros((), device=weights[name].device)
                if is_number
                else torch.zeros_like(parameters[name])
            )
    state = _state(trained, parameters, moments)
    read_shards(state, checkpoint_id=folder / FOLDER, process_group=group)
    owners = {
        parameter: owner
        for owner in optimizers.optimizers
        for group in owner.param_groups
        for parameter in group["params"]
    }
    for name, moment in moments.items():
        owners[weights[name]].state.pop(weights[name], None)
        if moment:
            owners[weights[name]].state[weights[name]] = dict(moment)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a checkpoint, by name.

    Scalars have an empty shape. Raises ConfigError if the folder holds no checkpoint.
    """
    try:
        metadata = FileSystemReader(folder / FOLDER).read_metadata()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no sharded training state: {FOLDER}/.metadata is missing"
        ) from None
    return {
        name: tuple(getattr(each, "size", ()))
        for name, each in metadata.state_dict_metadata.items()
    }


def check_shapes_match(folder: Path, trained: ShardedTrainingState) -> None:
    """Raise ConfigError if a checkpoint's weights differ in name or shape from the weights in
    ``trained``.

    The error names the first tensor that differs.
    """
    shapes = {
        stored: tuple(part.shape)
        for name, each in trained.weights.items()
        for stored, part in _stored_tensors(name, each, trained.packed.get(name)).items()
    }
    prefix = f"{_WEIGHTS}."
    there = {
        name.removeprefix(prefix): size
        for name, size in tensor_shapes(folder).items()
        if name.startswith(prefix)
    }
    for name in sorted(there.keys() | shapes.keys()):
        saved, ours = there.get(name), shapes.get(name)
        if saved != ours:
            raise ConfigError(
                f"{folder} was saved from a different model: '{name}' is {saved} there, but "
                f"{ours} in this run"
            )


def torch_random_state(device: torch.device) -> RankRandomStates:
    return RankRandomStates(
        torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    )


def set_random_state(device: torch.device, state: RankRandomStates) -> None:
    torch.set_rng_state(state.cpu)
    if state.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.cuda, device)


def _moments(
    weights: Mapping[str, Any], optimizers: CombinedOptimizer
) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state, such as AdamW's moments, of each parameter by parameter name."""
    states = {
        parameter: state
        for each in optimizers.optimizers
        for parameter, state in each.state.items()
    }
    return {name: dict(states.get(parameter, {})) for name, parameter in weights.items()}


def _state(
    trained: ShardedTrainingState,
    weights: Mapping[str, Any],
    moments: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, dict[str, Any]]:
    stored: dict[str, dict[str, Any]] = {_WEIGHTS: {}, _OPTIM: {}}
    for name, weight in weights.items():
        dim = trained.packed.get(name)
        stored[_WEIGHTS] |= _stored_tensors(name, weight.detach(), dim)
        for key, each in moments[name].items():
            stored[_OPTIM] |= _stored_tensors(f"{name}.{key}", each, dim if each.dim() else None)
    return stored


def _stored_tensors(name: str, tensor: Any, packed: int | None) -> dict[str, Any]:
    """Return the tensors that a checkpoint stores for one parameter, by name.

    This is the parameter itself, or its two matrices if it joins two along the dimension
    ``packed``. The tensors are views of the parameter's memory.
    """
    if packed is None:
        return {name: tensor}
    if not isinstance(tensor, DTensor):
        return {f"{name}.{index}": each for index, each in enumerate(tensor.chunk(2, packed))}
    shape = [*tensor.shape]
    shape[packed] //= 2
    # Within one of the two matrices, a rank's part is one block.
    placements = [
        Shard(packed) if getattr(each, "dim", None) == packed else each
        for each in tensor.placements
    ]
    return {
        f"{name}.{index}": DTensor.from_local(
            local,
            tensor.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        for index, local in enumerate(tensor.to_local().chunk(2, packed))
    }


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, so that later updates of the weights do not change the copy."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _error_text(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (found, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {type(found).__name__}: {found}"
    return f"{type(error).__name__}: {error}"
