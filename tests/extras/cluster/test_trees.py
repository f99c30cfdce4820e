"""The workload of a trajectory, and the calls that it excludes."""

from __future__ import annotations

from ramify.extras.cluster.rollout_workloads import (
    CallWorkload,
    CellWorkload,
    RolloutWorkload,
    TurnWorkload,
    workload_of_trajectory,
)
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Call, CallSite, Cell, Trajectory, Turn


def turn(prompt: int, sampled: int, *, before: int = 0, cached: int = 0, cells: int = 0) -> Turn:
    """``before``: ids of the path so far; a request takes 0.1 s for each sampled token, a cell 0.5
    s."""
    usage = Usage(before + prompt, sampled, cached_tokens=cached, calls=1)
    reply = Reply(
        Message("assistant", ""),
        usage,
        prompt_ids=(1,) * prompt,
        token_ids=(2,) * sampled,
        seconds=0.1 * sampled,
    )
    return Turn(0, (), reply, tuple(Cell("", seconds=0.5) for _ in range(cells)), before)


def call(
    id: str,
    begin: float,
    end: float,
    *turns: Turn,
    parent: CallSite | None = None,
    kind: str = "rlm",
) -> Call:
    return Call(
        id, kind, "m", id.count("."), "?", parent, turns=list(turns), started_s=begin, ended_s=end
    )  # type: ignore[arg-type]


def test_overlapping_children_form_waves_and_waits_become_host_time() -> None:
    """Two calls overlap and a third starts after both: the parent's 9 s are 1 + 0.5 + 2.5 + 1 + 0.6
    and 3.4 s of host time."""
    here = CallSite("0", 0, 0)
    tree = Trajectory(
        "t", "?", seconds=9.5,
        calls=[
            call("0", 0.0, 9.0, turn(20, 10, cells=1), turn(5, 6, before=30, cached=30)),
            call("0.0", 2.0, 3.0, turn(7, 10, cached=3), parent=here, kind="lm"),
            call("0.1", 2.1, 4.5, turn(7, 4), parent=here, kind="lm"),
            call("0.2", 4.5, 5.5, turn(7, 10), parent=here, kind="lm"),
            call("0.3", 9.2, 9.4, turn(99, 1), parent=CallSite("0", 1, 0), kind="judge"),
        ],
    )  # fmt: skip
    shape = workload_of_trajectory(tree)
    leaf = [
        CallWorkload((TurnWorkload(new, 7, sampled, 0.1 * sampled),), host_s)
        for new, sampled, host_s in [(4, 10, 0.0), (7, 4, 2.0), (7, 10, 0.0)]
    ]
    (root,) = shape.roots
    cell = root.turns[0].cells[0]
    assert [[each.turns[0].new for each in wave] for wave in cell.waves] == [[4, 7], [7]]
    assert [round(each.host_s, 9) for wave in cell.waves for each in wave] == [
        each.host_s for each in leaf
    ]
    assert [(each.new, each.context, each.sampled) for each in root.turns] == [
        (20, 20, 10),
        (5, 35, 6),
    ]
    assert round(root.host_s, 9) == 3.4
    assert (shape.num_sampled_tokens, shape.trainer_tokens) == (40, 41 + 17 + 11 + 17)


def test_rollout_shape_iterates_over_its_calls() -> None:
    leaf = CallWorkload((TurnWorkload(1, 1, 1),))
    root = CallWorkload(
        (TurnWorkload(1, 1, 2, cells=(CellWorkload(0.0, ((leaf, leaf), (leaf,))),)),)
    )
    assert RolloutWorkload((root,)).num_sampled_tokens == 5
    assert list(RolloutWorkload((root,)).calls()) == [root, leaf, leaf, leaf]
