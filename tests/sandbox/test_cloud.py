"""The cloud providers against doubles with their SDKs' names and signatures, which run the guest in
a local process.

``test_doubles_match_sdk_signatures`` compares them with the SDKs where these are installed.
The doubles isolate nothing, so isolation checks are skipped; instead, the tests assert the
isolation that is requested from each service.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cloud_doubles import (
    DaytonaClient,
    DaytonaProcess,
    DaytonaTerminal,
    E2BBox,
    E2BCommands,
    E2BHandle,
    ModalBox,
    ModalStdin,
    PrimeClient,
    PrimeContainerClient,
    PrimeProcess,
    asked,
    daytona_sdk,
    e2b_sdk,
    lookup,
    modal_sdk,
    prime_request,
    prime_sdk,
)

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec, open_sandbox, provider_spec
from ramify.testing.sandbox_conformance import CHECKS, ConformanceCheck, answer_host_call, check_one

KEYS = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "E2B_API_KEY", "DAYTONA_API_KEY", "PRIME_API_KEY")
PROVIDERS = ["modal", "e2b", "daytona", "prime", "prime-files"]
LOCAL = [check for check in CHECKS if not any(name.startswith("isolates") for name in check.needs)]


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], SandboxSpec]:
    """Replace a provider's SDK by its double; returns the spec for it."""
    asked.clear()

    def put(provider: str, **fields: Any) -> SandboxSpec:
        for key in KEYS:
            monkeypatch.setenv(key, "k")
        makers = {"modal": modal_sdk, "e2b": e2b_sdk, "daytona": daytona_sdk}
        name = provider.split("-")[0]
        made = makers[name]() if name in makers else prime_sdk(provider == "prime-files", tmp_path)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        limits = {"memory_bytes": 256 << 20, "max_output_bytes": 100_000, "grace_s": 3.0}
        return provider_spec({"provider": name, **limits, **fields})

    return put


async def run_one_cell(spec: SandboxSpec) -> str | None:
    sandbox = open_sandbox(spec)
    session = await sandbox.open(seed="s")
    ran = await session.run("print('hello')\n6 * 7", answer=answer_host_call)
    await sandbox.close()
    return ran.cell.stdout + (ran.cell.value or "")


