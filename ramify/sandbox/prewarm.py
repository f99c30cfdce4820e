"""Starts preparing a sandbox early, so that its first session is ready sooner.

The fork server of a jail starts while the modules of the jail are still being imported here. A
provider may define a function ``launch``, which starts its own preparations.
"""

from __future__ import annotations

import contextlib
import sys

from ramify.errors import RamifyError
from ramify.sandbox.base import SANDBOXES, SandboxSpec, provider_spec
from ramify.sandbox.host.forkserver_process import start_early


def prewarm_sandbox(spec: SandboxSpec) -> None:
    """Start preparing the next sandbox with this configuration in the background, while the caller
    does other work.

    Does nothing if its provider does not support that. Errors are ignored, because ``open_sandbox``
    reports them.
    """
    with contextlib.suppress(RamifyError, OSError):
        if spec.provider == "jail" and "ramify.sandbox.providers.jail" not in sys.modules:
            start_early()
        launch_provider = getattr(SANDBOXES.resolve(spec.provider), "launch", None)
        if launch_provider is not None:
            launch_provider(provider_spec(spec))
