"""Captured decoding steps give the same tokens and log-probabilities as uncaptured ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ramify.inference.local.captured import CapturedDecoding, Compute
from ramify.inference.local.engine import EngineLimits, LocalEngine
from ramify.inference.local.generation import Generation
from ramify.inference.local.kv_cache import CacheLayout
from ramify.inference.local.model_runner import FlatRunner
from ramify.models.dense import DenseModel
from ramify.models.load import Policy
from tests.inference.helpers import WINDOW, drained, expected, policy
from tests.inference.test_engine import CUDA, assert_as_expected, requests


class RepeatingCapture:
    """Repeats a computation over the same addresses, like a CUDA graph."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, compute: Compute) -> tuple[Callable[[], object], Tensor]:
        self.num_captured += 1
        output = compute()

        def replay() -> None:
            self.num_replayed += 1
            output.copy_(compute())

        return replay, output


def captured_engine(made: Policy, capture: Any, **room: Any) -> LocalEngine:
    model = made.model
    assert isinstance(model, DenseModel)
    shape = model.shape
    layout = CacheLayout(
        shape.num_layers, shape.num_kv_heads, shape.head_size, made.dtype, made.device, num_spare=16
    )
    runner = FlatRunner(model, layout, CapturedDecoding(model, lambda: capture))
    limits = {"slots": 8, "prefill_tokens": 64, "cache_bytes": 64 << 20, "window": WINDOW, **room}
    return LocalEngine(runner, EngineLimits(**limits))


def run_to_end(running: LocalEngine, asked: list[dict[str, Any]]) -> list[Generation]:
    for request in asked:
        running.add(Generation(**request))
    return drained(running)


def test_captured_steps_sample_the_same_tokens() -> None:
    """With full slots, gaps between running ones, few slots, and preemption for lack of memory."""
    for room in ({}, {"slots": 3, "prefill_tokens": 7}, {"cache_bytes": 256 * 128 * 3}):
        capture = RepeatingCapture()
        asked = requests(16)
        running = captured_engine(policy(), capture, **room)
        assert_as_expected(run_to_end(running, asked), asked)
        assert capture.num_replayed > 3 * capture.num_captured > 0


def test_idle_slots_keep_their_cache_during_captured_steps() -> None:
    """The second turn of a call whose slot was idle while other slots decoded."""
    capture = RepeatingCapture()
    made = policy()
    running = captured_engine(made, capture, slots=4)
    first = {"prompt_ids": list(range(10, 40)), "max_tokens": 4, "seed": "a", "affinity": "0"}
    path = run_to_end(running, [first])[0].ids
    long = [{"prompt_ids": [each, 8], "max_tokens": 40, "seed": str(each)} for each in (5, 6)]
    run_to_end(running, long)
    assert capture.num_replayed
    again = {"prompt_ids": [*path, 9], "max_tokens": 5, "seed": "b", "affinity": "0"}
    (ours,) = run_to_end(running, [again])
    assert ours.num_reused == len(path) - 1
    assert ours.sampled == expected(made, Generation(**again)).sampled


def test_moved_weights_are_captured_again() -> None:
    capture = RepeatingCapture()
    made, other = policy(), policy(seed=1)
    running = captured_engine(made, capture)
    asked = {"prompt_ids": [5, 6, 7], "max_tokens": 20, "seed": "a"}
    run_to_end(running, [asked])
    before = capture.num_captured
    weights = dict(other.model.named_parameters())
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            parameter.copy_(weights[name])
    running.forget(1)
    run_to_end(running, [asked])
    assert capture.num_captured == before, "the addresses are the same"
    for name, parameter in made.model.named_parameters():
        parameter.data = weights[name].data.clone()
    running.forget(2)
    (ours,) = run_to_end(running, [asked])
    assert capture.num_captured == before + 1
    assert ours.sampled == expected(other, Generation(**asked)).sampled


def test_device_without_capture_falls_back_to_single_calls() -> None:
    def refuse(compute: Compute) -> Any:
        raise RuntimeError("no graphs here")

    asked = requests(8)
    assert_as_expected(run_to_end(captured_engine(policy(), refuse), asked), asked)


@CUDA
def test_cuda_graphs_sample_the_same_tokens() -> None:
    from ramify.inference.local.captured import CudaCapture

    made = policy()
    asked = requests(24, seed=3)
    alone = [expected(made, Generation(**request)).sampled for request in asked]
    made.model.cuda()
    running = captured_engine(made, CudaCapture())
    by_prompt = {tuple(each.ids[: each.num_prompt]): each for each in run_to_end(running, asked)}
    assert [by_prompt[tuple(each["prompt_ids"])].sampled for each in asked] == alone
