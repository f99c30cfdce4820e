"""Whole runs in simulated time: values computed by hand, determinism, and equal work in every
setting."""

from __future__ import annotations

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.extras.cluster.measured_engine_rate import InferenceEngineSpeed
from ramify.extras.cluster.rollout_workloads import (
    CallWorkload,
    CellWorkload,
    RolloutWorkload,
    TurnWorkload,
)
from ramify.extras.cluster.simulate import (
    DeviceSplit,
    SimulationSetting,
    best,
    quantile,
    setting_combinations,
    simulate,
    simulate_settings,
    splits,
)
from ramify.extras.cluster.simulation_inputs import MeasuredRunSettings, SimulationInputs

SIZES = MeasuredRunSettings(
    items=1, group=1, concurrency=9, on_wire=9, engines=1, slots=9, ranks=1, staleness=0
)


def plain(tokens: int) -> RolloutWorkload:
    return RolloutWorkload((CallWorkload((TurnWorkload(0, 0, tokens),)),))


def inputs_for(
    *lengths: list[int], step_s: float = 1.0, learn_s: float = 2.0, publish_s: float = 0.5
) -> SimulationInputs:
    """``lengths``: reply lengths in tokens, one list per group."""
    return SimulationInputs(
        groups=[[plain(tokens) for tokens in group] for group in lengths],
        rate=InferenceEngineSpeed(((1.0, step_s),)),
        sizes=SIZES,
        learn_base_s=learn_s,
        learn_token_s=0.0,
        publish_s=[publish_s],
    )


def setting(**changes: object) -> SimulationSetting:
    base = SimulationSetting(items=1, group=1, concurrency=9, slots=9)
    return msgspec.structs.replace(base, **changes)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """10 tokens of 1 s each, 2 s of learning, 0.5 s of publishing."""
    found = simulate(inputs_for([10]), setting(), steps=4)
    assert (found.step_s, found.step_90_s, found.step_mean_s) == (12.5, 12.5, 12.5)
    assert (found.engine_busy, found.trainer_busy, found.staleness_max) == (
        10 / 12.5,
        2.5 / 12.5,
        0,
    )
    assert (found.sampled_per_s, found.learnt_per_s) == (10 / 12.5, 10 / 12.5)
    assert found.steps_per_hour == 3600 / 12.5


def test_staleness_matches_hand_calculation() -> None:
    """Groups of 10 s, any number at once; learning takes 2 s. With one version of staleness two are
    open at a time:

    t       0          10         12              14       22         24              26
    begun   0 and 1               2               3                   4               5
    taken              0          1                        2          3
    """
    found = simulate(inputs_for([10], publish_s=0.0), setting(staleness=1), steps=8)
    assert found.step_mean_s == 6
    assert found.staleness_max == 1
    assert found.engine_busy == pytest.approx(1)
    two = simulate(inputs_for([10], learn_s=20.0, publish_s=0.0), setting(staleness=1), steps=8)
    assert (two.step_s, two.trainer_busy, two.staleness, two.staleness_max) == (20, 1, 1, 1)


def test_rollouts_wait_for_a_free_slot() -> None:
    """Two rollouts of 3 and 5 tokens take 5 s with two slots and 8 s with one."""
    measured = inputs_for([3, 5], learn_s=0.0, publish_s=0.0)
    steps = [simulate(measured, setting(group=2, slots=slots), steps=2).step_s for slots in (2, 1)]
    assert steps == [5, 8]
    assert simulate(measured, setting(group=2, concurrency=1), steps=2).step_s == 8
    assert simulate(measured, setting(group=2, on_wire=1), steps=2).step_s == 8


def test_parent_holds_no_slot_or_request_while_children_run() -> None:
    """The root samples 2 tokens, runs a cell of 0.5 s with two parallel leaves of 3 and then one of
    1, and samples 2 more: one slot is enough."""
    leaf = [CallWorkload((TurnWorkload(0, 0, tokens),)) for tokens in (3, 1)]
    cell = CellWorkload(0.5, ((leaf[0], leaf[0]), (leaf[1],)))
    root = CallWorkload((TurnWorkload(0, 0, 2, cells=(cell,)), TurnWorkload(0, 0, 2)), host_s=0.25)
    measured = msgspec.structs.replace(
        inputs_for([1], learn_s=0.0, publish_s=0.0), groups=[[RolloutWorkload((root,))]]
    )
    assert simulate(measured, setting(), steps=1).step_s == 2 + 0.25 + 0.5 + 3 + 1 + 2
    assert (
        simulate(measured, setting(slots=1, on_wire=1), steps=1).step_s
        == 2 + 0.25 + 0.5 + 6 + 1 + 2
    )


