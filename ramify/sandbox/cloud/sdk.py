"""What the cloud providers share: how an SDK is had, and what is said where it or its key is missing."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from ramify.errors import SandboxError

LIFETIME_S = 3600
"""After which a service ends a machine by itself, should this process not live to do it."""
NUM_CPUS = 1.0
OVERHEAD_BYTES = 256 << 20
"""What Python and the guest need beside ``memory_bytes``."""


def load(provider: str, module: str) -> Any:
    """The SDK's module. Raises SandboxError that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SandboxError(
            f"sandbox '{provider}' needs its SDK, which does not import ({error}): pip install 'ramify[{provider}]'"
        ) from None


def need_key(provider: str, variables: tuple[str, ...], file: str = "", instead: str = "") -> None:
    """Raises SandboxError unless all ``variables`` are set, or ``file`` is there, or the variable ``instead`` is set."""
    if all(os.environ.get(name) for name in variables) or os.environ.get(instead):
        return
    if file and Path(file).expanduser().is_file():
        return
    where = f" (or log in, which writes {file})" if file else ""
    raise SandboxError(f"sandbox '{provider}' has no key: set {' and '.join(variables)}{where}")
