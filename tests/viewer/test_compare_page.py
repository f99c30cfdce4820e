"""The comparison of two runs begins with what differs, in a real browser."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ramify import Store
from ramify.types.event import CallStarted, RequestStarted, RunStarted
from ramify.types.message import Message
from tests.viewer import golden
from tests.viewer.browser import AXE, photograph, served, tab, violations
from tests.viewer.page_helpers import text

QUESTION = golden.REVENUE


class Sheets(NamedTuple):
    """Runs that ask for the revenue of four sheets and print the replies."""

    store: Store
    right: str
    wrong: str
    """As ``right``, but sheet 2 has another revenue."""
    silent: str
    """As ``wrong``, with code that ignores the replies."""
    equal: str
    """As ``silent``, but no sheet differs."""
    other: str
    """Another question."""
    failed: str
    """No reply at all."""
    many: tuple[str, str]
    """Two runs of 2,000 calls, one of which differs."""


@pytest.fixture(scope="module", autouse=True)
def sheets(tmp_path_factory: pytest.TempPathFactory) -> Sheets:
    """Made before the browser, which has its own event loop."""
    store = Store(tmp_path_factory.mktemp("sheets"))
    known: list[str] = []

    def made(**options: Any) -> str:
        golden.revenue(store, **options)
        (new,) = {run.id for run in store.runs()} - set(known)
        known.append(new)
        return new

    runs = [
        made(),
        made(odd="1,414"),
        made(odd="1,414", says="print('done')"),
        made(says="print('done')"),
        made(question="Which sheet is the largest?"),
        made(fails=True),
    ]
    big = golden.journal_of(2000, store.root / "runs" / "20260301-000000-aaaaaaa-big.jsonl")
    same = big.read_bytes().replace(b'"summary 1234"', b'"summary 999"')
    other = big.with_name("20260301-000001-aaaaaaa-big.jsonl")
    other.write_bytes(same.replace(big.stem.encode(), other.stem.encode()))
    return Sheets(store, *runs, (big.stem, other.stem))


def said(page: Any) -> list[str]:
    page.locator(".answers-apart").wait_for()
    found: list[str] = page.locator(".answers-apart, .cause .parting").all_inner_texts()
    return found


@pytest.mark.parametrize("size", [(1440, 900), (1024, 768), (390, 844)], ids=str)
def test_cause_of_a_wrong_answer_comes_first(
    browser: Any, sheets: Sheets, tmp_path: Path, size: tuple[int, int]
) -> None:
    with served(sheets.store.root) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/compare/{sheets.right}/{sheets.wrong}")
        assert said(page) == [
            "A answers 120006 and B 91418: 28,588 less (−24 %).",
            "Call 0.2, turn 1: the model replies differently.",
            "Call 0, turn 1: the same code gives a different result because of call 0.2.",
        ]
        numbers = page.locator(".numbers-apart").all_inner_texts()
        assert [" ".join(each.split()) for each in numbers] == [
            "A 30,002 B 1,414 28,588 less (−95 %)"
        ] * 2
        marked = page.locator(".cause .said.output").locator("del, ins").all_inner_texts()
        assert marked == ["30,002", "1,414"]
        assert page.locator(".pair-row:visible .id").all_inner_texts() == ["0", "0.2"]
        photograph(page, f"compare-cause-{size[0]}", tmp_path)
        assert not AXE.is_file() or violations(page) == []
        # The rest is folded.
        assert page.locator(".turn-row").count() == 0
        page.get_by_role("button", name="all calls (3 more)").click()
        assert page.locator(".pair-row:visible .id").count() == 5
        page.locator("#parting a").click()
        page.locator(".side-head a", has_text="call 0.2").first.wait_for()


CASES = {
    "silent": [
        "Both answer 7, although a sub-call answers differently.",
        "Call 0.2, turn 1: the model replies differently.",
    ],
    "other": [
        "They were asked different questions. A answers 7 and B 120006: 119,999 more (17,000 "
        "times as much).",
        "Call 0, turn 1: their prompts differ.",
    ],
    "failed": [
        "A answers 7; B has no answer.",
        "Call 0: B ended before its first turn: scripted:reader: 400, the key is unknown",
    ],
    "equal": ["Both sides are the same run: choose another one."],
}


@pytest.mark.parametrize("name", CASES)
def test_every_pair_of_runs_has_a_sensible_page(
    browser: Any, sheets: Sheets, tmp_path: Path, name: str
) -> None:
    with served(sheets.store.root) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/compare/{sheets.equal}/{getattr(sheets, name)}")
        assert said(page) == CASES[name]
        photograph(page, f"compare-{name}", tmp_path)


def test_one_call_of_two_thousand_differs(browser: Any, sheets: Sheets) -> None:
    with served(sheets.store.root) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/compare/{'/'.join(sheets.many)}")
        assert said(page) == [
            "Both answer done, although a sub-call answers differently.",
            "Call 0.1234, turn 1: the model replies differently.",
        ]
        assert page.locator(".pair-row:visible .id").all_inner_texts() == ["0.1234"]
        page.keyboard.press("o")
        page.locator(".words .answer", has_text="summary 999").wait_for()


def test_run_in_progress_is_compared_so_far(browser: Any, sheets: Sheets, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    golden.plain(store, QUESTION, "31")
    (done,) = [run.id for run in store.runs()]
    live = "20260302-000000-aaaaaaa-live"
    with contextlib.closing(store.create(live)) as journal:
        journal.append(RunStarted(id=live, question=QUESTION, started_at=time.time()))
        journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question=QUESTION))
        with served(store.root) as server, tab(browser) as shown:
            page = shown.open(f"{server.url}#/compare/{done}/{live}")
            assert said(page)[0] == "A answers 31; B has no answer yet."
            assert "B is in progress" in text(page, ".note[role='status']")
            ask = (Message("user", QUESTION),)
            journal.append(
                RequestStarted(call="0", turn=0, reused=0, prompt=ask, prompt_hash="0" * 64)
            )
            page.get_by_role("button", name="refresh").click()
            page.locator(".note[role='status']").wait_for()
            photograph(page, "compare-live", tmp_path)
