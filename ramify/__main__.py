"""The command, from its first moment: Ctrl-C while its modules are imported ends it without a word.

Nothing is imported here before that is so; ``signal`` itself would take as long as all else in this
file.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]


def main() -> None:
    """The entry point. Never returns."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from ramify.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
