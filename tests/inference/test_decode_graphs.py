"""Steps that only decode, recorded and repeated in fixed shapes: the same tokens and
log-probabilities as without. A function that computes again takes the place of a CUDA graph; the
GPU kit measures with real ones (``scripts/gpu engine parity``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ramify.inference.local.decode_graphs import CudaGraphShape, Replay
from ramify.inference.local.engine import InferenceEngineLimits, LocalEngine
from ramify.inference.local.generation_request import GenerationState
from ramify.inference.local.kv_cache import KeyValueCache, KvCacheLayout
from ramify.inference.local.kv_cache_slots import EngineStep
from ramify.inference.local.model_runner import BatchedStepModelRunner
from ramify.models.dense import DenseModel
from ramify.models.load import Policy
from tests.inference.helpers import WINDOW, drained, policy
from tests.inference.test_engine import assert_as_expected, requests


class Recorder:
    """Counts what is recorded; a repetition computes again."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        self.num += 1
        return work


def recording_engine(made: Policy, record: Callable[..., Replay], slots: int = 8) -> LocalEngine:
    model = made.model
    assert isinstance(model, DenseModel)
    shape = model.shape
    sizes = (shape.num_layers, shape.num_kv_heads, shape.head_size)
    layout = KvCacheLayout(*sizes, torch.float32, torch.device("cpu"))
    limits = InferenceEngineLimits(
        slots=slots, prefill_tokens=64, cache_bytes=64 << 20, window=WINDOW
    )
    return LocalEngine(BatchedStepModelRunner(model, layout, record), limits)


@pytest.mark.parametrize("slots", [1, 5, 8])
def test_recorded_steps_give_the_same_tokens_and_logprobs(slots: int) -> None:
    record = Recorder()
    running = recording_engine(policy(), record, slots)
    asked = requests(12, seed=5)
    for request in asked:
        running.add(GenerationState(**request))
    assert_as_expected(drained(running), asked)
    assert 0 < record.num < running.num_steps / 2


def test_graphs_are_recorded_again_when_a_weight_moves() -> None:
    made, record = policy(), Recorder()
    running = recording_engine(made, record)

    def reply() -> list[int]:
        running.add(GenerationState(range(4, 20), max_tokens=12, seed="x"))
        return drained(running)[0].sampled_ids

    before, num = reply(), record.num
    assert reply() == before
    assert record.num == num
    parameter = made.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    parameter.data = parameter.data.clone()
    assert reply() == before
    assert record.num == 2 * num


def test_device_without_graphs_is_named_once_and_computes() -> None:
    def refuse(work: Callable[[], Tensor]) -> Replay:
        raise RuntimeError("no graphs here")

    running = recording_engine(policy(), refuse)
    asked = requests(4, seed=9)
    for request in asked:
        running.add(GenerationState(**request))
    with pytest.warns(
        UserWarning, match=r"CUDA graphs cannot be recorded on this device \(no graphs here\)"
    ) as warned:
        assert_as_expected(drained(running), asked)
    assert len(warned) == 1


def test_shapes_hold_their_steps_in_few_sizes() -> None:
    cache = KeyValueCache(KvCacheLayout(1, 1, 2, torch.float32, torch.device("cpu")), 48, 1000)
    shapes = set()
    for num in range(1, 49):
        for position in range(0, 1000, 7):
            shape = CudaGraphShape.for_step(
                EngineStep(list(range(num)), [position] * num, [5] * num), cache
            )
            assert num <= shape.tokens <= shape.slots <= 48
            assert position < shape.length <= 1000
            shapes.add(shape)
    assert len(shapes) == 11 * 8  # 1 to 48 slots; 64 to 1,000 positions
    gap = CudaGraphShape.for_step(EngineStep([0, 40], [3, 70], [5, 5]), cache)
    assert gap == CudaGraphShape(2, 48, 128)
