"""The default sandbox as its users meet it, on machines that have the whole jail, part of it, or
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
from ramify.sandbox.base import SandboxSpec, open_sandbox, warning_of
from ramify.sandbox.process import WARNING, ProcessSandbox

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


class Said(NamedTuple):
    code: int
    out: str
    err: str


def on_a_machine_of(tier: str, folder: Path, *arguments: str) -> Said:
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
    return Said(done.returncode, done.stdout, done.stderr)


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
def test_what_is_accepted_is_said_aloud(
    tier: str, options: tuple[str, ...], warning: str, tmp_path: Path
) -> None:
    said = on_a_machine_of(tier, tmp_path, *ASK, *options)
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
            "tier B: no Landlock (Linux 5.13, ",
            "for tier B use a kernel with Landlock (Linux 5.13 or later",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    tier: str, options: tuple[str, ...], missing: str, remedy: str, tmp_path: Path
) -> None:
    said = on_a_machine_of(tier, tmp_path, *ASK, *options)
    *_, line = said.err.splitlines()
    assert (said.code, said.out, line.startswith("ramify: sandbox 'jail' does not reach")) == (
        1,
        "",
        True,
    )
    for part in (missing, remedy, "or accept less: allow_weaker=True (--allow-weaker)"):
        assert part in line
    assert on_a_machine_of(tier, tmp_path, "runs", "--json").out == "", (
        "a run that never began is none"
    )


@linux
def test_a_run_may_be_repeated_on_a_poorer_machine(tmp_path: Path) -> None:
    assert on_a_machine_of("B", tmp_path, *ASK).code == 0
    refused = on_a_machine_of("C", tmp_path, "replay", "last")
    assert (refused.code, "does not reach tier B" in refused.err) == (1, True)
    accepted = on_a_machine_of("C", tmp_path, "replay", "last", "--allow-weaker")
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
def test_doctor(tier: str, code: int, parts: tuple[str, ...], tmp_path: Path) -> None:
    said = on_a_machine_of(tier, tmp_path, "doctor")
    assert said.code == code
    for part in parts:
        assert part in said.out


def test_a_weakness_is_passed_over_only_if_it_was_named() -> None:
    for spec, warning in (
        (SandboxSpec(allow_weaker=True), WARNING),  # a machine without a jail
        (SandboxSpec(provider="process"), WARNING),
        (SandboxSpec(provider="process", allow_weaker=True), None),
    ):
        assert warning_of(ProcessSandbox(spec), spec) == warning


def test_mounts_are_not_passed_over() -> None:
    for provider in ("process", "inprocess"):
        with pytest.raises(
            ConfigError, match=f"sandbox '{provider}' does not support mounts, only 'jail' does"
        ):
            open_sandbox(SandboxSpec(provider=provider, mounts=((str(_ROOT), "/data"),)))