EXPECTED_REQUESTS = {
    "modal": {"image": "slim 3.12", "block_network": True, "timeout": 3600, "memory": 512},
    "e2b": {"template": None, "internet": False, "timeout": 3600},
    "daytona": {
        "language": "python",
        "network_block_all": True,
        "ephemeral": True,
        "auto_stop_interval": 60,
    },
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_session_runs_isolated_and_box_is_deleted(
    provider: str, services: Callable[..., SandboxSpec]
) -> None:
    assert asyncio.run(run_one_cell(services(provider))) == "hello\n42"
    assert ("ended", {}) in asked
    if provider == "daytona":
        assert asked[0][1].pop("name").startswith("ramify-")
    if provider in EXPECTED_REQUESTS:
        assert asked[0] == (provider, EXPECTED_REQUESTS[provider])
    else:
        request = asked[0][1]
        assert request.pop("name").startswith("ramify-")
        assert request == {
            "docker_image": "python:3.12-slim",
            "cpu_cores": 1.0,
            "memory_gb": 1.0,
            "timeout_minutes": 60,
            "labels": ["ramify"],
        }


def test_custom_image_is_passed_to_each_service(services: Callable[..., SandboxSpec]) -> None:
    found = []
    for provider in ("modal", "e2b", "daytona", "prime"):
        asked.clear()
        asyncio.run(run_one_cell(services(provider, image="mine:1")))
        found.append(
            {name: asked[0][1].get(name) for name in ("image", "template", "docker_image")}
        )
    none = {"image": None, "template": None, "docker_image": None}
    assert found == [
        {**none, "image": "registry mine:1"},
        {**none, "template": "mine:1"},
        {**none, "image": "mine:1"},
        {**none, "docker_image": "mine:1"},
    ]


TRANSPORT_CHECKS = [
    "values survive a round trip",
    "large values survive a round trip",
    "calls from threads run at once",
    "an endless loop stops, variables stay",
    "a cell that cannot be stopped is killed",
    "a crash is reported, with the output so far",
    "long output keeps head, tail and length",
    "a misbehaving cell does not break the next",
    "the host's environment is not visible",
]
"""Checks that depend on the transport and not only on the guest; ``docker`` runs all checks."""
CASES = [(p, q) for p in PROVIDERS for q in LOCAL if q.name in TRANSPORT_CHECKS]


@pytest.mark.parametrize(("provider", "check"), CASES, ids=[f"{p}-{q.name}" for p, q in CASES])
def test_conformance_check(
    provider: str, check: ConformanceCheck, services: Callable[..., SandboxSpec]
) -> None:
    spec = services(provider)

    async def put() -> None:
        sandbox = open_sandbox(spec)
        result = await check_one(sandbox, spec, check)
        await sandbox.close()
        if result.passed is None:
            pytest.skip(result.detail)
        assert result.passed, result.detail

    asyncio.run(put())


def test_missing_key_or_sdk_is_named(
    services: Callable[..., SandboxSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    for provider in ("modal", "e2b", "daytona", "prime"):
        spec = services(provider)
        for key in KEYS:
            monkeypatch.delenv(key)
        with pytest.raises(
            SandboxError, match=f"sandbox '{provider}' has no key: set {provider.upper()}_"
        ):
            open_sandbox(spec)
        services(provider)
        monkeypatch.setitem(
            sys.modules, "prime_sandboxes" if provider == "prime" else provider, None
        )
        with pytest.raises(SandboxError, match=rf"pip install .*\[{provider}\]'"):
            open_sandbox(spec)


def test_service_refusal_is_one_line_error(
    services: Callable[..., SandboxSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = services("e2b")

    async def create(**_: Any) -> None:
        raise PermissionError("invalid key\nmore")

    monkeypatch.setattr(E2BBox, "create", create)
    with pytest.raises(
        SandboxError,
        match=r"sandbox 'e2b' could not start a session: PermissionError: invalid key$",
    ):
        asyncio.run(run_one_cell(spec))


def double_functions() -> list[tuple[str, str, Callable[..., Any]]]:
    """(SDK module, dotted name in it, the double's function)"""
    prime = [
        getattr(PrimeContainerClient, name)
        for name in (
            "create",
            "wait_for_creation",
            "is_vm",
            "open_process",
            "start_background_job",
            "upload_bytes",
            "read_file",
            "delete",
            "aclose",
        )
    ]
    return [
        ("modal", "Sandbox.create.aio", ModalBox.create),
        ("modal", "Sandbox.exec.aio", ModalBox.exec),
        ("modal", "Sandbox.terminate.aio", ModalBox.terminate),
        ("modal", "App.lookup.aio", lookup),
        ("modal", "io_streams.StreamWriter.write", ModalStdin.write),
        ("modal", "io_streams.StreamWriter.drain.aio", ModalStdin.wait_drained),
        ("modal", "Image.debian_slim", lambda python_version=None: None),
        ("modal", "Image.from_registry", lambda tag: None),
        ("e2b", "AsyncSandbox.create", E2BBox.create),
        ("e2b", "AsyncSandbox.kill", E2BBox.kill),
        ("e2b", "AsyncCommandHandle.wait", E2BHandle.wait),
        ("e2b", "sandbox_async.commands.command.Commands.run", E2BCommands.run),
        ("e2b", "sandbox_async.commands.command.Commands.send_stdin", E2BCommands.send_stdin),
        *(
            ("daytona", f"AsyncDaytona.{name}", getattr(DaytonaClient, name))
            for name in ("create", "get", "delete", "close")
        ),
        (
            "daytona",
            "_async.process.AsyncProcess.create_pty_session",
            DaytonaProcess.create_pty_session,
        ),
        *(
            (
                "daytona",
                f"handle.async_pty_handle.AsyncPtyHandle.{name}",
                getattr(DaytonaTerminal, name),
            )
            for name in ("wait_for_connection", "send_input", "wait", "disconnect")
        ),
        *(("prime_sandboxes", f"AsyncSandboxClient.{f.__name__}", f) for f in prime),
        *(
            ("prime_sandboxes", f"AsyncSandboxProcess.{name}", getattr(PrimeProcess, name))
            for name in ("write_stdin", "kill", "aclose")
        ),
    ]


def sdk_function(module: Any, name: str) -> Any:
    for part in name.split("."):
        found = getattr(module, part, None)
        module = (
            found if found is not None else importlib.import_module(f"{module.__name__}.{part}")
        )
    return module


def sdk_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name == os.environ.get("TEST_SDK"):
            raise
        pytest.skip(f"the SDK is not installed: {error}")


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, str, bool]]:
    """(name, kind, has a default) of each parameter"""
    signature = inspect.signature(function)
    return [(p.name, p.kind.name, p.default is not p.empty) for p in signature.parameters.values()]


@pytest.mark.parametrize("sdk", ["modal", "e2b", "daytona", "prime_sandboxes"])
def test_doubles_match_sdk_signatures(sdk: str) -> None:
    module = sdk_module(sdk)
    has_containers = hasattr(getattr(module, "AsyncSandboxClient", None), "is_vm")
    for _, name, ours in (face for face in double_functions() if face[0] == sdk):
        if ours.__qualname__.startswith("PrimeContainerClient") and not has_containers:
            continue
        theirs = sdk_function(module, name)
        known = inspect.signature(theirs).parameters
        for parameter in inspect.signature(ours).parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.name in known, f"{sdk}.{name} has no parameter '{parameter.name}'"
                assert known[parameter.name].kind == parameter.kind, (
                    f"{sdk}.{name}({parameter.name})"
                )
        if name != "AsyncSandbox.kill":  # a coroutine function that is not declared as one
            assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(ours), (
                f"{sdk}.{name}"
            )


def test_prime_double_has_exact_sdk_signatures() -> None:
    module = sdk_module("prime_sandboxes")
    if hasattr(module.AsyncSandboxClient, "is_vm"):
        pytest.skip("the SDK that is installed is older than the one that the double copies")
    pairs = [(module.CreateSandboxRequest, prime_request)]
    pairs += [
        (getattr(module.AsyncSandboxClient, name), getattr(PrimeClient, name))
        for name in ("create", "wait_for_creation", "open_process", "delete", "aclose")
    ]
    pairs += [
        (getattr(module.AsyncSandboxProcess, name), getattr(PrimeProcess, name))
        for name in ("write_stdin", "kill", "aclose")
    ]
    assert [parameters_of(ours) for _, ours in pairs] == [
        parameters_of(theirs) for theirs, _ in pairs
    ]


@pytest.mark.parametrize("provider", ["modal", "e2b", "daytona", "prime"])
def test_sdk_has_every_call_that_provider_makes(provider: str) -> None:
    """Checked on the SDK itself; the extra must install the versions that the provider names."""
    found = importlib.import_module(f"ramify.extras.sandboxes.{provider}").SDK
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras[provider] == [found.package + found.versions]
    sdk_module(found.module)
    found.load()
