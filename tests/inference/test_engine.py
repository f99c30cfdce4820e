"""The engine against a plain forward pass for each token: the same tokens and log-probabilities, in
any state of the cache and in any batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ramify.errors import RequestRefusedError
from ramify.inference.base import CachePressure
from ramify.inference.local.engine import LocalEngine
from ramify.inference.local.generation_request import GenerationState, SamplingSettings
from ramify.models.weights import fingerprint
from tests.inference.helpers import WINDOW, drained, engine, expected, logits, policy

POLICY = policy()
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS = [
    SamplingSettings(),
    SamplingSettings(0.7),
    SamplingSettings(0.0),
    SamplingSettings(top_p=0.8),
    SamplingSettings(1.3, top_k=9),
]


def requests(num: int, *, shared: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Return requests with prompts of 1 to 60 tokens and replies of up to 25, in all settings; the
    first ``shared`` tokens are common."""
    pick = random.Random(seed)
    common = [pick.randrange(4, 320) for _ in range(shared)]
    return [
        {
            "prompt_ids": common + [pick.randrange(4, 320) for _ in range(pick.randint(1, 60))],
            "max_tokens": pick.randint(1, 25),
            "draw": SETTINGS[index % len(SETTINGS)],
            "seed": f"{seed}/{index}",
            "stop_ids": (3, 7, 11, 13, 17, 19, 23),
        }
        for index in range(num)
    ]


REFERENCE: dict[str, GenerationState] = {}
"""Reference generations by request; the same requests go through many engines."""


def assert_as_expected(done: list[GenerationState], asked: list[dict[str, Any]]) -> None:
    by_prompt = {(tuple(each.ids[: each.num_prompt]), each.draw): each for each in done}
    assert len(by_prompt) == len(asked)
    for request in asked:
        ours = by_prompt[tuple(request["prompt_ids"]), request["draw"]]
        alone = REFERENCE.get(str(request)) or expected(POLICY, GenerationState(**request))
        REFERENCE[str(request)] = alone
        assert (ours.sampled_ids, ours.end, ours.candidate_ids_by_token) == (
            alone.sampled_ids,
            alone.end,
            alone.candidate_ids_by_token,
        )
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5
        )


def run(asked: list[dict[str, Any]], **room: Any) -> tuple[list[GenerationState], LocalEngine]:
    running = engine(POLICY, **room)
    for request in asked:
        running.add(GenerationState(**request))
    return drained(running), running


@pytest.mark.parametrize(
    "room",
    [
        {},
        {"slots": 1},
        {"slots": 3, "prefill_tokens": 7},
        {"prefill_tokens": 1},
        {"slots": 64, "prefill_tokens": 4096},
        {"reuse": False},
        {"cache_bytes": 256 * 128 * 3},  # 256 bytes a token: three slots of 128
    ],
    ids=[
        "usual",
        "one-slot",
        "chunks",
        "token-by-token",
        "all-at-once",
        "no-reuse",
        "little-memory",
    ],
)
def test_engine_limits_do_not_change_samples(room: dict[str, Any]) -> None:
    asked = requests(16)
    done, _ = run(asked, **room)
    assert_as_expected(done, asked)


def test_common_prefix_is_computed_once() -> None:
    asked = requests(12, shared=150)
    done, shared = run(asked, slots=4, prefill_tokens=64)
    assert_as_expected(done, asked)
    _, separate = run(asked, slots=4, prefill_tokens=64, reuse=False)
    at_least = (
        11 * 150 - 3 * 32
    )  # the three that join while the last 32 tokens are computed may compute them, too
    assert separate.num_computed - shared.num_computed >= at_least
    assert sum(each.num_reused for each in done) >= at_least


