"""``python -m ramify``: the command line."""

from __future__ import annotations

from ramify.cli.main import main

if __name__ == "__main__":
    main()
