"""Every attack, at every tier, as root and as an ordinary user: contained, or not if the threat
model says so.

One process per tier and user tries all attacks (``runner.py``); each verdict is a separate test
here. What a machine cannot show is skipped with the reason. Without walls, the same attacks must
reach their goals.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from other_user import AS_NOBODY, VERSION, own_path, readable

from attacks.base import ATTACKS, Attack, Verdict
from attacks.cases import ATTACKS as ALL_ATTACKS
from attacks.runner import Closing, Line, Opening, VerdictLine
from attacks.watch import start_time
from ramify.sandbox.base import SANDBOXES

IS_ROOT = os.geteuid() == 0
assert ALL_ATTACKS is ATTACKS


class Findings(NamedTuple):
    """The output of one runner."""

    opening: Opening | None
    verdicts: dict[str, Verdict]
    closing: Closing | None
    complaint: str


class ChildSetup(NamedTuple):
    """The user and the Python of a child of these tests."""

    python: str
    env: dict[str, str]
    whoami: dict[str, Any]


def child_setup(as_root: bool, home: str) -> ChildSetup:
    """For an ordinary user: a Python that they can run, and a package that they can read
    (``other_user.py``)."""
    os.chmod(home, 0o777)
    if as_root or not IS_ROOT:
        return ChildSetup(sys.executable, env_of(own_path(), home), {})
    found = readable()
    if found is None:
        pytest.skip(f"an ordinary user can run no {VERSION} here")
    return ChildSetup(found.python, env_of(found.path, home), AS_NOBODY)


def env_of(path: tuple[str, ...], home: str) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
    }


def plan_of(provider: str, tier: str, names: tuple[str, ...] = (), landlock: int = 0) -> str:
    spec = {} if provider == "process" else {"allow_weaker": True, "tier": "C"}
    return json.dumps(
        {"provider": provider, "tier": tier, "names": names, "spec": spec, "landlock": landlock}
    )


@functools.cache
def findings(
    provider: str, tier: str, as_root: bool, names: tuple[str, ...] = (), landlock: int = 0
) -> Findings:
    """Run all attacks once. If something stops the whole runner, that is its complaint."""
    with tempfile.TemporaryDirectory(prefix="attacks-") as home:
        python, env, whoami = child_setup(as_root, home)
        done = subprocess.run(
            [python, "-m", "attacks.runner", plan_of(provider, tier, names, landlock)],
            capture_output=True,
            text=True,
            env=env,
            cwd="/",
            timeout=400,
            check=False,
            start_new_session=True,
            **whoami,
        )
        left = sorted(path.name for path in Path(home).iterdir())
    lines = [msgspec.json.decode(line, type=Line) for line in done.stdout.splitlines()]
    verdicts = {line.verdict.name: line.verdict for line in lines if isinstance(line, VerdictLine)}
    opening = next((line for line in lines if isinstance(line, Opening)), None)
    closing = next((line for line in lines if isinstance(line, Closing)), None)
    complaint = (
        ""
        if done.returncode == 0
        else f"the runner ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    )
    if left and closing is not None:
        closing.faults.append(f"in the folder for temporary files is left: {left}")
    return Findings(opening, verdicts, closing, complaint)


Started = dict[tuple[str, bool], Future[Findings]]


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Started:
    """The runners of the selected tests, two at a time: they mostly wait for time limits."""
    pool = ThreadPoolExecutor(2)
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    keys = dict.fromkeys(
        (each["tier"], each["as_root"]) for each in chosen if {"tier", "as_root"} <= each.keys()
    )
    return {
        (tier, as_root): pool.submit(findings, "jail", tier, as_root)
        for tier, as_root in keys
        if sys.platform == "linux" and (IS_ROOT or not as_root)
    }


def jail_findings(started: Started, tier: str, as_root: bool) -> Findings:
    """The jail's findings, or a skip with the reason."""
    if "jail" not in SANDBOXES or sys.platform != "linux":
        pytest.skip("there is no jail on this platform")
    if as_root and not IS_ROOT:
        pytest.skip("these tests do not run as root")
    found = started[tier, as_root].result()
    if found.opening is None:
        pytest.fail(found.complaint)
    if found.opening.refusal:
        pytest.skip(f"this machine has no tier {tier}: {found.opening.refusal}")
    if found.opening.tier and found.opening.tier != tier:
        pytest.skip(f"this machine reaches tier {found.opening.tier}, not {tier}")
    return found


