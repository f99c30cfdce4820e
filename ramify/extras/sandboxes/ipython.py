"""The sandbox provider ``ipython``, which runs each session in a separate process whose cells are
run by IPython, without isolation.

It is meant for users who know IPython from notebooks, with ``%timeit``, ``!command``, ``Out[3]``
and ``obj?``. IPython is imported ahead of time and set up in every session by ``ipython_cells.py``,
which runs there. Everything else about a session is the same as in
``sandbox/providers/process.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from ramify.errors import SandboxError
from ramify.pip_install_command import install_command
from ramify.sandbox.base import PreparedContext, SandboxCapabilities, SandboxSpec
from ramify.sandbox.host.session import GuestSessionProxy
from ramify.sandbox.providers.process import ProcessSandbox

WARNING = (
    "sandbox 'ipython': code runs in a separate process, without the host's environment and with "
    "limits on memory and time, but with your user's rights: it can read your files and use the "
    "network. Do not run hostile code in it."
)
_LOADED = ("IPython", "IPython.core.interactiveshell")


class IPythonSandbox:
    """A sandbox whose sessions run code cells in IPython.

    Implements ``base.Sandbox``.
    """

    warning: str | None = WARNING

    def __init__(self, spec: SandboxSpec) -> None:
        if importlib.util.find_spec("IPython") is None:
            raise SandboxError(f"sandbox 'ipython' needs IPython: {install_command('ipython')}")
        self._process = ProcessSandbox(
            msgspec.structs.replace(spec, packages=(*spec.packages, *_LOADED))
        )
        self.caps: SandboxCapabilities = self._process.caps
        self._cells = (Path(__file__).parent / "ipython_cells.py").read_text("utf-8")

    async def open(
        self, *, context: PreparedContext | None = None, seed: str = ""
    ) -> GuestSessionProxy:
        session = await self._process.open(context=context, seed=seed)
        try:
            await session.install("ramify_ipython", self._cells)
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        await self._process.close()


def open_provider(spec: SandboxSpec) -> IPythonSandbox:
    """Return a sandbox whose sessions run code cells in IPython.

    ``base.open_sandbox`` calls this function. Raises SandboxError if IPython is not installed.
    """
    return IPythonSandbox(spec)
