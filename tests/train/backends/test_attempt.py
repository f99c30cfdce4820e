"""Ranks find the ranks of the same attempt, whatever an earlier attempt left in the store."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from ramify.errors import TrainError
from ramify.train.backends.launch import began, come, gather


def meet(store: Any, *, rank_0_is_late: bool) -> set[str]:
    """The names that three ranks have for one attempt."""
    names: list[str] = []

    def arrive(rank: int) -> None:
        names.append(gather(store, 3, 60.0) if rank == 0 else come(store, rank, 60.0))

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(3)]
    for thread in threads[1:] if rank_0_is_late else threads:
        thread.start()
    if rank_0_is_late:
        while not all(store.check([f"ramify/attempt/join/{rank}"]) for rank in (1, 2)):
            time.sleep(0.01)
        threads[0].start()
    for thread in threads:
        thread.join()
    assert len(names) == 3
    return set(names)


def test_each_attempt_has_one_name_and_never_that_of_another() -> None:
    store = HashStore()
    assert not began(store)
    found = [meet(store, rank_0_is_late=late) for late in (False, True, True)]
    assert [len(names) for names in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3
    assert began(store)


def test_what_a_dead_rank_left_is_no_rank() -> None:
    """Rank 1 of the attempt before had asked for a name; the new one does not come."""
    store = HashStore()
    with pytest.raises(TrainError, match=r"rank 1 got no answer from rank 0 within 0\.05 s"):
        come(store, 1, 0.05)
    with pytest.raises(TrainError, match=r"rank 1 did not start within 0\.2 s"):
        gather(store, 2, 0.2)


def test_a_rank_that_ended_is_not_waited_for() -> None:
    def look(rank: int) -> None:
        raise TrainError(f"rank {rank} did not start: exit status 3")

    with pytest.raises(TrainError, match="rank 1 did not start: exit status 3"):
        gather(HashStore(), 2, 60.0, look)