slow = pytest.mark.slow  # locally, tier A runs as the current user; CI runs the rest
AS_ROOT_AND_USER = pytest.mark.parametrize(
    "as_root",
    [
        pytest.param(True, id="root"),
        pytest.param(False, id="user", marks=[slow] if IS_ROOT else []),
    ],
)
pytestmark = pytest.mark.timeout(600)  # whichever test comes first waits for a whole runner
TIERS = ["A", pytest.param("B", marks=slow), pytest.param("C", marks=slow)]


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("tier", TIERS)
@AS_ROOT_AND_USER
def test_attack_is_contained(started: Started, tier: str, as_root: bool, name: str) -> None:
    found = jail_findings(started, tier, as_root)
    if name not in found.verdicts:
        pytest.fail(f"the runner did not come to it: {found.complaint}")
    verdict, attack = found.verdicts[name], ATTACKS[name]
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.faults == [], verdict
    if tier in attack.open_at:
        assert verdict.reached, (
            f"it is contained here, though said to be open at tier {tier}: {attack.open_at[tier]}"
        )
    else:
        assert verdict.reached == [], verdict


ON_FILES = tuple(name for name, attack in ATTACKS.items() if attack.kind == "files")


@pytest.mark.parametrize("name", ON_FILES)
@pytest.mark.parametrize("landlock", [1, pytest.param(2, marks=slow), pytest.param(4, marks=slow)])
@AS_ROOT_AND_USER
def test_file_attack_is_contained_by_older_landlock(
    landlock: int, as_root: bool, name: str
) -> None:
    """Tier B of Linux 5.13, 5.19 and 6.7: the first two do not have the right to truncate a
    file."""
    if sys.platform != "linux" or (as_root and not IS_ROOT):
        pytest.skip(
            "these tests need Linux"
            if sys.platform != "linux"
            else "these tests do not run as root"
        )
    found = findings("jail", "B", as_root, ON_FILES, landlock)
    assert found.opening is not None, found.complaint
    if found.opening.refusal or found.opening.tier != "B":
        pytest.skip(f"this machine has no tier B: {found.opening.refusal or found.opening.tier}")
    verdict = found.verdicts[name]
    assert (bool(verdict.reached), verdict.faults) == ("B" in ATTACKS[name].open_at, []), verdict


@pytest.mark.parametrize("tier", TIERS)
@AS_ROOT_AND_USER
def test_attacks_leave_nothing_behind(started: Started, tier: str, as_root: bool) -> None:
    found = jail_findings(started, tier, as_root)
    assert found.closing is not None, found.complaint
    assert (found.closing.faults, found.complaint) == ([], "")


@pytest.mark.parametrize("tier", TIERS)
@AS_ROOT_AND_USER
def test_killed_host_leaves_no_processes_or_folders(
    started: Started, tier: str, as_root: bool
) -> None:
    """Without any cleanup by the host, every process below it ends, and its folders are deleted."""
    jail_findings(started, tier, as_root)
    with tempfile.TemporaryDirectory(prefix="attacks-") as home:
        python, env, whoami = child_setup(as_root, home)
        command = [python, "-m", "attacks.host", plan_of("jail", tier)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=env, cwd="/", **whoami
        ) as host:
            assert host.stdout is not None
            said = json.loads(host.stdout.readline())
            began = {pid: start_time(pid) for pid in said["below"]}
            assert len(began) > said["sessions"]
            host.send_signal(signal.SIGKILL)
        until = time.monotonic() + 60
        while (
            left := [pid for pid, start in began.items() if start_time(pid) == start]
        ) or os.listdir(home):
            assert time.monotonic() < until, (
                f"processes {left} and {os.listdir(home)} outlive the host"
            )
            time.sleep(0.02)


# --- the attacks themselves: without isolation they reach their goals


def is_tried(attack: Attack) -> bool:
    return attack.without_walls != "unsafe" and not attack.needs_fork and sys.platform == "linux"


TRIED = tuple(name for name, attack in ATTACKS.items() if is_tried(attack))


@pytest.mark.parametrize("name", TRIED)
def test_attack_reaches_goal_without_isolation(name: str) -> None:
    """Against a provider that does not isolate, each attack reaches its goal, or is one that every
    provider contains."""
    found = findings("process", "A", IS_ROOT, TRIED)
    assert name in found.verdicts, found.complaint
    verdict, wanted = found.verdicts[name], ATTACKS[name].without_walls
    if wanted == "contained":
        assert verdict.contained, verdict
    elif wanted == "reached" or (wanted == "needs root" and IS_ROOT):
        assert verdict.reached, verdict


def test_attack_suite_is_large() -> None:
    assert len(ATTACKS) >= 60
    assert sum(attack.without_walls == "reached" for attack in ATTACKS.values()) >= 30
