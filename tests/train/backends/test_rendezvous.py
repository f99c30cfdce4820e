"""Rendezvous: ranks agree on one attempt, whatever an earlier attempt left in the store."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from ramify.errors import TrainError
from ramify.train.backends.launch import began, come, gather


def rendezvous(store: Any, *, rank_0_is_late: bool) -> set[str]:
    """Return the attempt names that three ranks agree on; it should be one."""
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


def test_ranks_agree_on_a_unique_name_per_attempt() -> None:
    store = HashStore()
    assert not began(store)
    found = [rendezvous(store, rank_0_is_late=late) for late in (False, True, True)]
    assert [len(names) for names in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3
    assert began(store)


def test_leftovers_of_a_dead_rank_do_not_count_as_a_rank() -> None:
    """Rank 1 of the previous attempt asked for a name; rank 1 of the new attempt never starts."""
    store = HashStore()
    with pytest.raises(TrainError, match=r"rank 1 got no answer from rank 0 within 0\.05 s"):
        come(store, 1, 0.05)
    with pytest.raises(TrainError, match=r"rank 1 did not start within 0\.2 s"):
        gather(store, 2, 0.2)


def test_gather_fails_at_once_if_a_rank_exited() -> None:
    def look(rank: int) -> None:
        raise TrainError(f"rank {rank} did not start: exit status 3")

    with pytest.raises(TrainError, match="rank 1 did not start: exit status 3"):
        gather(HashStore(), 2, 60.0, look)
