"""Placement slots: members and resources of each slot, and errors with the arithmetic if roles do
not fit, before anything is started."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.actors.launcher import HardwareResources, NodeResourceSlot, RoleInstanceId
from ramify.actors.ray_launcher import check_bundles_fit, group_slots_by_node
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.backends.base import FsdpSpec, TrainerComputeSpec
from ramify.train.config import Run
from ramify.train.config_overrides import override
from ramify.train.placement.placement_slots import placement_slots
from ramify.train.placement.placement_spec import NodePoolSpec, PlacementSpec, RoleSpec
from ramify.train.placement_plan import num_processes_by_role, plan_placement, with_placement_kind
from tests.train.small import small

GPU = RoleSpec(gpus=1)
NO = {"trainer": 0, "inference": 0, "rollouts": 0}


def placed(placement: PlacementSpec, ranks: int = 0, engines: int = 0, **changes: Any) -> Run:
    compute = (
        TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=ranks))
        if ranks
        else TrainerComputeSpec()
    )
    inference = InferenceSpec(num=engines) if engines else None
    return small(compute=compute, inference=inference, placement=placement, **changes)


def test_colocated_roles_share_slots_and_others_get_separate_slots() -> None:
    together = PlacementSpec(
        pools={"main": NodePoolSpec(nodes=2, gpus=2, cpus=8)},
        trainer=GPU,
        inference=GPU,
        colocate=(("trainer", "inference"),),
    )
    found = placement_slots(together, NO | {"trainer": 4, "inference": 4})
    assert [(placement_slot.node, placement_slot.needs) for placement_slot in found] == [
        (node, HardwareResources(1, 2, 0)) for node in (0, 0, 1, 1)
    ]
    assert found[3].members == (RoleInstanceId("trainer", 3), RoleInstanceId("inference", 3))

    apart = PlacementSpec(
        pools={
            "train": NodePoolSpec(gpus=2, cpus=4),
            "serve": NodePoolSpec(nodes=2, gpus=1, cpus=4, order="spread"),
        },
        trainer=RoleSpec(pool="train", gpus=1),
        inference=RoleSpec(pool="serve", gpus=1),
    )
    found = placement_slots(apart, NO | {"trainer": 2, "inference": 2})
    assert [
        (placement_slot.pool, placement_slot.node, *placement_slot.members)
        for placement_slot in found
    ] == [
        ("train", 0, RoleInstanceId("trainer", 0)),
        ("train", 0, RoleInstanceId("trainer", 1)),
        ("serve", 0, RoleInstanceId("inference", 0)),
        ("serve", 1, RoleInstanceId("inference", 1)),
    ]


@pytest.mark.parametrize(
    ("roles", "num", "expected"),
    [
        ((1, 2), (8, 4), ["t0 t1 i0 | 2", "t2 t3 i1 | 2", "t4 t5 i2 | 2", "t6 t7 i3 | 2"]),
        ((1, 1), (2, 1), ["t0 i0 | 1", "t1 | 1"]),
        ((1, 2), (4, 1), ["t0 t1 i0 | 2", "t2 t3 | 2"]),
        ((1, 4), (3, 1), ["t0 t1 t2 i0 | 4"]),
        ((2, 1), (2, 4), ["t0 i0 i1 | 2", "t1 i2 i3 | 2"]),
        ((1, 2), (2, 2), ["t0 i0 | 2", "t1 i1 | 2"]),
        ((1, 0), (2, 5), ["t0 i0 i1 i2 | 1", "t1 i3 i4 | 1"]),
        ((0, 0), (1, 2), ["t0 i0 | 0", "i1 | 0"]),
        ((0.5, 0.25), (1, 2), ["t0 i0 i1 | 0.5"]),
    ],
)
def test_colocated_roles_with_different_counts_share_slots(
    roles: tuple[float, float], num: tuple[int, int], expected: list[str]
) -> None:
    """Members and GPUs of each slot."""
    trainer, inference = (RoleSpec(gpus=gpus) for gpus in roles)
    spec = PlacementSpec(trainer=trainer, inference=inference, colocate=(("trainer", "inference"),))
    found = placement_slots(spec, NO | dict(zip(("trainer", "inference"), num, strict=True)))
    described = [
        f"{' '.join(f'{m.role[0]}{m.number}' for m in placement_slot.members)} | "
        f"{placement_slot.needs.gpus:g}"
        for placement_slot in found
    ]
    assert described == expected
    assert sum(placement_slot.needs.cpus for placement_slot in found) == sum(num)


def test_gpus_of_a_shared_slot_are_divided_among_its_processes() -> None:
    spec = PlacementSpec(
        trainer=GPU,
        inference=RoleSpec(gpus=2),
        rollouts=RoleSpec(),
        colocate=(("trainer", "inference", "rollouts"),),
    )
    second = placement_slots(spec, {"trainer": 4, "inference": 2, "rollouts": 2})[1]
    given = ["4", "7"]
    shares = {
        f"{each.role} {each.number}": second.gpus_for(each, spec.role(each.role).gpus, given)
        for each in second.members
    }
    assert shares == {
        "trainer 2": ["4"],
        "trainer 3": ["7"],
        "inference 1": ["4", "7"],
        "rollouts 1": ["4", "7"],
    }
    half = placement_slots(PlacementSpec(trainer=RoleSpec(gpus=0.5)), NO | {"trainer": 1})[0]
    assert half.gpus_for(RoleInstanceId("trainer", 0), 0.5, ["3"]) == ["3"]


def test_spread_picks_the_emptiest_node_and_pack_the_first() -> None:
    for order, nodes in (("pack", [0, 0, 0]), ("spread", [0, 1, 2])):
        spec = PlacementSpec(
            pools={"main": NodePoolSpec(nodes=3, cpus=4, order=order)}, trainer=RoleSpec(cpus=1)
        )  # type: ignore[arg-type]
        assert [
            placement_slot.node for placement_slot in placement_slots(spec, NO | {"trainer": 3})
        ] == nodes


def test_large_slots_are_placed_before_small_ones() -> None:
    spec = PlacementSpec(
        pools={"main": NodePoolSpec(nodes=2, gpus=4, cpus=8)},
        trainer=RoleSpec(gpus=1),
        inference=RoleSpec(gpus=4, cpus=1),
    )
    found = placement_slots(spec, NO | {"trainer": 4, "inference": 1})
    assert [placement_slot.node for placement_slot in found] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("spec", "num", "message"),
    [
        (
            PlacementSpec(
                pools={"main": NodePoolSpec(nodes=2, gpus=4, cpus=64)},
                trainer=GPU,
                inference=RoleSpec(gpus=2),
            ),
            {"trainer": 8, "inference": 2},
            "the roles do not fit the pool 'main': trainer 8 x 1 + inference 2 x 2 = 12 GPUs, but "
            "it has 2 x 4 = 8",
        ),
        (
            PlacementSpec(
                pools={"main": NodePoolSpec(nodes=2, gpus=3, cpus=64)}, inference=RoleSpec(gpus=2)
            ),
            {"inference": 3},
            "fit the pool 'main' in total, but not node by node: inference 2 needs 2 GPUs, 1 CPUs "
            "on one node, and of its 2 nodes the emptiest has 1 GPUs, 63 CPUs left",
        ),
        (
            PlacementSpec(
                pools={"main": NodePoolSpec(cpus=64, memory_gb=100)}, trainer=RoleSpec(memory_gb=60)
            ),
            {"trainer": 2},
            "trainer 2 x 60 = 120 GB, but it has 1 x 100 = 100",
        ),
        (
            PlacementSpec(
                pools={"main": NodePoolSpec(gpus=4, cpus=9)},
                trainer=RoleSpec(gpus=2),
                inference=RoleSpec(gpus=3),
                colocate=(("trainer", "inference"),),
            ),
            {"trainer": 4, "inference": 2},
            "GPUs per process are trainer 2, inference 3: a slot of 3 is not a multiple of "
            "trainer's",
        ),
        (
            PlacementSpec(
                pools={"main": NodePoolSpec(gpus=6, cpus=64)},
                trainer=GPU,
                inference=RoleSpec(gpus=2),
                rollouts=RoleSpec(),
                colocate=(("trainer", "inference", "rollouts"),),
            ),
            {"trainer": 8, "inference": 3, "rollouts": 4},
            "'main': 2 trainer and inference and rollouts 3 x 2 + 2 trainer and rollouts 1 x 2 = 8 "
            "GPUs, but it has 1 x 6 = 6",
        ),
        (
            PlacementSpec(
                pools={"a": NodePoolSpec(cpus=4), "b": NodePoolSpec(cpus=4)},
                trainer=RoleSpec(pool="a"),
            ),
            {"trainer": 1, "inference": 1},
            "placement.inference names no pool, but there are 2: a, b",
        ),
    ],
    ids=["sums", "node by node", "memory", "remainder", "shared sums", "no pool"],
)
def test_roles_that_do_not_fit_are_rejected_with_the_arithmetic(
    spec: PlacementSpec, num: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        placement_slots(spec, NO | num)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PlacementSpec(trainer=RoleSpec(pool="gpu"), pools={"gpus": NodePoolSpec()}),
            "unknown pool 'gpu': did you mean 'gpus'",
        ),
        (lambda: PlacementSpec(colocate=(("trainer", "engines"),)), "unknown role 'engines'"),
        (
            lambda: PlacementSpec(colocate=(("trainer",), ("trainer", "inference"))),
            "'trainer' is named twice",
        ),
        (lambda: NodePoolSpec(nodes=0), "nodes=0 must be at least 1"),
        (lambda: RoleSpec(gpus=-1), "cannot be negative"),
        (
            lambda: override(small(placement=PlacementSpec()), ["placement.trainer.gpu=1"]),
            "did you mean 'gpus'",
        ),
        (lambda: with_placement_kind(small(), "rai"), "--placement rai: did you mean 'ray'"),
    ],
    ids=["pool", "role", "twice", "nodes", "negative", "field", "kind"],
)
def test_invalid_placement_specs_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


def test_process_counts_come_from_the_run_or_the_placement() -> None:
    assert num_processes_by_role(placed(PlacementSpec(), ranks=4, engines=2), PlacementSpec()) == {
        "trainer": 4,
        "inference": 2,
        "rollouts": 0,
    }
    unsaid = small(
        compute=TrainerComputeSpec(backend="fsdp"),
        placement=PlacementSpec(
            kind="ray", trainer=RoleSpec(count=3), pools={"m": NodePoolSpec(cpus=3)}
        ),
    )
    run, found = plan_placement(unsaid)
    assert (run.compute.shard.ranks, len(found)) == (3, 3)
    with pytest.raises(
        ConfigError, match=r"placement.trainer.count=3, but the run has 4 \(compute\.shard\.ranks"
    ):
        plan_placement(placed(PlacementSpec(trainer=RoleSpec(count=3)), ranks=4))
    with pytest.raises(ConfigError, match="but the run starts no engines: set inference"):
        plan_placement(placed(PlacementSpec(inference=RoleSpec(count=1))))
    with pytest.raises(ConfigError, match=r"set compute\.shard\.ranks"):
        plan_placement(
            with_placement_kind(small(compute=TrainerComputeSpec(backend="fsdp")), "ray")
        )


def test_run_that_does_not_fit_is_rejected_locally_and_on_ray(tmp_path: Any) -> None:
    from ramify.train.execute import train

    spec = PlacementSpec(pools={"main": NodePoolSpec(cpus=3)}, trainer=RoleSpec(cpus=2))
    for kind in ("local", "ray"):
        with pytest.raises(ConfigError, match="trainer 2 x 2 = 4 CPUs, but it has 1 x 3 = 3"):
            train(with_placement_kind(placed(spec, ranks=2), kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_single_process_run_needs_no_placement() -> None:
    run = small()
    assert plan_placement(run) == (run, [])
    assert with_placement_kind(run, "local") is run


def test_requested_bundles_are_checked_against_cluster_nodes() -> None:
    found = [
        NodeResourceSlot("a", 0, HardwareResources(1, 2), (RoleInstanceId("trainer", 0),)), NodeResourceSlot("a", 0, HardwareResources(1, 2), (RoleInstanceId("trainer", 1),)),
        NodeResourceSlot("a", 1, HardwareResources(1, 2), (RoleInstanceId("trainer", 2),)), NodeResourceSlot("", 0, HardwareResources(0, 1), (RoleInstanceId("rollouts", 0),)),
    ]  # fmt: skip
    asked = group_slots_by_node(found)
    assert asked == {
        "a": [(HardwareResources(2, 4), [0, 1]), (HardwareResources(1, 2), [2])],
        "": [(HardwareResources(0, 1), [3])],
    }
    check_bundles_fit(
        asked, [HardwareResources(2, 4, 9), HardwareResources(2, 4, 9)], "the cluster"
    )
    with pytest.raises(
        ConfigError, match=r"do not fit the cluster: 2 \+ 1 = 3 GPUs, but it has 1 \+ 1 = 2"
    ):
        check_bundles_fit(
            asked, [HardwareResources(1, 8, 9), HardwareResources(1, 8, 9)], "the cluster"
        )
    with pytest.raises(
        ConfigError,
        match="no node of the cluster has room for a slot of pool 'a', which needs 2 GPUs",
    ):
        check_bundles_fit(asked, [HardwareResources(1, 8, 9)] * 3, "the cluster")


def test_placement_spec_round_trips_through_json() -> None:
    spec = PlacementSpec(
        pools={"main": NodePoolSpec(nodes=2, gpus=4)},
        trainer=GPU,
        colocate=(("trainer", "inference"),),
    )
    assert msgspec.json.decode(msgspec.json.encode(spec), type=PlacementSpec) == spec
