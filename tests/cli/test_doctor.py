"""``ramify doctor`` reports the installation without revealing a secret."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ramify.cli.doctor import EXTRAS
from tests.cli.helpers import Shell


def test_doctor_reports_healthy_machine_without_secrets(shell: Shell) -> None:
    shell.write("config/ramify/config.toml", 'model = "openai:m"\n')
    done = shell.run(
        "doctor", OPENAI_API_KEY="sk-very-secret", OPENAI_BASE_URL="http://user:pass@127.0.0.1:9/v1"
    )
    assert (done.code, done.err) == (0, "")
    assert "secret" not in done.out
    assert "pass" not in done.out.replace("passed", "")
    for expected in (
        "openai: OPENAI_API_KEY is set",
        "openai: OPENAI_BASE_URL = ",
        "model = 'openai:m'",
        "jail: isolates files",
        "tier ",
        "seccomp: yes; Landlock: ",
        "pdf: ",
        "/store, 0 runs, ",
        "config.toml",
    ):
        assert expected in done.out, expected


def test_doctor_reports_invalid_settings_and_prices(shell: Shell) -> None:
    shell.write("config/ramify/config.toml", "modle = 1\n")
    done = shell.run("doctor", RAMIFY_PRICES="nowhere.json")
    assert done.code == 1
    assert "error: " in done.out
    assert "did you mean 'model'?" in done.out
    assert "price table nowhere.json" in done.out


def test_doctor_warns_about_chosen_weak_sandbox(shell: Shell) -> None:
    shell.write("config/ramify/config.toml", 'sandbox = "process"\nallow-weaker = true\n')
    done = shell.run("doctor")
    assert (done.code, done.err) == (0, "")
    for expected in (
        "process: limits memory",
        "missing: isolates files",
        "warning: sandbox 'process'",
    ):
        assert expected in done.out, expected


def test_doctor_says_that_a_sandbox_does_not_need_every_capability(shell: Shell) -> None:
    shell.write("config/ramify/config.toml", 'sandbox = "inprocess"\nallow-weaker = true\n')
    lines = shell.run("doctor").out.splitlines()
    (optional,) = [line for line in lines if "not possible here, and not needed: " in line]
    (missing,) = [line for line in lines if "missing: isolates files" in line]
    assert "starts processes" in optional
    assert "starts processes" not in missing


def test_doctor_checks_every_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    of_developers = {"dev", "docs", "serve-test", "test"}
    assert set(EXTRAS) == set(project["optional-dependencies"]) - of_developers
