"""The libraries that benchmarks compare with: where each is installed, whether it is there in the
pinned version, and the figure that says so.

    python benchmarks/engine.py --without-peers     measure ours alone; no peer is missed

A peer lives in a separate environment, which ``benchmarks/setup`` makes from a list of pinned
versions. A peer that is missing, or has another version, gives a figure that does not hold, because
a comparison that silently lost its other side looks like one that was won. Not here: how a peer is
measured (``side_NAME.py``, ``trl_peer.py``).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from figures import Figure

HERE = Path(__file__).parent
SETUP = "benchmarks/setup"
_VERSIONS = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class PeerEnvironment(NamedTuple):
    """An environment with peers."""

    folder: Path
    requirements: Path
    """The pinned versions from which it is made."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def python_with(self, *names: str) -> str | None:
        """The interpreter of this environment; None if it lacks one of the libraries ``names``."""
        return str(self.python) if {*names} <= _installed(self).keys() else None


BESIDE = PeerEnvironment(HERE / ".venv", HERE / "requirements.txt")
"""The environment of rlms, droste, ipykernel and llama.cpp."""
WITH_TRL = PeerEnvironment(HERE / ".venv-trl", HERE / "requirements-trl.txt")
"""The environment of TRL, which has Ramify in it, too."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--without-peers``, whose value ``check`` takes."""
    parser.add_argument(
        "--without-peers",
        action="store_true",
        help=f"do not miss libraries that are not installed; {SETUP} installs them",
    )


def check(without: bool, environment: PeerEnvironment, *names: str) -> Iterator[Figure]:
    """Give a figure for each library of ``names`` that ``environment`` lacks or has in another
    version than pinned. Nothing is given if the comparison is not wanted (``without``)."""
    if without:
        return
    wrong = {name: _wrong(environment, name) for name in names}
    for name, words in wrong.items():
        if words:
            print(f"{name} {words}: {SETUP} installs it", file=sys.stderr)
            yield Figure(f"peer {name}: {words}", None, "", {}, least=1)


def check_command(without: bool, name: str, command: str) -> Iterator[Figure]:
    """The same for a Debian package ``name``, which has a ``command``."""
    if not without and shutil.which(command) is None:
        print(f"{name} is not installed: apt-get install {name}", file=sys.stderr)
        yield Figure(f"peer {name}: is not installed", None, "", {}, least=1)


def _wrong(environment: PeerEnvironment, name: str) -> str:
    """Say what is wrong with a library's installation; empty if nothing is."""
    pinned = re.search(
        rf"^{re.escape(name)}==(\S+)", environment.requirements.read_text(), re.MULTILINE
    )
    found = _installed(environment).get(name)
    if found is None:
        return "is not installed"
    if pinned is not None and found != pinned[1]:
        return f"has version {found}, and {pinned[1]} is pinned"
    return ""


@functools.cache
def _installed(environment: PeerEnvironment) -> dict[str, str]:
    """Name -> version of each pinned library that is there."""
    if not environment.python.exists():
        return {}
    names = re.findall(r"^([a-z][\w.-]*)", environment.requirements.read_text(), re.MULTILINE)
    done = subprocess.run(
        [str(environment.python), "-c", _VERSIONS, *names],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found
