"""Large texts stay in their files: which ones, what is said about them, and what is refused."""

from pathlib import Path

import pytest

from ramify.errors import SourceError
from ramify.sandbox.base import FileBackedText
from ramify.sources.load_sources import load

TINY = 1000
"""Size of all sources above which texts stay in their files in these tests."""


def test_large_file_stays_on_disk_and_a_small_one_does_not(tmp_path: Path) -> None:
    large, small = tmp_path / "a.log", tmp_path / "b.log"
    large.write_text("größe\n" * 1000)
    small.write_text("größe\n")
    loaded = load([large], mapped_bytes=TINY)
    assert isinstance(loaded.context, FileBackedText)
    assert loaded.context[:7] == "größe\ng"
    assert loaded.describe() == ["a.log: text, 6,000 characters, stays in its file"]
    assert loaded.manifest() == "It is the text of 'a.log'."
    assert load([small], mapped_bytes=TINY).context == "größe\n"
    assert load([large]).context == "größe\n" * 1000


def test_later_files_of_a_large_folder_stay_on_disk(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 400)
    (tmp_path / "image.txt").write_bytes(b"\0" * 5000)
    (tmp_path / "wide.txt").write_bytes(("\ufeff" + "é" * 2000).encode("utf-16-le"))
    loaded = load([tmp_path], mapped_bytes=TINY)
    assert isinstance(loaded.context, dict)
    kinds = {name: type(text).__name__ for name, text in loaded.context.items()}
    assert kinds == {
        **dict.fromkeys(("0.txt", "1.txt"), "str"),
        **dict.fromkeys(("2.txt", "3.txt", "4.txt"), "str"),
        "wide.txt": "str",
    }
    assert [str(problem) for problem in loaded.problems] == ["image.txt is binary"]


def test_tables_in_their_files_are_described_by_their_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name\n" + '1,"x"\n' * 500)
    (tmp_path / "b.jsonl").write_text('{"id": 1, "name": "x"}\n' * 500)
    (tmp_path / "c.json").write_text("[" + "1," * 1000 + "1]")
    (tmp_path / "d.jsonl").write_text("not JSON\n" * 500)
    loaded = load([tmp_path], mapped_bytes=TINY)
    details = {item.name: item.detail.split("; not a table")[0] for item in loaded.items}
    assert all(item.in_file for item in loaded.items)
    assert details["a.csv"] == "CSV: 2 columns id, name; 500 rows"
    assert details["b.jsonl"] == "JSONL: 500 records; 2 keys id, name"
    assert details["c.json"] == "JSON"
    assert details["d.jsonl"].startswith("JSONL: 500 lines; the first is not JSON: ")


def test_limit_that_was_set_counts_texts_in_files_too(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("x" * 5000)
    with pytest.raises(
        SourceError,
        match=r"a\.log has 5,000 bytes, over the limit of 2,000 bytes: raise max_bytes$",
    ):
        load([path], mapped_bytes=TINY, max_bytes=2000)
    assert len(load([path], mapped_bytes=TINY, max_bytes=5000).context) == 5000
