"""Counts, dollars and durations read the same in the terminal and on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ramify import format_quantities
from tests.viewer.browser import served, tab
from tests.viewer.conftest import World

CASES: dict[str, list[tuple[float, str]]] = json.loads(
    Path(__file__).with_name("quantity_cases.json").read_text(encoding="utf-8")
)


PYTHON_NAMES = {
    "count": "format_count",
    "ticking": "format_growing_duration",
    "dollars": "format_dollars",
    "seconds": "format_duration",
    "plain": "format_plain_number",
}
"""Function of the page -> the function of Python that writes the same words."""


@pytest.mark.parametrize("name", CASES)
def test_quantities_read_as_in_the_cases(name: str) -> None:
    words = getattr(format_quantities, PYTHON_NAMES.get(name, name))
    assert [(value, words(value)) for value, _ in CASES[name]] == [tuple(it) for it in CASES[name]]


def test_no_duration_is_a_full_unit_and_no_cost_has_an_exponent() -> None:
    for tenths in range(0, 80_000, 7):
        assert not re.search(
            r"(?<![.\d])60(\.0)? (s|min)\b", format_quantities.format_duration(tenths / 10)
        )
    for power in range(-12, 12):
        assert "e" not in format_quantities.format_dollars(1.7 * 10.0**power).removeprefix("under ")
        assert "e" not in format_quantities.format_plain_number(1.7 * 10.0**power)


def test_page_writes_the_same_quantities(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(server.url)
        said = page.evaluate(
            """(cases) => import("/static/format.js").then((format) =>
              Object.fromEntries(Object.entries(cases).map(([name, each]) =>
                [name, each.map(([value]) => [value, format[name](value)])])))""",
            CASES,
        )
    assert said == CASES
