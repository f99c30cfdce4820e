"""The ``ramify`` command: Ctrl-C ends it silently even while its modules are still being imported.

The default signal handler is installed before anything else is imported. ``_signal`` is used
because importing ``signal`` takes as long as the rest of this file. The fork server of a question
over files starts next, so that it is ready when this process is.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import sys


def main() -> None:
    """Command-line entry point. Never returns."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from ramify.cli.early_start import asks_over_much

    if asks_over_much(sys.argv[1:]):
        from ramify.sandbox.host.forkserver_process import start_early

        start_early()
    from ramify.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
