"""The entry point of the ``ramify`` command.

Pressing Ctrl-C ends the command without a traceback, even while its modules are still being
imported.

To achieve this, the default signal handler is installed before anything else is imported. The
module ``_signal`` is used because importing ``signal`` takes as long as the rest of this file.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import sys


def main() -> None:
    """Run the ``ramify`` command.

    This function never returns: it exits the process.
    """
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from ramify.cli.predict_session_need import is_ask_over_large_input

    if is_ask_over_large_input(sys.argv[1:]):
        from ramify.sandbox.host.forkserver_process import start_early

        start_early()
    from ramify.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
