"""A simulated engine against values computed by hand: ``(end in seconds, spans)`` per request."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import pytest
from simpy import Environment

from ramify.extras.cluster.measured_engine_rate import InferenceEngineSpeed
from ramify.extras.cluster.simulated_engine import SimulatedEngine, Spans, pick_least_loaded_engine

STEADY = InferenceEngineSpeed(((1.0, 1.0),))
"""A step takes 1 s for any number of sequences."""
SLOWER = InferenceEngineSpeed(((1.0, 1.0), (2.0, 1.5)), prompt_token_s=0.1)
"""1 s alone, 1.5 s for two, 2 s for three."""

Ended = list[tuple[float, Spans]]


def ends(engine: SimulatedEngine, env: Environment, asked: list[tuple[float, int, int]]) -> Ended:
    """``asked``: (start in seconds, prompt tokens, sampled tokens) of each request."""
    found: Ended = [(0.0, [])] * len(asked)

    def ask(index: int, at: float, new: int, sampled: int) -> Generator[Any, Any, None]:
        yield env.timeout(at)
        spans = yield engine.request_reply(new, new, sampled)
        found[index] = (
            round(env.now, 9),
            [(version, round(tokens, 9)) for version, tokens in spans],
        )

    for index, request in enumerate(asked):
        env.process(ask(index, *request))
    env.run()
    return found


@pytest.fixture
def env() -> Environment:
    return Environment()


def test_one_slot_serves_requests_in_sequence(env: Environment) -> None:
    engine = SimulatedEngine(env, STEADY, 1)
    found = ends(engine, env, [(0, 0, 3), (1, 0, 2), (10, 0, 4)])
    assert found == [(3, [(0, 3)]), (5, [(0, 2)]), (14, [(0, 4)])]
    assert (engine.busy_s, engine.sequence_s, engine.sampled, engine.in_flight) == (9, 9, 9, 0)


def test_two_sequences_slow_each_other_down(env: Environment) -> None:
    """Alone until 2 s: 2 tokens. Two sequences for 3 s, until the second has its 2 tokens. Then
    alone for 10 - 4 tokens."""
    found = ends(SimulatedEngine(env, SLOWER, 2), env, [(0, 0, 10), (2, 0, 2)])
    assert [at for at, _ in found] == [2 + 3 + 6, 2 + 3]


def test_prefill_pauses_other_sequences(env: Environment) -> None:
    """The prompt of the second takes 1 s, during which the first pauses."""
    found = ends(SimulatedEngine(env, SLOWER, 2), env, [(0, 0, 10), (2, 10, 2)])
    assert [at for at, _ in found] == [2 + 1 + 3 + 6, 2 + 1 + 3]


def test_step_time_is_extrapolated_beyond_measured_batch_sizes(env: Environment) -> None:
    assert [SLOWER.decode_step_s(b) for b in (0.5, 1, 1.5, 2, 3, 4)] == [1, 1, 1.25, 1.5, 2, 2.5]
    assert [at for at, _ in ends(SimulatedEngine(env, SLOWER, 9), env, [(0, 0, 2)] * 3)] == [
        4,
        4,
        4,
    ]


def at(env: Environment, seconds: float, act: Callable[[], object]) -> None:
    def later() -> Generator[Any, Any, None]:
        yield env.timeout(seconds)
        act()

    env.process(later())


def test_new_weights_repeat_the_prefill_and_start_a_new_span(env: Environment) -> None:
    """By 4 s, the prompt of 10 tokens (1 s) and 3 sampled tokens are done; then these 13 tokens are
    prefilled again in 1.3 s."""
    engine = SimulatedEngine(env, SLOWER, 2)
    at(env, 4, lambda: engine.load_weights(7))
    assert ends(engine, env, [(0, 10, 5)]) == [(4 + 1.3 + 2, [(0, 3), (7, 2)])]


def test_paused_engine_samples_nothing(env: Environment) -> None:
    engine = SimulatedEngine(env, STEADY, 1)
    at(env, 2, engine.pause)
    at(env, 5, engine.resume)
    assert [end for end, _ in ends(engine, env, [(0, 0, 3), (1, 0, 1), (3, 0, 1)])] == [6, 7, 8]
    assert engine.busy_s == 5


def test_cancelled_request_frees_its_slot(env: Environment) -> None:
    engine = SimulatedEngine(env, STEADY, 1)
    first = engine.request_reply(0, 0, 100, "first")
    second = engine.request_reply(0, 0, 5, "first")
    at(env, 4, lambda: engine.cancel_requests_of("first"))
    assert ends(engine, env, [(1, 0, 2)]) == [(6, [(0, 2)])]
    assert (first.value, second.value, engine.sampled) == ([(0, 4)], [], 6)


def test_new_tree_goes_to_least_loaded_engine(env: Environment) -> None:
    engines = [SimulatedEngine(env, STEADY, 1) for _ in range(3)]
    engines[0].request_reply(0, 0, 1)
    assert [engines.index(pick_least_loaded_engine(engines)) for _ in range(4)] == [1, 2, 1, 2]


def test_simulated_engine_obeys_littles_law(env: Environment) -> None:
    """The mean number of sequences in the engine is the arrival rate times the mean time in it."""
    draw, stays = random.Random(3), []
    engine = SimulatedEngine(
        env, InferenceEngineSpeed(((1.0, 0.1), (10.0, 0.4)), prompt_token_s=1e-3), 1000
    )

    def one() -> Generator[Any, Any, None]:
        came = env.now
        yield engine.request_reply(draw.randrange(20), 0, draw.randrange(1, 20))
        stays.append(env.now - came)

    def arrive() -> Generator[Any, Any, None]:
        for _ in range(3000):
            yield env.timeout(draw.expovariate(1.0))
            env.process(one())

    env.process(arrive())
    env.run()
    assert len(stays) == 3000
    assert engine.sequence_s == pytest.approx(sum(stays), rel=1e-9)
    assert 1 < engine.sequence_s / env.now < 10
