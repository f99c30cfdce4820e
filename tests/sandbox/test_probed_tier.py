"""The kept result of trying out the jail's walls: who may use it, when it no longer counts, and that
a session proves its own walls whatever it says."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import JailSpec
from ramify.sandbox.prewarm import prewarm_sandbox
from ramify.sandbox.providers.isolation_tier_cache import (
    ProbedIsolationTier,
    forget_tier,
    keep_tier,
    kept_tier,
)
from ramify.sandbox.providers.jail import NEWEST, JailSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the jail needs Linux")
FOUND = ProbedIsolationTier("A", {}, 6)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder above the folder of the result."""
    above = tmp_path / "cache"
    above.mkdir(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(above))
    return above


def test_result_is_kept_for_its_user_alone(cache: Path) -> None:
    assert kept_tier() is None
    keep_tier(FOUND)
    assert kept_tier() == FOUND
    (file,) = (cache / "ramify").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    forget_tier()
    assert kept_tier() is None


def test_machine_that_lacks_something_is_tried_again(cache: Path) -> None:
    for found in (
        ProbedIsolationTier("B", {"A": "user namespace: refused"}, 6),
        ProbedIsolationTier(None, {}),
    ):
        keep_tier(found)
        assert kept_tier() is None


def test_result_of_another_boot_or_kernel_does_not_count(cache: Path) -> None:
    keep_tier(FOUND)
    (file,) = (cache / "ramify").iterdir()
    kept: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    for number in range(len(kept["conditions"])):
        other = [*kept["conditions"]]
        other[number] += "1"
        file.write_bytes(msgspec.json.encode({**kept, "conditions": other}))
        assert kept_tier() is None
    for damaged in (b"", b"{", b"[]", msgspec.json.encode({**kept, "found": 1})):
        file.write_bytes(damaged)
        assert kept_tier() is None
    file.write_bytes(msgspec.json.encode(kept))
    assert kept_tier() == FOUND


def _link(cache: Path) -> None:
    (cache / "ramify").rename(cache / "elsewhere")
    (cache / "ramify").symlink_to(cache / "elsewhere")


def _link_file(cache: Path) -> None:
    file = cache / "ramify/walls.json"
    file.rename(cache / "walls.json")
    file.symlink_to(cache / "walls.json")


@pytest.mark.parametrize(
    "open_to_others",
    [
        lambda cache: (cache / "ramify").chmod(0o770),
        lambda cache: (cache / "ramify").chmod(0o707),
        lambda cache: (cache / "ramify/walls.json").chmod(0o620),
        lambda cache: cache.chmod(0o777),
        _link,
        _link_file,
    ],
)
def test_place_that_others_can_write_to_is_not_used(
    open_to_others: Callable[[Path], None], cache: Path
) -> None:
    keep_tier(FOUND)
    open_to_others(cache)
    assert kept_tier() is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
def test_place_of_another_user_is_not_used(cache: Path) -> None:
    for given in ("", "ramify", "ramify/walls.json"):
        keep_tier(FOUND)
        os.chown(cache / given, 12345, 12345)
        assert kept_tier() is None
        os.chown(cache / given, 0, 0)
        assert kept_tier() == FOUND


def test_nothing_is_written_where_others_can_write(cache: Path) -> None:
    (cache / "ramify").mkdir()
    (cache / "ramify").chmod(0o777)
    keep_tier(FOUND)
    assert not [*(cache / "ramify").iterdir()]
    cache.chmod(0o500)
    keep_tier(FOUND)  # a folder that is read-only is not an error


def test_each_fork_server_proves_its_own_walls(cache: Path) -> None:
    """Whatever was expected, a session opens behind walls that its own server has tried out."""

    async def main() -> None:
        prewarm_sandbox(JailSpec())
        sandbox = JailSandbox(JailSpec())
        real = sandbox.reached
        sandbox.reached = ProbedIsolationTier("A", {}, 1)  # as a wrong result would say
        try:
            await sandbox.open()
            assert sandbox.reached == real == kept_tier()
        finally:
            await sandbox.close()

    asyncio.run(main())


def test_weaker_walls_than_expected_open_no_session(cache: Path) -> None:
    sandbox = JailSandbox(JailSpec(), landlock=NEWEST - 1)  # what it finds is not kept
    weak = {"tier": "C", "missing": {"A": "no", "B": "no"}, "landlock": 0}
    with pytest.raises(SandboxError, match="does not reach tier B on this machine"):
        sandbox.check_server_report(weak)
    assert kept_tier() is None
