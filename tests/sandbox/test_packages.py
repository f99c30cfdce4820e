"""Package files visible in a jail: from a checkout, only what can be imported, at every tier."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="THE JAIL IS NOT TESTED HERE: it needs Linux"
)

SCRIPT = """
import asyncio, json, sys
import jail_tiers
from ramify.sandbox.base import JailSpec
from ramify.sandbox.providers.jail import JailSandbox
tier, packages, code = json.loads(sys.argv[1])
async def answer(*_): return None
async def main():
    spec = JailSpec(tier=tier, packages=tuple(packages))
    if jail_tiers.why_not(tier):
        return "skip"
    sandbox = JailSandbox(spec, deny=jail_tiers.WITHOUT[tier])
    try:
        ran = await (await sandbox.open()).run(code, answer=answer)
        return ran.cell.error or ran.cell.value
    finally:
        await sandbox.close()
print(asyncio.run(main()))
"""


def in_jail(tier: str, packages: list[str], code: str, *path: Path) -> str:
    """Return a cell's output in a jail whose host finds packages in ``path``."""
    here = Path(__file__)
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, (*path, here.parent, here.parents[2]))),
        "PATH": os.environ["PATH"],
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps([tier, packages, code])]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    if done.stdout == "skip\n":
        pytest.skip(f"TIER {tier} IS NOT TESTED HERE")
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture
def readable_folder() -> Iterator[Path]:
    """A folder that everyone can read: at tiers B and C, sessions of root run as another user."""
    with tempfile.TemporaryDirectory(prefix="packages-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def write_files(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def checkout(folder: Path) -> Path:
    """A package, a module, a namespace and another project, among private files."""
    texts: dict[str, Any] = {
        ".env": "KEY",
        ".git/config": "KEY",
        "key.pem": "KEY",
        "pyproject.toml": "",
        "settings.py": "KEY = 1",
        "mine/__init__.py": "from pathlib import Path\ndata = Path(__file__).with_name('data.json').read_text()",
        "mine/data.json": "[1]",
        "mine/.env": "KEY",
        "mine/deep/er/__init__.py": "x = 2",
        "mine/deep/er/.key": "KEY",
        "mine/plain/__init__.py": "x = 3",
        "mine/plain/more.txt": "more",
        "alone.py": "x = 4",
        "alone.env": "KEY",
        "space/part/__init__.py": "x = 5",
        "space/module.py": "x = 6",
        "space/key.pem": "KEY",
        "space/.env": "KEY",
        "flat/__init__.py": "x = 7",
        "flat/inner.py": "x = 8",
        "flat/.git/config": "KEY",
        "flat/key.pem": "KEY",
    }
    write_files(folder, **texts)
    (folder / "mine/to_env").symlink_to("../.env")
    return folder


READ = """
import glob, os
def reads(path):
    try: return bool(open(path).read())
    except OSError: return False
[name for name in NAMES if reads(FOLDER + '/' + name)]
"""
SHOWN = {
    "mine": [
        "mine/__init__.py",
        "mine/data.json",
        "mine/deep/er/__init__.py",
        "mine/plain/__init__.py",
        "mine/plain/more.txt",
    ],
    "alone": ["alone.py"],
    "space": ["space/module.py", "space/part/__init__.py"],
    "flat": ["flat/__init__.py", "flat/inner.py"],
}


@pytest.mark.parametrize("tier", "AB")
@pytest.mark.parametrize("package", SHOWN)
def test_only_importable_files_are_visible(readable_folder: Path, package: str, tier: str) -> None:
    folder = checkout(readable_folder / "checkout")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert len(names) == 23
    code = READ.replace("NAMES", repr(names)).replace("FOLDER", repr(str(folder)))
    assert in_jail(tier, [package], code, folder) == str(SHOWN[package])


@pytest.mark.parametrize("tier", "ABC")
@pytest.mark.parametrize(
    ("package", "code", "value"),
    [
        ("mine", "import mine, mine.deep\nmine.data", "'[1]'"),
        ("alone", "import alone\nalone.x", "4"),
        ("flat", "import flat\nflat.x", "7"),
        ("msgspec", "import msgspec\nmsgspec.json.decode(b'[1]')", "[1]"),
        ("zlib", "import zlib\nzlib.crc32(b'')", "0"),
    ],
)
def test_requested_package_is_importable(
    readable_folder: Path, package: str, code: str, value: str, tier: str
) -> None:
    if tier == "C":
        code = code.replace(", mine.deep", "")
    folder = checkout(readable_folder / "checkout")
    assert in_jail(tier, [package], code, folder) == value


@pytest.mark.parametrize("tier", "AB")
def test_namespace_package_and_linked_checkout_hide_other_files(
    readable_folder: Path, tier: str
) -> None:
    first, second, real = (readable_folder / name for name in ("first", "second", "real"))
    write_files(first, **{"space/one.py": "x = 1", ".env": "KEY"})
    write_files(
        second,
        **{"space/two/__init__.py": "x = 2", "space/two/.env": "KEY", "space/notes.txt": "KEY"},
    )
    write_files(real, **{"linked/__init__.py": "x = 3", ".env": "KEY"})
    (first / "linked").symlink_to(real / "linked")
    code = "import space.one, space.two, linked\nspace.one.x, space.two.x, linked.x"
    asked = ["space", "linked"]
    assert in_jail(tier, asked, code, first, second) == "(1, 2, 3)"
    secrets = ["first/.env", "second/space/two/.env", "second/space/notes.txt", "real/.env"]
    code = READ.replace("NAMES", repr(secrets)).replace("FOLDER", repr(str(readable_folder)))
    assert in_jail(tier, asked, code, first, second) == "[]"


def test_working_folder_is_not_visible_for_built_in_module(readable_folder: Path) -> None:
    script = "import sys\nfrom ramify.sandbox.host.importable_packages import locate, readable_paths\nprint(locate(['sys']), readable_paths(['sys']))"
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=readable_folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[] []\n"
