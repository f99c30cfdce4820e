"""Code shared by the cloud sandbox providers: SDK checks, API keys, and reliable cleanup.

A remote machine is called a box here.

An SDK with a different interface is refused before a box is created. A box is deleted however the
work in it ends: with an error, a cancelled task, or a second cancellation during the deletion.
Which calls a provider makes is listed as ``SDK`` in its own file.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ramify.errors import SandboxError
from ramify.logging import ComponentLogger
from ramify.pip_install_command import install_command

_log = ComponentLogger("sandbox")
LIFETIME_S = 3600
"""Seconds after which the service ends a machine, in case this process dies before it can."""
NUM_CPUS = 1.0
OVERHEAD_BYTES = 256 << 20
"""Memory for Python and the guest code, in addition to ``memory_bytes``."""
CREATE_GRACE_S = 30.0
"""Seconds that a cancelled start waits for the sandbox that is being created, so that it can be
deleted."""
DELETE_S = 8.0
"""Time limit in seconds for one attempt to delete a remote sandbox."""
NUM_DELETES = 3
_PAUSE_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class SdkCallSignature:
    """The signature of an SDK call that a sandbox provider makes, for checking it in advance.

    For example, ``SdkCallSignature("Client.read", 2, ("limit",))`` describes ``client.read(path,
    limit=…)``.
    """

    name: str
    """Dotted name, starting from the SDK's module."""
    num_positional: int = 0
    """Number of positional arguments. If ``name`` is a method looked up on its class, ``self``
    counts."""
    keywords: tuple[str, ...] = ()
    is_awaited: bool = False


@dataclass(frozen=True)
class SandboxSdkSpec:
    """The SDK of a cloud sandbox service, and the calls that Ramify's provider makes to it."""

    provider: str
    module: str
    package: str
    """Package name for ``pip``."""
    versions: str
    """Versions whose interface was checked, as in the package's extra."""
    calls: tuple[SdkCallSignature, ...]

    def load(self) -> Any:
        """Import the SDK of the cloud service and check its interface.

        Raises SandboxError if the import fails or a call is missing.
        """
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise SandboxError(
                f"sandbox '{self.provider}' needs its SDK, which cannot be imported ({error}): "
                f"{install_command(self.provider)}"
            ) from None
        for call in self.calls:
            if fault := _fault(module, call):
                raise SandboxError(
                    f"sandbox '{self.provider}' cannot use {self.package} {self._version()}: "
                    f"{fault}; "
                    f"nothing was created; install {self.package}{self.versions}: "
                    f"{install_command(self.provider)}"
                )
        return module

    def _version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "of unknown version"


def _fault(module: Any, call: SdkCallSignature) -> str:
    """Return why a call does not match the interface of an SDK, or an empty string if it does."""
    target = module
    for part in call.name.split("."):
        target = getattr(target, part, None)
        if target is None:
            return f"it has no {call.name}"
    if not callable(target):
        return f"its {call.name} cannot be called"
    if call.is_awaited and not inspect.iscoroutinefunction(target):
        return f"its {call.name} is not asynchronous"
    with contextlib.suppress(ValueError):  # it has no visible signature
        try:
            inspect.signature(target).bind(
                *[None] * call.num_positional, **dict.fromkeys(call.keywords)
            )
        except TypeError as error:
            return f"its {call.name} takes other arguments ({error})"
    return ""


def require_api_key(
    provider: str, variables: tuple[str, ...], file: str = "", instead: str = ""
) -> None:
    """Raise SandboxError if the API key of a cloud sandbox service is not configured.

    A key is given by all of ``variables``, by the variable ``instead``, or by an existing login
    file.
    """
    if all(os.environ.get(name) for name in variables) or os.environ.get(instead):
        return
    if file and Path(file).expanduser().is_file():
        return
    where = f" (or log in, which writes {file})" if file else ""
    raise SandboxError(f"sandbox '{provider}' has no key: set {' and '.join(variables)}{where}")


async def next_bytes(stdout: AsyncIterator[Any]) -> bytes:
    """Return the next output of a process, or empty bytes after it has ended."""
    async for data in stdout:
        if data:
            return bytes(data)
    return b""


async def create_sandbox(
    provider: str, request: Awaitable[T], delete: Callable[[T], Awaitable[object]]
) -> T:
    """Wait until a cloud service has created a remote machine (box), and return that machine.

    If the caller is cancelled meanwhile, the box is still awaited and then deleted, because the
    service may have created it already.
    """
    task = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await _await_uninterrupted(_create_and_delete(provider, task, delete))
        raise


async def _create_and_delete(
    provider: str, task: asyncio.Future[T], delete: Callable[[T], Awaitable[object]]
) -> None:
    done, _ = await asyncio.wait((task,), timeout=CREATE_GRACE_S)
    if not done:
        task.cancel()
        _warn(
            provider,
            "a box",
            f"its creation was cancelled and had not ended {CREATE_GRACE_S:g} s later",
        )
    elif not task.cancelled() and task.exception() is None:
        await delete_after_failure(
            provider, "a box that was being created", lambda: delete(task.result())
        )


async def delete_after_failure(
    provider: str, box: str, delete: Callable[[], Awaitable[object]]
) -> None:
    """Delete a remote machine (box) after another error, without hiding that error.

    A failed deletion only warns, because the original failure is the error to report.
    """
    try:
        await delete_with_retries(delete)
    except Exception as error:  # noqa: BLE001  (an SDK may raise anything)
        message = str(error).strip().partition("\n")[0][:300]
        _warn(provider, box, f"its deletion failed ({type(error).__name__}: {message})")


def _warn(provider: str, box: str, why: str) -> None:
    _log.issue_python_warning(
        f"sandbox '{provider}': {box} may still be running, {why}; delete it at the service, "
        f"or it ends automatically after {LIFETIME_S // 60} minutes",
        RuntimeWarning,
        stacklevel=2,
    )


async def delete_with_retries(delete: Callable[[], Awaitable[object]]) -> None:
    """Delete a remote machine (box) of a cloud service, and retry if that fails.

    A cancellation of this task does not stop the deletion. If all attempts fail, the last error is
    raised.
    """
    await _await_uninterrupted(_delete_with_retries(delete))


async def _delete_with_retries(delete: Callable[[], Awaitable[object]]) -> None:
    for retries_left in reversed(range(NUM_DELETES)):
        try:
            async with asyncio.timeout(DELETE_S):
                await delete()
            return
        except Exception:
            if not retries_left:
                raise
        await asyncio.sleep(_PAUSE_S)


async def _await_uninterrupted(work: Awaitable[None]) -> None:
    """Wait for an operation to finish, even if the current task is cancelled meanwhile.

    The cancellation is raised afterwards.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Mark the exception as retrieved: the caller gets the cancellation instead.
        task.cancelled() or task.exception()
        raise cancelled
    task.result()
