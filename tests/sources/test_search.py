"""``search`` over the texts of a context: what it finds, in which order, where, and what it refuses."""

from __future__ import annotations

import math
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.sources.load_sources import LoadedContext, load
from ramify.sources.loaded_sources import MIN_SEARCHED_CHARS
from ramify.sources.search_units import detect_segmentation, iter_search_units
from ramify.sources.text_search import TextSearchTool, build_context_search_tools

LOG = "".join(
    f"2026-01-01 host-{number:05d} INFO request served in {number % 50} ms\n"
    for number in range(5_000)
)
NOTES = (
    "# Intro\n\nThe quick brown fox.\n\n## Setup\n\nInstall the flux capacitor first. "
    + "More words about it. " * 30
    + "\n\n机器学习是人工智能的一个分支。\n\n东京都に住んでいます。\n\n## End\n\nA café in Málaga.\n"
)
PAGES = "".join(f"--- page {number} ---\nText {number} of a report\n\n" for number in range(1, 40))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of indexes are counted, and other tests make some at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedContext:
    folder = tmp_path_factory.mktemp("search")
    (folder / "app.log").write_text(LOG + "2026-01-02 host-x ERROR disk failure on volume 7\n")
    (folder / "notes.md").write_text(NOTES)
    (folder / "report.txt").write_text(PAGES + "The turbine is on the last page.\n")
    return load([folder])


@pytest.fixture(scope="module")
def search(loaded: LoadedContext) -> Callable[..., Any]:
    return loaded.tools["search"]


def test_a_hit_names_its_place_and_its_text(loaded: LoadedContext, search: Callable[..., Any]):
    (hit,) = search("Disk FAILURE")
    assert hit["place"] == "app.log:5001"
    assert hit["name"] == "app.log"
    assert hit["text"] == "2026-01-02 host-x ERROR disk failure on volume 7"
    assert loaded.context["app.log"][hit["start"] : hit["end"]] == hit["text"] + "\n"


@pytest.mark.parametrize(
    ("query", "place", "part"),
    [
        ("flux capacitor", "notes.md:5 (Setup)", "Install the flux"),
        ("人工智能", "notes.md:9 (Setup)", "机器学习"),
        (
            "\u4eac\u90fd \u4f4f\u3093",
            "notes.md:9 (Setup)",
            "\u673a\u5668\u5b66\u4e60",
        ),  # one passage has both
        ("cafe malaga", "notes.md:13 (End)", "A café"),
        ("turbine", "report.txt:115 (page 39)", "The turbine"),
        ('AND OR NOT +turbine -qq "(" [* TO *] ~9999', "report.txt:115 (page 39)", "The turbine"),
        ("no-such-word", None, ""),
        ("\x00 ; / \\", None, ""),
        ("\ud800", None, ""),
    ],
)
def test_a_query_is_words_of_any_script(
    search: Callable[..., Any], query: str, place: str | None, part: str
):
    found = search(query, 1)
    assert [hit["place"] for hit in found] == ([place] if place else [])
    assert all(part in hit["text"] for hit in found)


def test_equal_scores_come_in_the_order_of_the_text(search: Callable[..., Any]):
    """All lines of the log are alike, and two threads index them."""
    assert [hit["place"] for hit in search("request served", 30)] == [
        f"app.log:{number}" for number in range(1, 31)
    ]


def test_scores_are_those_of_bm25():
    """Against the formula, over lines of random words. An index keeps lengths above 40 words only
    approximately, and scores with four digits."""
    rng = random.Random(5)
    words = [f"w{number}" for number in range(300)]
    lines = [" ".join(rng.choices(words, k=rng.randint(3, 12))) for _ in range(6_000)]
    text = "\n".join(lines)
    split = [line.split() for line in lines]
    mean = sum(map(len, split)) / len(split)
    counts = Counter(word for line in split for word in set(line))

    def score(line: list[str], query: list[str]) -> float:
        total = 0.0
        for word in query:
            idf = math.log(1 + (len(split) - counts[word] + 0.5) / (counts[word] + 0.5))
            tf = line.count(word)
            total += idf * 2.2 * tf / (tf + 1.2 * (0.25 + 0.75 * len(line) / mean))
        return total

    search = TextSearchTool(text)
    for query in ("w1", "w2 w3 w4", "w5 w5 w6"):
        asked = list(dict.fromkeys(query.split()))
        best = sorted(((-score(line, asked), at) for at, line in enumerate(split)))[:10]
        found = search(query, 10)
        assert [hit["score"] for hit in found] == pytest.approx([-s for s, _ in best], rel=2e-3)


def test_equal_contexts_share_one_index():
    text = LOG + "needle\n"
    first, second = TextSearchTool(text), TextSearchTool(text[:100] + text[100:])
    first.prepare()
    assert first("needle") == second("needle")
    before = _folders()
    TextSearchTool(text)("needle")
    assert _folders() == before


