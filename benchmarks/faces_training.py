"""The training page on runs with a known fault: does the sentence on top name it, and is it silent
on healthy runs; and how long the page takes to draw a long run.

The runs are those of ``objectives_doctor.py``: twelve that are broken, each in its own way, and
healthy ones. Their sentences are read from the page in Chromium, as a person would see them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from figures import Figure  # noqa: E402

from tests.viewer.browser import chromium, served, tab, why_not  # noqa: E402

NUM_HEALTHY = 12
_SENTENCE = "() => document.querySelector('.verdict').innerText"


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser, or without torch for the runs."""
    named, silent = "broken runs whose sentence names the fault", "healthy runs with an alarm"
    why = why_not() or ("" if find_spec("torch") else "torch is not installed")
    if why:
        print(f"the training page is not measured: {why}", file=sys.stderr)
        yield Figure(named, None, "of 12", {}, least=12.0)
        yield Figure(silent, None, f"of {NUM_HEALTHY}", {}, 0.0)
        return
    import objectives_doctor

    with tempfile.TemporaryDirectory(prefix="ramify-faces-") as name:
        folder = Path(name)
        # In a process that is over before the page is served, since training leaves threads behind.
        subprocess.run([sys.executable, __file__, name], check=True)
        right = {folder / each.__name__: names for each, names in objectives_doctor.BROKEN.items()}
        healthy = [folder / f"healthy-{seed}" for seed in healthy_seeds()]
        with chromium() as browser:
            said = dict(sentences(browser, [*right, *healthy]))
    wrong = {
        out.name: said[out]
        for out, names in right.items()
        if not any(name.replace("_", " ") in said[out] for name in names)
    }
    yield Figure(named, float(len(right) - len(wrong)), f"of {len(right)}", wrong, least=12.0)
    alarms = {out.name: said[out] for out in healthy if "no alarms" not in said[out].splitlines()}
    yield Figure(silent, float(len(alarms)), f"of {len(healthy)}", alarms, 0.0)


def healthy_seeds() -> list[int]:
    import objectives_doctor

    return list(objectives_doctor.SEEDS[:NUM_HEALTHY])


def train_all(folder: Path) -> None:
    """Run every broken and healthy run, each in a folder inside ``folder``."""
    import objectives_doctor

    (folder / "start").mkdir()
    policy = objectives_doctor.taught(folder / "start")
    for out, _, found in objectives_doctor.broken_runs(folder, policy):
        print(f"{out.name}: {', '.join(each.name for _, each in found)}", file=sys.stderr)
    for seed in healthy_seeds():
        objectives_doctor.healthy_run(folder / f"healthy-{seed}", policy, seed)


def sentences(browser: Any, folders: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the verdict that the page shows for each training folder."""
    with served(*folders) as server, tab(browser) as shown:
        for index, folder in enumerate(folders):
            shown.page.goto("about:blank")
            page = shown.open(f"{server.url}#/training/p{index}%2F")
            page.locator(".verdict li").first.wait_for()
            yield folder, str(page.evaluate(_SENTENCE))


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
