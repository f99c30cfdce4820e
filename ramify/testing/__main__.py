"""``python -m ramify.testing``: a scripted model as a server, and the checks of a sandbox.

python -m ramify.testing serve SCRIPT.json [--port 8123]    print the base URL, and serve
python -m ramify.testing serve offline:default              the model for offline use
python -m ramify.testing sandbox [PROVIDER]                 check every guarantee
"""

from __future__ import annotations

import sys


def main(words: list[str]) -> int:
    """Run a ``ramify.testing`` command and return its exit status.

    The status is 2 for wrong arguments.
    """
    match words:
        case ["serve", *options]:
            from ramify.testing.scripted_server import main as serve

            return serve(options)
        case ["sandbox", *options]:
            from ramify.testing.sandbox_conformance import main as check

            return check(options)
    asks_for_help = words[:1] in (["-h"], ["--help"])
    print((__doc__ or "").strip(), file=sys.stdout if asks_for_help else sys.stderr)
    return 0 if asks_for_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
