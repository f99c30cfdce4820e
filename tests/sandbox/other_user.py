"""How these tests start a child as another user: with a Python and a package that this user can
read.

    the checkout and its environment     as they are, if the user can read them
    a copy in a temporary folder         otherwise, made once per process: a checkout is often in
                                         a private folder

The package, these tests and the libraries that both import are copied; the interpreter is not.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOBODY = 65534
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
"""Arguments of ``subprocess.run``."""
_LOCK = threading.Lock()
VERSION = "python{}.{}".format(*sys.version_info)
_IMPORTS = "import sys, attacks.host, attacks.runner, jail_tiers"
_LIBRARIES = f"""{_IMPORTS}
import json
files = {{name.partition('.')[0]: None for name, each in list(sys.modules.items())
         if 'site-packages' in (getattr(each, '__file__', None) or '')}}
print(json.dumps([sys.modules[name].__file__ for name in files if name in sys.modules]))
"""


class Readable(NamedTuple):
    """A Python and package folders that another user can run and read."""

    python: str
    path: tuple[str, ...]
    """Folders of the package, of these tests, and of libraries."""

    @property
    def tests(self) -> Path:
        return Path(self.path[1])


def readable(first: tuple[str, ...] = ()) -> Readable | None:
    """None if the other user cannot run a Python of this version; ``first`` is tried before a
    copy."""
    with _LOCK:  # runners start in threads; one copy is enough
        return _find_readable(first or own_path())


@functools.cache
def _find_readable(first: tuple[str, ...]) -> Readable | None:
    for path in _paths(first):
        for python in (sys.executable, f"/usr/bin/{VERSION}", f"/usr/local/bin/{VERSION}"):
            if _is_runnable(python, path):
                return Readable(python, path)
    return None


def own_path() -> tuple[str, ...]:
    """``Readable.path`` of this process."""
    return (str(ROOT), str(HERE), *(entry for entry in sys.path if entry.endswith("site-packages")))


def _paths(first: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield first
    yield _copy_checkout()


def _is_runnable(python: str, path: tuple[str, ...]) -> bool:
    trial = f"{_IMPORTS}, subprocess; subprocess.run([sys.executable, '-c', ''], check=True)"
    with contextlib.suppress(OSError):
        done = subprocess.run(
            [python, "-c", trial],
            env=_env(path),
            cwd="/",
            capture_output=True,
            check=False,
            **AS_NOBODY,
        )
        return done.returncode == 0
    return False


@functools.cache
def _copy_checkout() -> tuple[str, ...]:
    folder = Path(tempfile.mkdtemp(prefix="readable-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(ROOT / "ramify", folder / "ramify")
    shutil.copytree(HERE, folder / "tests" / "sandbox")
    (folder / "libraries").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _LIBRARIES],
        env=_env(own_path()),
        cwd="/",
        capture_output=True,
        check=True,
    )
    for name in json.loads(done.stdout):
        file = Path(name)
        if file.name == "__init__.py":
            shutil.copytree(file.parent, folder / "libraries" / file.parent.name)
        else:
            shutil.copy2(file, folder / "libraries")
    _open_to_all(folder)
    return str(folder), str(folder / "tests" / "sandbox"), str(folder / "libraries")


def _open_to_all(folder: Path) -> None:
    folder.chmod(0o755)
    for each in folder.rglob("*"):
        each.chmod(0o755 if each.is_dir() else each.stat().st_mode | 0o444)


def _env(path: tuple[str, ...]) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
