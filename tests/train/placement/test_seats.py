"""Who sits where, and what is said where roles do not fit: by arithmetic, before anything is started."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.inference.http.spec import InferenceSpec
from ramify.train.backends.base import Compute, Shard
from ramify.train.config import Run
from ramify.train.override import override
from ramify.train.placement.counted import by, counted, settled
from ramify.train.placement.on_ray import bundles, check_bundles
from ramify.train.placement.seats import Member, Needs, Seat, seats
from ramify.train.placement.spec import PlacementSpec, Pool, Role
from tests.train.small import small

GPU = Role(gpus=1)
NO = {"trainer": 0, "inference": 0, "rollouts": 0}


def placed(placement: PlacementSpec, ranks: int = 0, engines: int = 0, **changes: Any) -> Run:
    compute = Compute(backend="fsdp", shard=Shard(ranks=ranks)) if ranks else Compute()
    inference = InferenceSpec(num=engines) if engines else None
    return small(compute=compute, inference=inference, placement=placement, **changes)


def test_colocated_roles_share_seats_and_others_stand_apart() -> None:
    together = PlacementSpec(
        pools={"main": Pool(nodes=2, gpus=2, cpus=8)}, trainer=GPU, inference=GPU, colocate=(("trainer", "inference"),)
    )
    found = seats(together, NO | {"trainer": 4, "inference": 4})
    assert [(seat.node, seat.needs) for seat in found] == [(node, Needs(1, 2, 0)) for node in (0, 0, 1, 1)]
    assert found[3].members == (Member("trainer", 3), Member("inference", 3))

    apart = PlacementSpec(
        pools={"train": Pool(gpus=2, cpus=4), "serve": Pool(nodes=2, gpus=1, cpus=4, order="spread")},
        trainer=Role(pool="train", gpus=1), inference=Role(pool="serve", gpus=1),
    )  # fmt: skip
    found = seats(apart, NO | {"trainer": 2, "inference": 2})
    assert [(seat.pool, seat.node, *seat.members) for seat in found] == [
        ("train", 0, Member("trainer", 0)), ("train", 0, Member("trainer", 1)),
        ("serve", 0, Member("inference", 0)), ("serve", 1, Member("inference", 1)),
    ]  # fmt: skip


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
def test_roles_of_other_counts_share_seats(
    roles: tuple[float, float], num: tuple[int, int], expected: list[str]
) -> None:
    """Who sits on each seat, and its GPUs."""
    trainer, inference = (Role(gpus=gpus) for gpus in roles)
    spec = PlacementSpec(trainer=trainer, inference=inference, colocate=(("trainer", "inference"),))
    found = seats(spec, NO | dict(zip(("trainer", "inference"), num, strict=True)))
    told = [f"{' '.join(f'{m.role[0]}{m.number}' for m in seat.members)} | {seat.needs.gpus:g}" for seat in found]
    assert told == expected
    assert sum(seat.needs.cpus for seat in found) == sum(num)


def test_each_process_of_a_shared_seat_has_its_own_part_of_the_gpus() -> None:
    spec = PlacementSpec(
        trainer=GPU, inference=Role(gpus=2), rollouts=Role(), colocate=(("trainer", "inference", "rollouts"),)
    )
    second = seats(spec, {"trainer": 4, "inference": 2, "rollouts": 2})[1]
    given = ["4", "7"]
    shares = {
        f"{each.role} {each.number}": second.share(each, spec.role(each.role).gpus, given) for each in second.members
    }
    assert shares == {"trainer 2": ["4"], "trainer 3": ["7"], "inference 1": ["4", "7"], "rollouts 1": ["4", "7"]}
    half = seats(PlacementSpec(trainer=Role(gpus=0.5)), NO | {"trainer": 1})[0]
    assert half.share(Member("trainer", 0), 0.5, ["3"]) == ["3"]


def test_spread_takes_the_emptiest_node_and_pack_the_first() -> None:
    for order, nodes in (("pack", [0, 0, 0]), ("spread", [0, 1, 2])):
        spec = PlacementSpec(pools={"main": Pool(nodes=3, cpus=4, order=order)}, trainer=Role(cpus=1))  # type: ignore[arg-type]
        assert [seat.node for seat in seats(spec, NO | {"trainer": 3})] == nodes


def test_a_large_seat_is_placed_before_small_ones_take_its_node() -> None:
    spec = PlacementSpec(
        pools={"main": Pool(nodes=2, gpus=4, cpus=8)}, trainer=Role(gpus=1), inference=Role(gpus=4, cpus=1)
    )
    found = seats(spec, NO | {"trainer": 4, "inference": 1})
    assert [seat.node for seat in found] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("spec", "num", "said"),
    [
        (
            PlacementSpec(pools={"main": Pool(nodes=2, gpus=4, cpus=64)}, trainer=GPU, inference=Role(gpus=2)),
            {"trainer": 8, "inference": 2},
            "the roles do not fit the pool 'main': trainer 8 x 1 + inference 2 x 2 = 12 GPUs, and it has 2 x 4 = 8",
        ),
        (
            PlacementSpec(pools={"main": Pool(nodes=2, gpus=3, cpus=64)}, inference=Role(gpus=2)),
            {"inference": 3},
            "fit the pool 'main' in sum, but not node by node: inference 2 needs 2 GPUs, 1 CPUs on one node, and of its 2 "
            "nodes the emptiest has 1 GPUs, 63 CPUs left",
        ),
        (
            PlacementSpec(pools={"main": Pool(cpus=64, memory_gb=100)}, trainer=Role(memory_gb=60)),
            {"trainer": 2},
            "trainer 2 x 60 = 120 GB, and it has 1 x 100 = 100",
        ),
        (
            PlacementSpec(
                pools={"main": Pool(gpus=4, cpus=9)}, trainer=Role(gpus=2), inference=Role(gpus=3),
                colocate=(("trainer", "inference"),),
            ),
            {"trainer": 4, "inference": 2},
            "GPUs of a process are trainer 2, inference 3: those of trainer do not divide a seat of 3 without remainder",
        ),
        (
            PlacementSpec(
                pools={"main": Pool(gpus=6, cpus=64)}, trainer=GPU, inference=Role(gpus=2), rollouts=Role(),
                colocate=(("trainer", "inference", "rollouts"),),
            ),
            {"trainer": 8, "inference": 3, "rollouts": 4},
            "'main': 2 trainer and inference and rollouts 3 x 2 + 2 trainer and rollouts 1 x 2 = 8 GPUs, and it has 1 x 6 = 6",
        ),
        (
            PlacementSpec(pools={"a": Pool(cpus=4), "b": Pool(cpus=4)}, trainer=Role(pool="a")),
            {"trainer": 1, "inference": 1},
            "placement.inference names no pool, and there are 2: a, b",
        ),
    ],
    ids=["sums", "node by node", "memory", "remainder", "shared sums", "no pool"],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_the_sums(spec: PlacementSpec, num: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        seats(spec, NO | num)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PlacementSpec(trainer=Role(pool="gpu"), pools={"gpus": Pool()}), "no pool 'gpu': did you mean 'gpus'"),
        (lambda: PlacementSpec(colocate=(("trainer", "engines"),)), "there is no role 'engines'"),
        (lambda: PlacementSpec(colocate=(("trainer",), ("trainer", "inference"))), "'trainer' is named twice"),
        (lambda: Pool(nodes=0), "nodes=0 must be at least 1"),
        (lambda: Role(gpus=-1), "cannot be negative"),
        (lambda: override(small(placement=PlacementSpec()), ["placement.trainer.gpu=1"]), "did you mean 'gpus'"),
        (lambda: by(small(), "rai"), "--placement rai: did you mean 'ray'"),
    ],
    ids=["pool", "role", "twice", "nodes", "negative", "field", "kind"],
)  # fmt: skip
def test_what_cannot_be_meant(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert said in str(error.value)


def test_counts_come_from_the_run_or_from_the_placement() -> None:
    assert counted(placed(PlacementSpec(), ranks=4, engines=2), PlacementSpec()) == {
        "trainer": 4, "inference": 2, "rollouts": 0,
    }  # fmt: skip
    unsaid = small(
        compute=Compute(backend="fsdp"), placement=PlacementSpec(kind="ray", trainer=Role(count=3), pools={"m": Pool(cpus=3)})
    )  # fmt: skip
    run, found = settled(unsaid)
    assert (run.compute.shard.ranks, len(found)) == (3, 3)
    with pytest.raises(ConfigError, match=r"placement.trainer.count=3, but the run has 4 \(compute\.shard\.ranks"):
        settled(placed(PlacementSpec(trainer=Role(count=3)), ranks=4))
    with pytest.raises(ConfigError, match="but the run starts no engines: give inference"):
        settled(placed(PlacementSpec(inference=Role(count=1))))
    with pytest.raises(ConfigError, match=r"set compute\.shard\.ranks"):
        settled(by(small(compute=Compute(backend="fsdp")), "ray"))


def test_a_run_that_does_not_fit_is_refused_wherever_it_runs(tmp_path: Any) -> None:
    from ramify.build.run import train

    spec = PlacementSpec(pools={"main": Pool(cpus=3)}, trainer=Role(cpus=2))
    for kind in ("local", "ray"):
        with pytest.raises(ConfigError, match="trainer 2 x 2 = 4 CPUs, and it has 1 x 3 = 3"):
            train(by(placed(spec, ranks=2), kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_process_needs_no_placement() -> None:
    run = small()
    assert settled(run) == (run, [])
    assert by(run, "local") is run


def test_what_is_asked_of_a_cluster_is_held_against_its_nodes() -> None:
    found = [
        Seat("a", 0, Needs(1, 2), (Member("trainer", 0),)), Seat("a", 0, Needs(1, 2), (Member("trainer", 1),)),
        Seat("a", 1, Needs(1, 2), (Member("trainer", 2),)), Seat("", 0, Needs(0, 1), (Member("rollouts", 0),)),
    ]  # fmt: skip
    asked = bundles(found)
    assert asked == {"a": [(Needs(2, 4), [0, 1]), (Needs(1, 2), [2])], "": [(Needs(0, 1), [3])]}
    check_bundles(asked, [Needs(2, 4, 9), Needs(2, 4, 9)], "the cluster")
    with pytest.raises(ConfigError, match=r"do not fit the cluster: 2 \+ 1 = 3 GPUs, and it has 1 \+ 1 = 2"):
        check_bundles(asked, [Needs(1, 8, 9), Needs(1, 8, 9)], "the cluster")
    with pytest.raises(ConfigError, match="no node of the cluster has room for one of pool 'a', which takes 2 GPUs"):
        check_bundles(asked, [Needs(1, 8, 9)] * 3, "the cluster")


def test_a_placement_is_plain_data() -> None:
    spec = PlacementSpec(pools={"main": Pool(nodes=2, gpus=4)}, trainer=GPU, colocate=(("trainer", "inference"),))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=PlacementSpec) == spec
