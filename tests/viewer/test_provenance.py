"""Links from the values of a call to the calls that returned them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.faces_provenance import TEMPLATES, Recorded, compared, links_of
from ramify import Store
from ramify.viewer.provenance import provenance
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.watched_run import WatchedRun
from tests.viewer.conftest import World


def describe_links(run: Recorded, folder: Path) -> list[tuple[str, str, list[str], bool]]:
    """(part, text, sources, whether it is certain) of the links on outputs and the answer."""
    found = []
    for link in links_of(run, folder):
        text = (
            str(run.root.answer)
            if link.part == "answer"
            else run.root.turns[link.turn].cells[0].stdout
        )
        if link.part != "code":
            found.append((link.part, text[link.start : link.end], link.sources, link.is_certain))
    return found


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.__name__)
def test_exactly_the_expected_sources_are_linked(tmp_path: Path, template: Any) -> None:
    run = Recorded(1)
    template(run)
    found, false, _, remarks = compared(run, links_of(run, tmp_path))
    assert (found, false, remarks) == (len(run.expected), 0, [])


def test_a_value_that_more_than_three_calls_returned_is_not_linked(tmp_path: Path) -> None:
    run = Recorded(1)
    replies = iter(["same words"] * 4 + ["other words"])
    run.reply = lambda _: next(replies)
    run.cell("r = llm_query_batched(list(context))\nprint(r)\nFINAL('done')")
    assert describe_links(run, tmp_path) == [("stdout", "other words", ["0.4"], True)]


def test_copied_value_is_an_uncertain_link(tmp_path: Path) -> None:
    run = Recorded(1)
    run.reply = lambda _: "48213"
    run.cell("r = llm_query('Which order?')\nprint(r)")
    run.cell("FINAL('48213')")
    assert describe_links(run, tmp_path) == [
        ("stdout", "48213", ["0.0"], True),
        ("answer", "48213", ["0.0"], False),
    ]


@pytest.mark.parametrize(
    ("reply", "typed", "linked"),
    [
        ("1,234", "It is 1234.", "1234"),
        ("48213", "It is 48,213 euros", "48,213"),
        ("0.4567", "about 45.67 %", "45.67"),
        ("0.5", "about 50 %", None),  # too short to tell
        ("0.4567", "about 45.67 euros", None),
    ],
)
def test_reformatted_number_is_linked(
    tmp_path: Path, reply: str, typed: str, linked: str | None
) -> None:
    run = Recorded(1)
    run.reply = lambda _: reply
    run.cell("r = llm_query('How much?')\nprint(r)")
    run.cell(f"FINAL({typed!r})")
    links = [] if linked is None else [("answer", linked, ["0.0"], False)]
    assert describe_links(run, tmp_path)[1:] == links


def test_unparsable_code_still_links_matching_text(tmp_path: Path) -> None:
    run = Recorded(1)
    run.reply = lambda _: "web-77 fails"
    run.cell("r = llm_query('Which host?')\nprint(r)\nFINAL(r)")
    cell = type(run.root.turns[0].cells[0])("%%time\n(", run.root.turns[0].cells[0].stdout)
    run.root.turns[0] = type(run.root.turns[0])(0, (), run.root.turns[0].reply, (cell,))
    assert describe_links(run, tmp_path) == [
        ("stdout", "web-77 fails", ["0.0"], False),
        ("answer", "web-77 fails", ["0.0"], False),
    ]


def test_links_lead_from_answer_through_child_to_output(world: World) -> None:
    library = RunCatalog([world.store])
    run = WatchedRun(library.find(world.tree))
    run.refresh()
    answer = Store(world.store).load(world.tree).answer
    text = msgspec.json.encode(answer).decode()
    links = [link for link in provenance(run, "0")["links"] if link.part == "answer"]
    why = next(link for link in links if "0.25" in link.sources)
    assert (text[why.start : why.end], why.is_certain) == (answer["why"], True)
    below = [link for link in provenance(run, "0.25")["links"] if link.part == "answer"]
    assert [(link.sources, link.is_certain) for link in below] == [(["0.25.0"], True)]
