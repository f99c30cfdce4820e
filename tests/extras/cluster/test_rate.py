"""Engine rates, fitted to requests of a simulated engine of known speed and calibrated on a client
with a fixed latency."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator
from typing import Any

import pytest
from simpy import Environment

from ramify import ScriptedClient
from ramify.errors import ConfigError
from ramify.extras.cluster.measured_engine_rate import (
    InferenceEngineSpeed,
    MeasuredRequest,
    fit,
    measure_engine_rate,
    queue_for_slots,
    rate_from_steps,
)
from ramify.extras.cluster.simulated_engine import SimulatedEngine

TRUE = InferenceEngineSpeed(((1.0, 0.011), (32.0, 0.042)), prompt_token_s=2e-4, request_s=0.03)


def served(
    rate: InferenceEngineSpeed, slots: int, num: int = 400, engines: int = 1
) -> list[MeasuredRequest]:
    env, draw = Environment(), random.Random(0)
    servers = [SimulatedEngine(env, rate, slots) for _ in range(engines)]
    found: list[MeasuredRequest] = []

    def user(engine: SimulatedEngine) -> Generator[Any, Any, None]:
        for _ in range(num // (8 * engines)):
            yield env.timeout(draw.expovariate(0.5))
            began, new, sampled = env.now, draw.randrange(500), draw.randrange(1, 200)
            yield env.timeout(rate.request_s)
            yield engine.request_reply(new, new, sampled)
            found.append(MeasuredRequest(began, env.now, new, sampled))

    for engine in servers:
        for _ in range(8):
            env.process(user(engine))
    env.run()
    return found


@pytest.mark.parametrize("engines", [1, 2])
def test_fit_recovers_the_rate(engines: int) -> None:
    found = fit(served(TRUE, 32, 1600, engines), engines, slots=32)
    assert found.decode_step_s(4) == pytest.approx(TRUE.decode_step_s(4), rel=0.12)
    assert found.decode_step_s(32) == pytest.approx(TRUE.decode_step_s(32), rel=0.2)
    assert found.prompt_token_s == pytest.approx(TRUE.prompt_token_s, rel=0.5)


def test_time_waiting_for_a_slot_is_excluded() -> None:
    """Two slots: the third request starts when the first ends, the fourth when the second ends."""
    asked = [
        MeasuredRequest(0, 4, 0, 4),
        MeasuredRequest(1, 6, 0, 5),
        MeasuredRequest(2, 9, 0, 5),
        MeasuredRequest(3, 8, 0, 2),
    ]
    assert [each.begun_s for each in queue_for_slots(asked, 2)] == [0, 1, 4, 6]
    assert queue_for_slots(asked, None) == asked
    crowded = fit(served(TRUE, 4, 1600), slots=4)
    assert [crowded.decode_step_s(b) for b in (2, 4)] == pytest.approx(
        [TRUE.decode_step_s(b) for b in (2, 4)], rel=0.15
    )
    with pytest.raises(
        ConfigError,
        match=r"^only 0 of 9 requests can be used to measure engine speed: .*schedule\.save_rollouts_every=1.* --calibrate",
    ):
        fit([MeasuredRequest(0.0, 1.0, 5, 0)] * 9, slots=4)


def test_fitted_rates_are_never_negative() -> None:
    """Noise makes larger batches look faster; no number of a rate becomes negative."""
    asked = [
        MeasuredRequest(t * 10.0, t * 10.0 + 2.0 - 0.1 * (t % 3), t % 3, 10) for t in range(12)
    ]
    found = fit(asked)
    assert min(found.points[0][1], found.prompt_token_s, found.request_s) >= 0
    assert rate_from_steps([(4, 0.02), (1, 0.01), (2, 0.009)], 0.0).points == (
        (1, 0.01),
        (2, 0.01),
        (4, 0.02),
    )


def test_rate_is_calibrated_on_a_live_engine() -> None:
    client = ScriptedClient(lambda messages: "word " * 80, latency_s=0.02)
    rate = asyncio.run(measure_engine_rate(client, slots=4, tokens=40))
    assert [b for b, _ in rate.points] == [1, 2, 4]
    # Reading the prompts (of at most 64 tokens) is measured apart and subtracted.
    assert all(
        40 * step_s + rate.prompt_token_s * at_once * 64 >= 0.02 for at_once, step_s in rate.points
    )
    short = ScriptedClient(lambda messages: "no")
    with pytest.raises(ConfigError, match="ends its replies after 1 of 40 tokens"):
        asyncio.run(measure_engine_rate(short, slots=4, tokens=40))
