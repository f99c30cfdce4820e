"""Benchmarks of the layout of every page in headless Chromium, measured from boxes.

    layout     words that are cut off without an ellipsis and a way to see it, that reach beyond the
               page, or that lie over something else: at every width from 360 to 1,920 in steps of
               20 (ten widths with ``--quick``)
    zoom       the same at 200 %: half of the pixels of two usual windows
    axe-core   findings of any weight, light and dark

The pages and the measurement are those of ``tests/viewer/layout.py``. ``figures(quick)`` yields them
one after the other. Without Chromium or Playwright they are not measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from figures import Figure  # noqa: E402

from tests.viewer.browser import AXE, chromium, served, why_not  # noqa: E402
from tests.viewer.conftest import World, make_world  # noqa: E402
from tests.viewer.layout import HEIGHT, SOME_WIDTHS, WIDTHS, faults, gallery, show  # noqa: E402

ZOOMED = ((720, 450), (512, 384))
"""Windows of 1,440 and 1,024 pixels, of which each is four at 200 %."""
NAMES = (
    "faults of the layout, on every page at each width",
    "faults of the layout at 200 % zoom",
    "findings of axe-core of any weight on every page, two schemes",
)


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser to measure it."""
    if why_not():
        print(f"the layout is not measured: {why_not()}", file=sys.stderr)
        yield from (Figure(name, None, "", {}) for name in NAMES)
        return
    widths = SOME_WIDTHS if quick else tuple(WIDTHS)
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))  # before the browser, which has its own event loop
        with chromium() as browser, served(*world.places) as server:
            values = (
                _faults(browser, world, server.url, [(width, HEIGHT) for width in widths], 1),
                _faults(browser, world, server.url, list(ZOOMED), 2),
                _findings(browser, world, server.url) if AXE.exists() else float("nan"),
            )
    for name, value in zip(NAMES, values, strict=True):
        yield Figure(name, value, "", {}, 0)


def _faults(browser: Any, world: World, url: str, sizes: list[tuple[int, int]], scale: int) -> int:
    """Return the number of different faults. Each page is loaded once and then resized."""
    found = set()
    page = browser.new_page(device_scale_factor=scale)
    for each in gallery(world):
        page.set_viewport_size({"width": sizes[0][0], "height": sizes[0][1]})
        show(page, url, each)
        for width, height in sizes:
            page.set_viewport_size({"width": width, "height": height})
            for fault in faults(page):
                print(f"{each.name} at {width}: {fault}", file=sys.stderr)
                found.add((each.name, fault))
    page.close()
    return len(found)


def _findings(browser: Any, world: World, url: str) -> int:
    num = 0
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    for each in gallery(world):
        show(page, url, each)
        page.evaluate(AXE.read_text(encoding="utf-8"))
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
            for violation in found["violations"]:
                target = violation["nodes"][0]["target"]
                print(f"{scheme} {each.name}: {violation['id']}: {target}", file=sys.stderr)
                num += 1
    page.close()
    return num


def main() -> None:
    from figures import show as show_figures

    show_figures(list(figures("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
