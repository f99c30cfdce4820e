"""The default sandbox from the command line, on machines with the whole jail, part of it, or
none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ramify.errors import ConfigError
from ramify.sandbox.base import SandboxSpec, isolation_warning, provider_spec
from ramify.sandbox.providers.process import WARNING, ProcessSandbox

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="THE DEFAULT SANDBOX IS NOT TESTED HERE: it needs Linux"
)
_ROOT = Path(__file__).parents[2]
_START = """
import os, sys
from attacks.outer import impoverish
impoverish(sys.argv[1])
os.execv(sys.executable, [sys.executable, "-m", "ramify", *sys.argv[2:]])
"""


class CommandOutput(NamedTuple):
    code: int
    out: str
    err: str


def run_at_tier(tier: str, folder: Path, *arguments: str) -> CommandOutput:
    """Return the command's output on a kernel restricted to ``tier`` (``outer.py``)."""
    (folder / "log.txt").write_text("x" * 50_000)
    (folder / "script.json").write_text(json.dumps(["```repl\nFINAL(len(context))\n```"]))
    env = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "RAMIFY_HOME": str(folder / "store"),
        "PYTHONPATH": f"{_ROOT}:{Path(__file__).parent}",
    }
    done = subprocess.run(
        [sys.executable, "-c", _START, tier, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if "this machine cannot be made poorer" in done.stderr:
        pytest.skip(f"A MACHINE OF TIER {tier} CANNOT BE HAD HERE: {done.stderr[-200:]}")
    return CommandOutput(done.returncode, done.stdout, done.stderr)


ASK = ("ask", "-m", "scripted:script.json", "how long?", "log.txt")


@linux
@pytest.mark.parametrize(
    ("tier", "options", "warning"),
    [
        ("B", (), ""),
        (
            "B",
            ("--tier", "A", "--allow-weaker"),
            "sandbox 'jail' at tier B: files of this machine cannot be opened, but",
        ),
        ("C", ("--tier", "C"), ""),
        (
            "C",
            ("--allow-weaker",),
            "sandbox 'jail' at tier C: the system call filter is the only wall",
        ),
        ("C", ("--sandbox", "process"), "sandbox 'process': code runs in a separate process"),
        ("C", ("--sandbox", "process", "--allow-weaker"), ""),
    ],
)
def test_accepted_weaker_sandbox_gives_warning(
    tier: str, options: tuple[str, ...], warning: str, tmp_path: Path
) -> None:
    said = run_at_tier(tier, tmp_path, *ASK, *options)
    assert (said.code, said.out) == (0, "50000\n"), said.err
    lines = [line for line in said.err.splitlines() if "warning" in line]
    assert [line[: len("ramify: warning: ") + len(warning)] for line in lines] == (
        [f"ramify: warning: {warning}"] if warning else []
    )


@linux
@pytest.mark.parametrize(
    ("tier", "options", "missing", "remedy"),
    [
        (
            "B",
            ("--tier", "A"),
            "does not reach tier A on this machine (tier A: ",
            "allow user namespaces (sysctl ",
        ),
        (
            "C",
            (),
            "tier B: no Landlock, which needs Linux 5.13, ",
            "for tier B use a kernel with Landlock (Linux 5.13 or later",
        ),
    ],
)
def test_unavailable_tier_is_refused_with_remedy(
    tier: str, options: tuple[str, ...], missing: str, remedy: str, tmp_path: Path
) -> None:
    said = run_at_tier(tier, tmp_path, *ASK, *options)
    *_, line = said.err.splitlines()
    assert (said.code, said.out, line.startswith("ramify: sandbox 'jail' does not reach")) == (
        1,
        "",
        True,
    )
    for part in (missing, remedy, "or accept less: allow_weaker=True (--allow-weaker)"):
        assert part in line
    assert run_at_tier(tier, tmp_path, "runs", "--json").out == "", "a run that never began is none"


@linux
def test_replay_on_weaker_machine_needs_allow_weaker(tmp_path: Path) -> None:
    assert run_at_tier("B", tmp_path, *ASK).code == 0
    refused = run_at_tier("C", tmp_path, "replay", "last")
    assert (refused.code, "does not reach tier B" in refused.err) == (1, True)
    accepted = run_at_tier("C", tmp_path, "replay", "last", "--allow-weaker")
    assert (accepted.code, accepted.out) == (0, "same: 1 call, 1 cell, and the answer\n")
    assert "sandbox 'jail' at tier C" in accepted.err


@linux
@pytest.mark.parametrize(
    ("tier", "code", "parts"),
    [
        (
            "B",
            0,
            (
                "jail: isolates files",
                "tier B; files: cannot be opened (Landlock); network: seccomp",
                "no tier A: ",
            ),
        ),
        (
            "C",
            1,
            (
                "error: sandbox 'jail' does not reach tier B",
                "tier B: no Landlock",
                "for tier B use a kernel with",
            ),
        ),
    ],
)
def test_doctor_reports_reached_tier(
    tier: str, code: int, parts: tuple[str, ...], tmp_path: Path
) -> None:
    said = run_at_tier(tier, tmp_path, "doctor")
    assert said.code == code
    for part in parts:
        assert part in said.out


def test_weak_sandbox_warning_is_silenced_only_by_naming_it() -> None:
    for spec, warning in (
        (SandboxSpec(allow_weaker=True), WARNING),  # a machine without a jail
        (SandboxSpec(provider="process"), WARNING),
        (SandboxSpec(provider="process", allow_weaker=True), None),
    ):
        assert isolation_warning(ProcessSandbox(spec), spec) == warning


def test_mounts_are_refused_by_providers_without_them() -> None:
    for provider in ("process", "inprocess"):
        with pytest.raises(
            ConfigError, match=f"sandbox '{provider}' does not support mounts, only 'jail' does"
        ):
            provider_spec({"provider": provider, "mounts": [[str(_ROOT), "/data"]]})