def test_next_turns_reuse_the_cache() -> None:
    """Three turns of several calls; each prompt is the path so far plus new tokens. Every token is
    computed once."""
    running = engine(POLICY, slots=4)
    pick = random.Random(1)
    paths = [[pick.randrange(4, 320) for _ in range(20)] for _ in range(3)]
    for turn in range(3):
        asked = [
            {"prompt_ids": path, "max_tokens": 8, "seed": f"{turn}/{index}", "affinity": str(index)}
            for index, path in enumerate(paths)
        ]
        for request in asked:
            running.add(GenerationState(**request))
        done = drained(running)
        assert_as_expected(done, [{**request, "draw": SamplingSettings()} for request in asked])
        by_affinity = {each.affinity: each.ids for each in done}
        paths = [[*by_affinity[str(index)], pick.randrange(4, 320), 5] for index in range(3)]
    assert running.num_computed == sum(
        len(each.ids) - 1 for each in done
    )  # the last token of a path is never needed


@pytest.mark.parametrize("steps", [0, 3])
def test_cancelling_the_only_sequence_keeps_the_cache(steps: int) -> None:
    running, prompt = engine(POLICY, slots=4), list(range(5, 55))
    cancelled = GenerationState(prompt, max_tokens=78)
    running.add(cancelled)
    for _ in range(steps):
        assert running.step() == []
    running.cancel(cancelled)
    assert running.step() == []
    running.add(GenerationState(prompt, max_tokens=4))
    (again,) = drained(running)
    assert again.num_reused == (len(prompt) - 1 if steps else 0)


def test_engine_reports_cache_pressure() -> None:
    running = engine(POLICY, cache_bytes=256 * 128 * 4, slots=3)
    assert running.pressure == CachePressure(0.0, 0, 0)
    for request in requests(5):
        running.add(GenerationState(**{**request, "max_tokens": 20, "stop_ids": ()}))
    running.step()
    assert running.pressure == CachePressure(
        0.75, 2, 0
    )  # three slots of 128 tokens, with memory for four
    drained(running)
    assert running.pressure == CachePressure(0.0, 0, 0)


def test_released_cache_is_no_pressure_and_loses_no_tokens() -> None:
    asked = [{**request, "max_tokens": 20, "stop_ids": ()} for request in requests(3)]
    running = engine(POLICY)
    states = [GenerationState(**request) for request in asked]
    for state in states:
        running.add(state)
    for _ in range(5):
        running.step()
    running.release_cache()
    assert running.pressure == CachePressure(0.0, 3, 0)
    drained(running)
    assert_as_expected(states, asked)


def test_preemption_loses_no_tokens() -> None:
    """Replies grow until fewer slots fit; the preempted ones restart from their ids."""
    asked = [{**request, "max_tokens": 90, "stop_ids": ()} for request in requests(6)]
    done, running = run(asked, cache_bytes=256 * 128 * 5, slots=5)
    assert running.num_preempted > 0
    assert running.pressure.evicted == running.num_preempted
    assert_as_expected(done, asked)


def test_number_of_slots_recovers_after_a_long_sequence() -> None:
    running = engine(POLICY, cache_bytes=256 * 256 * 2, slots=8)
    running.add(GenerationState([5] * 200, max_tokens=20))
    drained(running)
    asked = requests(20)
    for request in asked:
        running.add(GenerationState(**request))
    most = 0
    done: list[GenerationState] = []
    while not running.is_idle:
        done += running.step()
        most = max(most, sum(bool(each.logprobs) for each in running))
    assert most >= 4
    assert_as_expected(done, asked)


@pytest.mark.parametrize("seed", range(4))
def test_random_schedule_gives_the_reference_tokens(seed: int) -> None:
    """Requests that come, go and are cancelled at any time, over few slots and little memory."""
    pick = random.Random(seed)
    asked = requests(20, shared=pick.choice([0, 40]), seed=seed)
    running = engine(
        POLICY,
        slots=pick.randint(1, 6),
        prefill_tokens=pick.randint(1, 50),
        cache_bytes=256 * pick.randint(300, 900),
    )
    done: list[GenerationState] = []
    cancelled = []
    left = list(asked)
    while left or not running.is_idle:
        for _ in range(pick.randint(0, 3)):
            if left:
                running.add(GenerationState(**left.pop(0)))
        if pick.random() < 0.1 and len(cancelled) < 4 and (inside := list(running)):
            victim = pick.choice(inside)
            running.cancel(victim)
            cancelled.append(tuple(victim.ids[: victim.num_prompt]))
        done += running.step()
    assert_as_expected(
        done, [request for request in asked if tuple(request["prompt_ids"]) not in cancelled]
    )


