"""The provider ``ipython``: process sessions whose cells run in a real IPython.

For users who know their notebook: ``%timeit``, ``!command``, ``Out[3]``, ``obj?``. IPython is
loaded ahead of time and set up in every session. Not here: how it is set up (see
``ipython_cells.py``, which runs in the session) and everything else about a session (see
``sandbox/providers/process.py``).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from ramify.errors import SandboxError
from ramify.install_command import install_command
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
    """Sandbox whose cells run in IPython. Implements ``base.Sandbox``."""

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
    """Entry point for ``base.open_sandbox``."""
    return IPythonSandbox(spec)
