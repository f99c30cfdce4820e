"""Processes that fail repeatedly are restarted, and given up after too many losses in a row."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ramify.actors.child_process import ChildProcess
from ramify.actors.restarts import ProcessRestartLimiter, retry_until_started
from ramify.errors import ConfigError
from ramify.log_handlers import RUN_LOG, FileLogHandler
from ramify.logging import ComponentLogger, attached_handler, run_log_context
from tests.shown import heard, logged


def counted(restarts: int) -> ProcessRestartLimiter:
    return ProcessRestartLimiter(restarts, ComponentLogger("train"), "worker")


def test_consecutive_losses_are_counted_per_name() -> None:
    restarts = counted(2)
    assert [restarts.count_loss("a") for _ in range(3)] == [True, True, False]
    assert (
        restarts.count_loss("b"),
        restarts.num_consecutive_losses("a"),
        restarts.num_consecutive_losses("b"),
    ) == (
        True,
        3,
        1,
    )
    restarts.record_success("a")
    assert (restarts.count_loss("a"), restarts.num_consecutive_losses("a")) == (True, 1)
    restarts.transfer_losses_to_replacement("a", "c")
    assert restarts.num_consecutive_losses("c") == 1
    restarts.reset_all_losses()
    assert restarts.num_consecutive_losses("b") == 0
    assert not counted(0).count_loss("a")


def test_each_restart_decision_is_logged_once(tmp_path: Path) -> None:
    said: list[str] = []
    restarts = counted(2)
    with (
        heard(said.append, said.append),
        attached_handler(FileLogHandler(tmp_path / RUN_LOG)),
        run_log_context("mine"),
    ):
        assert restarts.decide_restart(7, "worker 7 ended")
        assert restarts.decide_restart(7, "worker 7 did not connect")
        restarts.record_recovery(7, "worker 7 is back")
        assert not restarts.decide_restart(7, "worker 7 ended")
    assert said == [
        "worker 7 ended; it is restarted",
        "worker 7 did not connect; it is tried again",
        "worker 7 is back",
        "worker 7 ended; it is given up",
    ]
    counts = [logged(tmp_path, event) for event in ("restart", "restart_failed", "worker_lost")]
    assert counts == [[("mine", "")]] * 3


def test_restart_pauses_grow_up_to_a_limit() -> None:
    restarts = counted(9)
    pauses = [restarts.pause_s("a") for _ in range(9) if restarts.count_loss("a")]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30]


@pytest.mark.parametrize(("limit", "found"), [(2, "up"), (1, None)])
def test_start_is_retried_until_it_succeeds_or_is_given_up(limit: int, found: str | None) -> None:
    """The process ends at once on the first two starts and stays up on the third."""
    restarts, reasons = counted(limit), []
    commands = iter([["sh", "-c", "exit 3"], ["false"], ["sleep", "1000"]])

    async def start() -> str:
        child = ChildProcess(next(commands))
        if child.wait(0.5) is not None:
            raise ConfigError(child.exit_reason())
        child.end(0.0)
        return "up"

    def failed(error: Exception) -> bool:
        reasons.append(str(error))
        return restarts.count_loss(0)

    assert asyncio.run(retry_until_started(start, failed)) == found
    assert reasons == ["ended with status 3", "ended with status 1"]


def test_programming_error_propagates_instead_of_counting_as_loss() -> None:
    async def start() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(retry_until_started(start, lambda error: True))