def test_engine_on_shared_devices_pauses_during_training() -> None:
    """On separate devices, 10 s of sampling and 10 s of learning overlap; on the same device they
    alternate."""
    measured = inputs_for([10], learn_s=10.0, publish_s=0.0)
    assert simulate(measured, setting(staleness=1, slots=1), steps=6).step_mean_s == 10
    assert simulate(measured, setting(staleness=1, slots=1, shared=True), steps=6).step_mean_s == 20


LONG = inputs_for([4, 40], [6, 7], [5, 9], [30, 3], [8, 8], learn_s=3.0)


def test_simulation_is_deterministic_for_a_seed() -> None:
    asked = setting(group=2, items=3, staleness=1, concurrency=4)
    first, again, other = (simulate(LONG, asked, steps=9, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("steps", [6])
def test_total_work_is_equal_for_all_settings(steps: int) -> None:
    """Settings change the step time, not the numbers of sampled and trained tokens."""
    asked = [
        setting(group=2, items=3, engines=engines, slots=slots, concurrency=concurrency)
        for engines, slots, concurrency in [(1, 1, 9), (3, 2, 9), (2, 9, 2)]
    ]
    found = [simulate(LONG, each, steps=steps) for each in asked]
    totals = [
        (
            each.learnt_per_s * each.step_mean_s * steps,
            each.sampled_per_s * each.step_mean_s * steps,
        )
        for each in found
    ]
    assert totals == [pytest.approx(totals[0])] * 3
    assert len({each.step_s for each in found}) == 3


@pytest.mark.parametrize(("staleness", "grace_steps"), [(0, 4), (1, 0), (1, 2), (3, 0)])
def test_staleness_never_exceeds_its_maximum(staleness: int, grace_steps: int) -> None:
    asked = setting(group=2, items=2, staleness=staleness, grace_steps=grace_steps, concurrency=5)
    found = simulate(LONG, asked, steps=30)
    assert found.staleness_max <= asked.max_token_staleness
    assert (found.staleness > 0) is (staleness > 0)


def test_stragglers_are_given_up() -> None:
    """One group in five has a rollout of 40 s; with a median of 7 s it is given up at 14 s."""
    waits = simulate(LONG, setting(group=2, items=2), steps=40)
    cut = simulate(LONG, setting(group=2, items=2, straggler_factor=2.0), steps=40)
    assert waits.stragglers == 0
    assert 0.1 < cut.stragglers < 1.5
    assert cut.step_90_s < 0.6 * waits.step_90_s


def test_dynamic_sampling_samples_additional_groups() -> None:
    zero_variance = msgspec.structs.replace(inputs_for([10]), zero_variance=0.5)
    found = simulate(zero_variance, setting(items=4, max_items=16), steps=40)
    assert found.step_mean_s > 12.5 * 1.5
    assert found.sampled_per_s > 1.5 * found.learnt_per_s


def test_training_time_falls_with_ranks_by_scaling_efficiency() -> None:
    measured = msgspec.structs.replace(
        inputs_for([10]), learn_base_s=1.0, learn_token_s=0.8, scaling=0.9
    )
    steps = [simulate(measured, setting(ranks=ranks), steps=1).step_s for ranks in (1, 2, 4)]
    assert steps == pytest.approx([10.5 + 1 + 8, 10.5 + 1 + 8 / 1.8, 10.5 + 1 + 8 / 3.24])


def test_best_device_split_is_chosen() -> None:
    assert splits(3) == [DeviceSplit(1, 2), DeviceSplit(2, 1), DeviceSplit(3, 3, shared=True)]
    assert splits(4, 2) == [DeviceSplit(1, 2), DeviceSplit(2, 4, shared=True)]
    with pytest.raises(ConfigError, match="1 devices are too few for an engine of 2"):
        splits(1, 2)
    measured = inputs_for(*[[20] * 8] * 3, learn_s=1.0)
    measured.sizes = msgspec.structs.replace(SIZES, items=4, group=8, slots=4, concurrency=32)
    found = simulate_settings(
        measured, list(setting_combinations(measured, splits(4), staleness=[0, 1])), steps=6
    )
    assert len(found) == 8
    assert best(found).setting.engines >= 3
    one = simulate_settings(
        inputs_for([10]),
        list(setting_combinations(inputs_for([10]), splits(3), staleness=[0])),
        steps=4,
    )
    assert (best(one).setting.engines, best(one).setting.ranks) == (
        1,
        2,
    )  # nothing is gained by more engines
    assert best(found).steps_per_hour >= 0.99 * max(each.steps_per_hour for each in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"engines": 0},
        {"staleness": -1},
        {"grace_steps": -1},
        {"straggler_factor": 0.5},
        {"items": 3, "max_items": 2},
    ],
)
def test_invalid_simulation_setting_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SimulationSetting(**({"items": 1, "group": 1, "concurrency": 1} | changes))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps=0"):
        simulate(LONG, setting(), steps=0)


def test_quantile_returns_one_of_the_values() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert [quantile(values, share) for share in (0.1, 0.5, 0.9, 1.0)] == [1, 5, 9, 10]