def test_a_build_stops_when_nothing_uses_its_context_any_more():
    before = _folders()
    search = TextSearchTool("a word in a long text\n" * 4_000_000)
    search.prepare()
    while not _folders() - before:
        time.sleep(0.001)
    (folder,) = _folders() - before
    del search  # long before the index is complete; a complete one would be kept
    while folder.exists():
        time.sleep(0.001)
    assert TextSearchTool(LOG + "the next context\n")("next")


def test_a_run_that_is_soon_over_builds_no_index():
    before = _folders()
    search = TextSearchTool(LOG + "a short run\n")
    search.prepare()
    builders = [each for each in threading.enumerate() if each.name == "ramify search index"]
    del search
    for builder in builders:
        builder.join()
    assert (len(builders), _folders()) == (1, before)


def test_an_index_is_private_and_deleted_with_its_process():
    before = _folders()
    search = TextSearchTool(LOG + "another needle\n")
    assert search("needle")
    (folder,) = _folders() - before
    assert folder.stat().st_mode & 0o077 == 0
    (process,) = _process_of(folder)
    os.kill(process, signal.SIGKILL)
    while _process_of(folder):
        time.sleep(0.01)
    assert search("needle")[0]["text"] == "another needle", "it is built again"


def test_many_small_texts_are_indexed_together_and_found_apart():
    """A list of texts, some of which end within a line; the index is built in few requests."""
    texts = [f"document {number} says word{number % 7}" for number in range(5_000)]
    search = build_context_search_tools([*texts, "", 5, "the last one"])["search"]
    hits = [search("document 4321", 1)[0], search("last", 1)[0]]
    assert [(hit["name"], hit["place"]) for hit in hits] == [(4321, "[4321]:1"), (5002, "[5002]:1")]
    assert hits[0]["text"] == texts[4321]
    assert [hit["name"] for hit in search("says", 5)] == [0, 1, 2, 3, 4]


def test_small_contexts_and_values_have_no_search(tmp_path: Path):
    assert build_context_search_tools("x\n" * (MIN_SEARCHED_CHARS // 2 - 1)) == {}
    assert build_context_search_tools({"a": 1}) == {}
    assert build_context_search_tools([{"text": LOG}]) == {}
    (tmp_path / "a.txt").write_text("short")
    assert load([tmp_path / "a.txt"]).tools == {}


@pytest.mark.parametrize(
    ("query", "k", "error"),
    [
        ("", 1, "the query is empty: give one or more words"),
        ("  ", 1, "the query is empty: give one or more words"),
        (5, 1, "the query is a int: give words as one text"),
        ("a", 0, "k=0: give a number from 1 to 100"),
        ("a", 101, "k=101: give a number from 1 to 100"),
        ("a", True, "k=True: give a number from 1 to 100"),
        ("a", 1.5, "k=1.5: give a number from 1 to 100"),
        ("a" * 10_001, 1, "the query has 10,001 characters: give a few words"),
    ],
)
def test_wrong_arguments_are_refused(search: Callable[..., Any], query: Any, k: Any, error: str):
    with pytest.raises((TypeError, ValueError)) as raised:
        search(query, k)
    assert str(raised.value).startswith(error)


def test_long_lines_are_cut_and_long_runs_are_not_words():
    """A line of 300,000 characters, a run of letters without an end, and lone surrogates."""
    line = "word " * 60_000 + "needle " + "word " * 100
    run = "QUJD" * 50_000
    search = TextSearchTool(f"{line}\n{run}\n\ud800 odd one\n\n\n" + "plain\n" * 10)
    (hit,) = search("needle")
    assert len(hit["text"]) <= 1500
    assert hit["place"] == "line 1"
    assert "needle" in hit["text"]
    assert search("QUJD") == []
    assert search("odd")[0]["text"] == "\ud800 odd one"
    assert len(search("word plain", 100)) == 100


@pytest.mark.parametrize(
    "text", [LOG[:50_000], NOTES * 20, PAGES, "a\r\n\r\nb " * 2_000, "x" * 9_000]
)
def test_units_cover_a_text_and_do_not_depend_on_its_blocks(text: str):
    shape = detect_segmentation(text).shape
    whole = list(iter_search_units(text, shape, is_last=True))
    covered = [False] * len(text)
    for start, end in whole:
        assert 0 < end - start <= 1500
        covered[start:end] = [True] * (end - start)
    assert all(covered[at] or char.isspace() for at, char in enumerate(text))
    rest, at, found = "", 0, []
    for low in range(0, len(text), 7_000):
        block = rest + text[low : low + 7_000]
        at, end = low - len(rest), 0
        for start, end in iter_search_units(block, shape, is_last=low + 7_000 >= len(text)):
            found.append((at + start, at + end))
        rest = block[end:]
    assert found == whole


def _folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("ramify-search-*"))


def _process_of(folder: Path) -> list[int]:
    """Processes that have a file of ``folder`` mapped or open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (process / "maps").read_text():
                found.append(int(process.name))
        except OSError:
            continue
    return found
