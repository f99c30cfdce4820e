"""The jail on older kernels and in restricted containers, emulated: system calls are refused before
the jail starts, or an older Landlock version is reported."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import jail_tiers as tiers
import pytest

from ramify.sandbox.base import JailSpec
from ramify.sandbox.providers.jail import JailSandbox, probe

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64",
    reason="THE NUMBERS OF THESE SYSTEM CALLS ARE THOSE OF LINUX ON x86_64",
)

LACKS = {  # missing feature -> (system call numbers, tier still reached, part of the reason)
    "unshare": ({272}, "B", "namespace"),
    "mount": ({165}, "B", "mount flags on /"),
    "pivot_root": ({155}, "B", "pivot_root"),
    "mount_setattr": ({442}, "B", "mount_setattr, Linux 5.12"),
    "fsopen": ({430}, "B", "fsopen tmpfs (Linux 5.2)"),
    "move_mount": ({429}, "B", "did not start: move_mount to /tmp"),
    "fspick": ({433}, "B", "fspick"),
    "Landlock": ({444}, "A", ""),
    "Landlock's restriction": ({446}, "C", "did not start: landlock_restrict_self"),
    "namespaces and Landlock": ({272, 444}, "C", "namespace"),
    "seccomp": ({317}, None, "CONFIG_SECCOMP_FILTER"),
    "pidfd_open": ({434}, None, "pidfd_open (Linux 5.3)"),
    "memfd_create": ({319}, None, "memfd_create"),
}
DOCKER = {
    *(
        101,
        134,
        135,
        136,
        139,
        153,
        155,
        156,
        159,
        161,
        163,
        164,
        165,
        166,
        167,
        168,
        169,
        170,
        171,
    ),
    *(
        172,
        173,
        174,
        175,
        176,
        177,
        178,
        179,
        180,
        212,
        227,
        237,
        238,
        239,
        246,
        248,
        249,
        250,
        272,
    ),
    *(
        279,
        298,
        304,
        305,
        308,
        310,
        311,
        312,
        313,
        320,
        321,
        323,
        425,
        426,
        427,
        428,
        429,
        430,
        431,
    ),
    *(432, 433, 442),
}
"""System calls that Docker's default seccomp filter refuses."""


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    return None


@pytest.mark.parametrize("name", LACKS)
def test_missing_kernel_feature_lowers_the_tier(name: str) -> None:
    numbers, tier, reason = LACKS[name]
    reached = probe(frozenset(numbers))
    assert reached.tier == tier
    assert set(reached.missing) == {each for each in "ABC" if tier is None or each < tier}
    assert reason in reached.missing.get("A", "")


async def check_runs_and_confines(jail: JailSandbox) -> None:
    """Check that a cell and forks run and that attacks on files are refused."""
    session = await jail.open()
    code = """
import os
def refused(call, *arguments):
    try: call(*arguments)
    except OSError as error: return bool(error.errno)
    return False
[refused(os.open, '/etc/passwd', os.O_RDONLY), refused(os.open, os.__file__, os.O_WRONLY),
 refused(os.open, '/dev/null', os.O_TRUNC | os.O_ACCMODE), refused(os.rename, os.__file__, 'x'),
 refused(os.truncate, os.__file__, 0), refused(os.fork)]
"""
    ran = (await session.run(code, answer=answer)).cell
    assert (ran.error, ran.value) == (None, str([True] * 6))
    branches = await asyncio.gather(*(session.fork() for _ in range(4)))
    values = [(await each.run("os.path.sep", answer=answer)).cell.value for each in branches]
    assert values == ["'/'"] * 4


@pytest.mark.parametrize("tier", "AB")
@pytest.mark.parametrize("landlock", range(1, 7))
def test_sessions_run_confined_on_older_landlock(landlock: int, tier: str) -> None:
    async def main() -> None:
        spec = JailSpec(tier=tier, pool=0)
        jail = JailSandbox(spec, deny=tiers.WITHOUT[tier], landlock=landlock, counts=landlock > 2)
        assert (jail.reached.tier, jail.reached.landlock) == (tier, landlock)
        try:
            await check_runs_and_confines(jail)
        finally:
            await jail.close()

    if why := tiers.why_not(tier):
        pytest.skip(why)
    asyncio.run(main())


def test_sessions_run_confined_in_docker_container() -> None:
    async def main() -> None:
        jail = JailSandbox(JailSpec(pool=0), deny=frozenset(DOCKER))
        assert jail.reached.tier == "B"
        try:
            await check_runs_and_confines(jail)
        finally:
            await jail.close()

    if why := tiers.why_not("B"):
        pytest.skip(why)
    asyncio.run(main())


@pytest.mark.parametrize("tier", "BC")
def test_the_whole_standard_library_can_be_imported(tier: str) -> None:
    """At tier B root becomes another user, who may not be able to read root's Python; at tier C no
    call may name a file."""
    code = """
import importlib, sys, warnings
warnings.simplefilter('ignore')
def fails(name):
    try: importlib.import_module(name)
    except ImportError: return True
    return False
skipped = {'antigravity', 'idlelib', 'this', '_ios_support', 'tkinter', 'turtle', '_tkinter', '__main__'}
failed = [name for name in sorted(sys.stdlib_module_names - skipped) if fails(name)]
failed"""
    here = subprocess.run(
        [sys.executable, "-c", f"{code[: -len('failed')]}print(failed)"],
        capture_output=True,
        text=True,
        check=True,
    )

    async def main() -> None:
        jail = JailSandbox(JailSpec(tier=tier, pool=0), deny=tiers.WITHOUT[tier])
        try:
            ran = (await (await jail.open()).run(code, answer=answer)).cell
        finally:
            await jail.close()
        assert (ran.error, ran.value) == (None, here.stdout.strip())

    if why := tiers.why_not(tier):
        pytest.skip(why)
    asyncio.run(main())
