"""No word is cut off without an ellipsis and a way to see it, and nothing lies over anything else.

Every page is measured at three widths here; ``benchmarks/faces_layout.py`` measures all of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.viewer.browser import served, tab
from tests.viewer.conftest import World
from tests.viewer.layout import HEIGHT, faults, gallery, show


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1024, 1440])
def test_no_word_is_cut_off_and_nothing_overlaps(browser: Any, world: World, width: int) -> None:
    found = []
    with served(*world.places) as server, tab(browser, (width, HEIGHT)) as shown:
        shown.expects("Failed to load resource")  # the run that does not exist
        for each in gallery(world):
            show(shown.page, server.url, each)
            found += [f"{each.name}: {fault}" for fault in faults(shown.page)]
    assert found == []


PLANTED = """
<p style="width: 60px; overflow: hidden; white-space: nowrap">a long line of words</p>
<p style="width: 60px; overflow: hidden; white-space: nowrap; text-overflow: ellipsis">ellipsis alone</p>
<p style="height: 20px; overflow: hidden">one line<br>and a second line</p>
<p style="position: absolute; left: 0; top: 300px">over</p>
<p style="position: absolute; left: 9px; top: 304px">another</p>
<p style="width: 9000px">beyond the page, since this text is much longer than the page is wide, as
one can see here, and it goes on and on and on and on and on, and on, and on</p>
<input type="search" style="width: 60px" placeholder="a placeholder that is too long">
"""


def test_measurement_finds_what_is_planted(browser: Any) -> None:
    with tab(browser, (400, 800)) as shown:
        shown.page.set_content(f"<!doctype html><body style='margin:0'>{PLANTED}")
        found = faults(shown.page)
        assert [each.split(":")[0].split(" “")[0] for each in found] == [
            "cut off without an ellipsis",
            "cut off without a way to see it",
            "cut off below",
            "beyond the page",
            "cut off in its control",
            "over",
            "the page is 9000 pixels wide",
        ]
        shown.page.set_content(
            "<!doctype html><p title='all of it' style='width: 60px; overflow: hidden; "
            "white-space: nowrap; text-overflow: ellipsis'>a long line of words</p>"
            "<pre style='width: 60px; overflow: auto'>a long line of words</pre>"
        )
        assert faults(shown.page) == []