def test_new_weights_apply_from_the_next_step() -> None:
    """Sampled tokens stay; later ones come from the new weights, given all tokens before."""
    made, other = policy(0), policy(1)
    running = engine(made)
    generation = GenerationState([5, 6, 7, 8], max_tokens=20, seed="s")
    running.add(generation)
    for _ in range(8):
        running.step()
    before = list(generation.sampled_ids)
    made.model.load_state_dict(other.model.state_dict())
    running.mark_weights_changed(version=4)
    drained(running)
    assert [(span.start, span.end, span.version) for span in generation.version_spans] == [
        (0, 8, 0),
        (8, 20, 4),
    ]
    alone = GenerationState([5, 6, 7, 8], max_tokens=8, seed="s")
    assert expected(policy(0), alone).sampled_ids == before
    alone.end, alone.max_tokens = None, 20
    assert expected(other, alone).sampled_ids == generation.sampled_ids
    torch.testing.assert_close(
        torch.tensor(generation.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5
    )
    assert fingerprint(made.model) == fingerprint(other.model)


def test_the_window_is_filled_to_its_last_token() -> None:
    asked = [{"prompt_ids": [9] * (WINDOW - 4), "max_tokens": 4, "draw": SamplingSettings()}]
    done, _ = run(asked)
    assert (len(done[0].ids), done[0].end) == (WINDOW, "length")
    assert_as_expected(done, asked)


def test_prompt_larger_than_the_cache_is_refused() -> None:
    running = engine(POLICY, cache_bytes=256 * 40)
    with pytest.raises(
        RequestRefusedError, match="the prompt has 40 tokens, and the cache of 0 MiB holds 40"
    ):
        running.add(GenerationState([5] * 40, max_tokens=3))
    running.add(GenerationState([5] * 38, max_tokens=30))
    assert [(len(each.ids), each.end) for each in drained(running)] == [(40, "length")]


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.bfloat16, 0.2),
        pytest.param("cuda", torch.float32, 1e-4, marks=CUDA),
        pytest.param("cuda", torch.bfloat16, 0.2, marks=CUDA),
    ],
)
def test_logprobs_are_accurate_in_other_precisions_and_devices(
    device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Log-probabilities of the sampled tokens, against one fp32 pass on the CPU."""
    made = policy(sharpness=4.0)
    made.model.to(device, dtype)
    running = engine(made, slots=4, prefill_tokens=33)
    for request in requests(12, shared=40):
        running.add(GenerationState(**{**request, "draw": SamplingSettings()}))
    done = drained(running)
    exact = policy(sharpness=4.0)
    exact.model.load_state_dict(
        {name: each.float().cpu() for name, each in made.model.state_dict().items()}
    )
    for each in done:
        rows = logits(exact, each.ids)[each.num_prompt - 1 : -1].log_softmax(-1)
        theirs = rows.gather(1, torch.tensor(each.sampled_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(each.logprobs), theirs, rtol=0, atol=tolerance)


def test_stop_text_may_span_tokens() -> None:
    decode = "".join  # ids are letters here
    letters = {65: "a", 66: "b", 67: "c"}
    generation = GenerationState(
        [1], max_tokens=9, stop=("bc", "zz"), decode=lambda ids: decode(letters[id] for id in ids)
    )
    for id in (65, 66, 67):
        assert generation.end is None
        generation.append(id, -1.0, None, 0)
    assert (generation.end, generation.stopped_at, generation.sampled_ids) == (
        "stop",
        "bc",
        [65, 66, 67],
    )
