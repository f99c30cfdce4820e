"""A task whose reward is a coin that the attempt's own text throws: groups differ whatever the model
can do, so that every part of a training step has work."""

from __future__ import annotations

import random
import zlib
from typing import Any

from ramify.tasks import DatasetTask, Item, TrajectoryRewardFunction, generated


def _item(rng: random.Random) -> Item:
    number = rng.randrange(1000)
    return Item(f"Which number is in the text? ({number})", f"The number is {number}.", gold=number)


def _coin(item: Item, trajectory: Any) -> float:
    said = "".join(turn.reply.message.content for call in trajectory.calls for turn in call.turns)
    return float(zlib.crc32(said.encode()) % 2)


def task() -> DatasetTask:
    return DatasetTask("chance", generated("chance", _item), TrajectoryRewardFunction(_coin))
