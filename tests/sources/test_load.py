"""Paths in, a context out: files, folders, globs, standard input; and the errors for bad paths."""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import io
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pandas
import pyarrow
import pytest

from ramify.errors import SourceError
from ramify.sources.load_sources import LoadedSourceInfo, UnreadableSource, load


def write_tree(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


# --- one source, several sources
# -----------------------------------------------------------------------------------


def test_single_file_context_is_its_text(tmp_path: Path):
    path = write_tree(tmp_path, {"notes.txt": "größer\r\nline 2\n"}) / "notes.txt"
    loaded = load([path])
    assert loaded.context == "größer\r\nline 2\n"
    assert loaded.items == [LoadedSourceInfo("notes.txt", "text", 15, 17)]
    assert (loaded.problems, loaded.left_out, loaded.tools) == ([], {}, {})
    assert loaded.manifest() == "It is the text of 'notes.txt'."
    assert loaded.describe() == ["notes.txt: text, 15 characters"]
    assert load(str(path)).context == loaded.context


def test_folder_context_is_dict_sorted_by_name(tmp_path: Path):
    write_tree(tmp_path, {"b.py": "b", "a/z.py": "z", "a/y/x.md": "x", "empty.py": ""})
    loaded = load([tmp_path])
    assert loaded.context == {"a/y/x.md": "x", "a/z.py": "z", "b.py": "b", "empty.py": ""}
    assert list(loaded.context) == sorted(loaded.context)
    assert loaded.manifest().splitlines() == [
        "Kinds: 3 .py, 1 .md",
        "Names: 'a/y/x.md', 'a/z.py', 'b.py', 'empty.py'",
    ]


def test_multiple_paths_are_named_as_given_or_by_common_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_tree(tmp_path, {"logs/a.log": "a", "logs/b.log": "b", "src/m.py": "m"})
    both = load([tmp_path / "logs" / "a.log", tmp_path / "src"])
    assert both.context == {"logs/a.log": "a", "src/m.py": "m"}
    monkeypatch.chdir(tmp_path)
    assert load(["logs/a.log", "./logs/b.log"]).context == {"logs/a.log": "a", "logs/b.log": "b"}
    assert load(["logs", "src/m.py"]).context == {
        "logs/a.log": "a",
        "logs/b.log": "b",
        "src/m.py": "m",
    }
    assert load(["."]).context == {"logs/a.log": "a", "logs/b.log": "b", "src/m.py": "m"}


def test_duplicate_paths_are_loaded_once(tmp_path: Path):
    write_tree(tmp_path, {"d/a.txt": "a"})
    (tmp_path / "link.txt").symlink_to(tmp_path / "d" / "a.txt")
    assert load([tmp_path / "d", tmp_path / "d/a.txt", tmp_path / "link.txt"]).context == {
        "d/a.txt": "a"
    }


def test_stdin_alone_and_with_files(tmp_path: Path):
    assert load(["-"], stdin=io.BytesIO(b"piped")).context == "piped"
    path = write_tree(tmp_path, {"a.txt": "a"}) / "a.txt"
    assert load(["-", path], stdin=io.BytesIO(b"piped")).context == {"a.txt": "a", "stdin": "piped"}
    twice = load(["-", path, "-"], stdin=io.BytesIO(b"piped"))
    assert twice.context == {"a.txt": "a", "stdin": "piped"}
    assert load(["-", "-"], stdin=io.BytesIO(b"piped")).context == "piped"
    with pytest.raises(SourceError, match="standard input is empty: name something"):
        load(["-"], stdin=io.BytesIO(b""))


def test_globs_not_expanded_by_shell_are_expanded(tmp_path: Path):
    write_tree(
        tmp_path, {"a.py": "a", "b/c.py": "c", "b/d.txt": "d", "b/bin.py": b"\0\1", "[x].py": "x"}
    )
    loaded = load([f"{tmp_path}/**/*.py"])
    assert loaded.context == {"[x].py": "x", "a.py": "a", "b/c.py": "c"}
    assert loaded.problems == [UnreadableSource("b/bin.py", "is binary")]
    assert load([f"{tmp_path}/[x].py"]).context == "x"
    with pytest.raises(SourceError, match=r"\*\.rs matches nothing: check the pattern"):
        load([f"{tmp_path}/*.rs"])


def test_named_pipe_is_read_if_given_as_path(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("from a pipe"))
    thread.start()
    assert load([tmp_path / "pipe"]).context == "from a pipe"
    thread.join()


# --- text
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text", "detail"),
    [
        ("größer".encode(), "größer", ""),
        (codecs.BOM_UTF8 + "größer".encode(), "größer", ""),
        ("größer 🌲".encode("utf-16"), "größer 🌲", "from UTF-16-LE"),
        (codecs.BOM_UTF16_BE + "größer".encode("utf-16-be"), "größer", "from UTF-16-BE"),
        ("größer".encode("utf-32"), "größer", "from UTF-32-LE"),
        ("größer – “x”".encode("cp1252"), "größer – “x”", "not UTF-8, read as Windows-1252"),
    ],
)
def test_text_encoding_is_detected(tmp_path: Path, data: bytes, text: str, detail: str):
    (tmp_path / "t.txt").write_bytes(data)
    loaded = load([tmp_path / "t.txt"])
    assert (loaded.context, loaded.items[0].detail) == (text, detail)


@pytest.mark.parametrize(
    ("name", "text", "detail"),
    [
        ("t.csv", "a,b,c\n1,2,3\n4,5,6\n", "CSV: 3 columns a, b, c; 2 rows"),
        ("t.csv", 'a;"b;c"\n1;"two\nlines"\n2;x\n', "CSV: 2 columns a, b;c; 2 rows"),
        ("t.csv", "a,b\r\n1,2\r\n\r\n3,4", "CSV: 2 columns a, b; 2 rows"),
        ("t.tsv", "a\tb\n1\t2\n", "CSV: 2 columns a, b; 1 row"),
        ("t.jsonl", '{"id": 1, "q": "x"}\n\n{"id": 2}\n', "JSONL: 2 records; 2 keys id, q"),
        ("t.jsonl", "oops\n{}\n", "JSONL: 2 lines; the first is not JSON: JSON is malformed"),
        ("t.jsonl", "[" * 5000 + "]" * 5000, "JSONL: 1 line; the first is not JSON: maximum"),
        ("t.json", '{"a": 1, "b": [2]}', "JSON: an object; 2 keys a, b"),
        ("t.json", "[1, 2, 3]", "JSON: a list of 3"),
    ],
)
def test_tables_and_records_stay_text_with_description(
    tmp_path: Path, name: str, text: str, detail: str
):
    (tmp_path / name).write_bytes(text.encode())
    loaded = load([tmp_path / name])
    assert loaded.context == text
    assert loaded.items[0].detail.startswith(detail)


# --- folders
# ---------------------------------------------------------------------------------------------------


def test_nested_and_negated_gitignore_rules(tmp_path: Path):
    write_tree(
        tmp_path,
        {
            ".gitignore": "*.log\nbuild/\n/top.txt\n!keep.log\n",
            "a.log": "no",
            "keep.log": "yes",
            "top.txt": "no",
            "build/out.py": "no",
            "src/top.txt": "yes",
            "src/a.log": "no",
            "src/deep/.gitignore": "!a.log\nsecret*\n",
            "src/deep/a.log": "yes",
            "src/deep/secret.txt": "no",
        },
    )
    loaded = load([tmp_path])
    assert set(loaded.context) == {"keep.log", "src/top.txt", "src/deep/a.log"}
    assert loaded.left_out == {
        "hidden": [".gitignore", "src/deep/.gitignore"],
        "ignored by .gitignore": ["a.log", "build/", "top.txt", "src/a.log", "src/deep/secret.txt"],
    }
    assert (
        "left out (5), ignored by .gitignore: a.log, build/, top.txt, src/a.log, "
        "src/deep/secret.txt" in (loaded.describe())
    )


def test_enclosing_gitignore_applies_unless_it_ignores_the_folder(tmp_path: Path):
    write_tree(
        tmp_path,
        {
            ".git/info/exclude": "*.tmp\n",
            ".gitignore": "data/\nsrc/gen.py\n",
            "src/a.py": "a",
            "src/gen.py": "g",
            "src/x.tmp": "t",
            "data/d.txt": "d",
        },
    )
    assert load([tmp_path / "src"]).context == {"a.py": "a"}
    assert load([tmp_path / "data"]).context == {"d.txt": "d"}
    assert load([tmp_path / "src" / "gen.py"]).context == "g"


def test_ignored_files_match_git(tmp_path: Path):
    write_tree(
        tmp_path,
        {
            ".gitignore": "*.o\n/a/*\n!/a/keep\n**/cache\nfoo[0-9].txt\n\\#x\n dir \n",
            "a/keep": "1",
            "a/drop": "1",
            "b/a/drop": "1",
            "b/cache/x": "1",
            "cache": "1",
            "foo1.txt": "1",
            "food.txt": "1",
            "#x": "1",
            "m.o": "1",
            "c/.gitignore": "*\n!*.c\n",
            "c/m.c": "1",
            "c/m.h": "1",
        },
    )
    try:
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    listed = subprocess.run(
        ["git", "ls-files", "-o", "--exclude-standard"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert sorted(load([tmp_path]).context) == sorted(
        name for name in listed if not name.endswith(".gitignore")
    )


def test_hidden_files_and_links_are_left_out(tmp_path: Path):
    root = write_tree(
        tmp_path / "root", {"a.txt": "a", ".env": "KEY=1", ".config/x": "x", ".git/HEAD": "ref"}
    )
    write_tree(tmp_path, {"outside.txt": "secret"})
    (root / "out").symlink_to(tmp_path / "outside.txt")
    (root / "up").symlink_to(tmp_path)
    (root / "again").symlink_to(root / "a.txt")
    (root / "loop").symlink_to(root)
    (root / "broken").symlink_to(root / "gone")
    loaded = load([root])
    assert loaded.context == {"a.txt": "a"}
    assert loaded.left_out == {
        "hidden": [".config/", ".env"],
        "a link to a file in the same folder": ["again", "loop"],
    }
    refused = "is a link out of the folder: name its target to read it"
    assert loaded.problems == [
        UnreadableSource("broken", "is a broken link"),
        UnreadableSource("out", refused),
        UnreadableSource("up", refused),
    ]
    assert load([root / "out"]).context == "secret"
    assert load([root / ".env"]).context == "KEY=1"


def test_unreadable_files_in_folder_are_reported(tmp_path: Path):
    write_tree(
        tmp_path,
        {
            "a.txt": "a",
            "x.bin": b"\0" * 10,
            "y.png": b"\x89PNG\r\n\x1a\n",
            "z.dat": b"\x89PNG\r\n\x1a\n",
        },
    )
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        loaded = load([tmp_path])
    assert loaded.context == {"a.txt": "a"}
    assert loaded.problems == [
        UnreadableSource("pipe", "is a pipe, a socket or a device"),
        UnreadableSource("s", "cannot be read: No such device or address"),
        UnreadableSource("x.bin", "is binary"),
    ]
    why = "pictures beside texts: name them to load them, as in folder/*.png"
    assert loaded.left_out == {why: ["y.png", "z.dat"]}
    assert loaded.manifest().splitlines()[-1] == "Not loaded: 3 files (2 other, 1 .bin)"
    assert "not loaded (1), is binary: x.bin" in loaded.describe()


def test_slow_pipe_is_read_and_pipe_without_writer_is_refused(tmp_path: Path):
    """A slow writer is waited for; a pipe without a writer is refused."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    lines = "".join(f"line {i}\n" for i in range(20_000))

    def write() -> None:
        with open(pipe, "w") as file:
            for start in range(0, len(lines), 50_000):
                file.write(lines[start : start + 50_000])
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert load([pipe]).context == lines
    writer.join()
    with pytest.raises(
        SourceError, match="is a pipe without a writer: start the program that writes to it"
    ):
        load([pipe])
    with subprocess.Popen(
        [sys.executable, "-c", "print('abc')"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert load([f"/dev/fd/{process.stdout.fileno()}"]).context == "abc\n"


def test_permission_errors_are_reported(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    write_tree(tmp_path, {"a.txt": "a", "b.txt": "b", "c/d.txt": "d"})
    (tmp_path / "b.txt").chmod(0)
    (tmp_path / "c").chmod(0)
    try:
        assert load([tmp_path]).problems == [
            UnreadableSource("b.txt", "cannot be read: Permission denied"),
            UnreadableSource("c/", "cannot be listed: Permission denied"),
        ]
        with pytest.raises(
            SourceError, match=r"b\.txt cannot be read: Permission denied; check its permissions"
        ):
            load([tmp_path / "b.txt"])
    finally:
        (tmp_path / "c").chmod(0o700)


# --- bad input
# -------------------------------------------------------------------------------------------------


def test_unreadable_path_is_one_line_error_with_remedy(tmp_path: Path):
    write_tree(
        tmp_path,
        {
            "report.txt": "r",
            "empty.txt": "",
            "b.bin": b"\0\1\2",
            "d/e.bin": b"\0",
            "w.odp": b"PK\3\4x",
        },
    )
    (tmp_path / "void").mkdir()
    (tmp_path / "link").symlink_to("gone.txt")
    for name, message in {
        "link": r"link is a broken link to gone\.txt: name a file that exists",
        "reprot.txt": r"reprot\.txt does not exist: did you mean .*report\.txt\?",
        "qqq": r"qqq does not exist: check its name, or look into ",
        "no/such/x": r"no/such/x does not exist: nor does the folder ",
        "empty.txt": r"empty\.txt is empty: name something that has text in it",
        "b.bin": r"b\.bin is binary: convert it to text first",
        "w.odp": r"w\.odp is an office document: save it as text or PDF",
        "void": r"void has no text to read \(no files, or only empty ones\): name a source that has text",
        "d": r"d has no text to read \(e\.bin is binary\): name a source that has text",
    }.items():
        with pytest.raises(SourceError, match=message) as caught:
            load([tmp_path / name])
        assert "\n" not in str(caught.value)
    with pytest.raises(
        SourceError, match=r"ftp://x\.org/a is not an address that can be read: give one of"
    ):
        load(["ftp://x.org/a"])
    with pytest.raises(SourceError, match="nothing to read: name a file, a folder, or '-'"):
        load([])
    with pytest.raises(SourceError, match=r"^a path is empty: name a file, a folder, or '-'"):
        load([""])


@dataclasses.dataclass
class Order:
    id: int = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (pyarrow.table({"a": ["x"]}), "Table"),
        (pandas.DataFrame({"a": ["x"]}), "DataFrame"),
        (numpy.arange(2), "ndarray"),
        (Order(), "Order"),
        (None, "NoneType"),
        (io.BytesIO(b"a"), "BytesIO"),
        (b"a.txt", "bytes"),
        ({"a.txt": "a"}, "dict"),
        (["a.txt", 3], "int"),
    ],
)
def test_value_that_is_no_path_is_referred_to_completion(value: Any, kind: str):
    with pytest.raises(
        SourceError,
        match=f"load reads paths and addresses, and got a value of the type {kind}: give the value "
        "itself to completion, as its context",
    ):
        load(value)


def test_paths_may_be_any_collection_of_them(tmp_path: Path):
    write_tree(tmp_path, {"a.txt": "a", "b.txt": "b"})
    paths = [tmp_path / "a.txt", str(tmp_path / "b.txt")]
    for given in (paths, tuple(paths), set(paths), iter(paths), dict.fromkeys(paths)):
        given = given.keys() if isinstance(given, dict) else given
        assert load(given).context == {"a.txt": "a", "b.txt": "b"}


def test_sources_over_max_bytes_are_refused_before_reading(tmp_path: Path):
    write_tree(tmp_path, {"a.txt": "x" * 600, "b.txt": "x" * 600})
    assert len(load([tmp_path / "a.txt"], max_bytes=1000).context) == 600
    with pytest.raises(
        SourceError,
        match=r"b\.txt brings the sources to over 1,000 bytes: name fewer files, or raise max_bytes$",
    ):
        load([tmp_path], max_bytes=1000)
    with pytest.raises(SourceError, match="standard input is over the limit of 1,000 bytes"):
        load(["-"], stdin=io.BytesIO(b"x" * 2000), max_bytes=1000)
    with pytest.raises(SourceError, match="/dev/zero is over the limit of 1,000,000 bytes"):
        load(["/dev/zero"], max_bytes=1_000_000)


def test_importing_load_imports_no_format_readers():
    code = (
        "import sys, ramify.sources.load_sources\n"
        "print(sorted({'zipfile', 'tarfile', 'sqlite3', 'pathspec', 'csv', 'pypdf'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n"


def test_plain_text_with_the_name_of_another_format_is_noted(tmp_path: Path):
    write_tree(tmp_path, {"a.PDF": "no PDF", "b.xlsx": "no sheet", "c.txt": "c", "pdf": "x"})
    loaded = load(tmp_path)
    assert {item.name: item.detail for item in loaded.items} == {
        "a.PDF": "plain text, although its name ends in .pdf",
        "b.xlsx": "plain text, although its name ends in .xlsx",
        "c.txt": "",
        "pdf": "",
    }
    assert loaded.warnings() == [
        "a.PDF: plain text, although its name ends in .pdf",
        "b.xlsx: plain text, although its name ends in .xlsx",
    ]


def test_note_on_a_file_is_in_the_report_once(tmp_path: Path):
    write_tree(tmp_path, {"a.pdf": "no PDF", "b.csv": "a,b\né,2\n".encode("cp1252")})
    (tmp_path / "c.csv").write_bytes("a,b\né\n".encode("cp1252"))
    assert load(tmp_path).describe() == [
        "a.pdf: text, 6 characters",
        "b.csv: CSV: 2 columns a, b; 1 row, 8 characters",
        "c.csv: CSV: 2 columns a, b; 1 row, 6 characters",
        "a.pdf: plain text, although its name ends in .pdf",
        "b.csv: not UTF-8, read as Windows-1252",
        "c.csv: not UTF-8, read as Windows-1252",
        "not a table for sql (1), record 2 has 1 field, and the header has 2: c.csv",
    ]


def test_files_that_are_all_too_large_name_the_limit(tmp_path: Path):
    write_tree(tmp_path, {f"{number}.log": "x" * 100 for number in range(5)})
    has = "has 100 bytes, over the limit of 10 bytes"
    with pytest.raises(SourceError) as raised:
        load(tmp_path, max_bytes=10)
    assert str(raised.value) == (
        f"{tmp_path} has no text that fits the limits (0.log {has}; 1.log {has}; 2.log {has}; "
        "and 2 more): raise max_bytes"
    )


def test_empty_standard_input_beside_a_file_is_noted(tmp_path: Path):
    write_tree(tmp_path, {"a.txt": "a"})
    loaded = load([tmp_path / "a.txt", "-"], stdin=io.BytesIO())
    assert loaded.context == {"a.txt": "a"}
    assert loaded.warnings() == ["not loaded (1), is empty: stdin"]
    with pytest.raises(SourceError, match=r"stdin is empty; .*--strict"):
        load([tmp_path / "a.txt", "-"], stdin=io.BytesIO(), strict=True)


def test_control_characters_in_names_are_replaced(tmp_path: Path):
    write_tree(tmp_path, {"a\x1b[31m\nb.csv": '"x\ny",z\n1,2\n', "c.txt": "c"})
    loaded = load([tmp_path])
    assert loaded.describe() == [
        "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b.csv: CSV: 2 columns x y, z; 1 "
        "row, 12 characters",
        "c.txt: text, 1 character",
    ]
    assert len(loaded.manifest().splitlines()) == 4  # with the tables for sql


@pytest.mark.parametrize("name", ["a\n\x1b[31mb", "http://x\r\nHost: y/", "a\udcff\u202eb"])
def test_errors_are_one_printable_line(name: str):
    with pytest.raises(SourceError) as caught:
        load([name])
    assert str(caught.value).isprintable()


def test_whole_asyncio_package_is_loaded():
    loaded = load([Path(os.__file__).parent / "asyncio"])
    assert "def create_task" in loaded.context["tasks.py"]
    assert len(loaded.items) >= 20


# --- strict
# -----------------------------------------------------------------------------------


def test_strict_load_stops_at_first_file_that_cannot_be_read(tmp_path: Path):
    write_tree(tmp_path, {"a.txt": "a", "b.bin": b"\0\1", ".hidden": "x"})
    assert load([tmp_path]).problems == [UnreadableSource("b.bin", "is binary")]
    with pytest.raises(SourceError, match=r"^b\.bin is binary; .* remove --strict$"):
        load([tmp_path], strict=True)
    (tmp_path / "b.bin").unlink()
    loaded = load([tmp_path], strict=True)
    assert (loaded.context, loaded.left_out) == ({"a.txt": "a"}, {"hidden": [".hidden"]})


# --- one of several sources cannot be read
# -----------------------------------------------------------------------------------


def test_named_file_that_cannot_be_read_is_noted_beside_others(tmp_path: Path):
    write_tree(tmp_path, {"a.txt": "a", "b.docx": b"PK\3\4damaged", "c.csv": "x,y\n1,2\n"})
    named = [tmp_path / name for name in ("a.txt", "b.docx", "c.csv")]
    loaded = load(named)
    assert list(loaded.context) == ["a.txt", "c.csv"]
    (problem,) = loaded.problems
    assert problem.name == "b.docx"
    assert problem.reason.startswith("is a damaged Word document")
    assert any(line.startswith("not loaded (1), is a damaged") for line in loaded.describe())
    with pytest.raises(SourceError, match=r"^b\.docx is a damaged .* remove --strict$"):
        load(named, strict=True)
    with pytest.raises(SourceError, match=r"b\.docx is a damaged Word document: "):
        load(named[1])
    write_tree(tmp_path, {"d.bin": b"\0"})
    with pytest.raises(SourceError, match=r"has no text to read \(b\.docx is a .*; d\.bin is bin"):
        load([named[1], tmp_path / "d.bin"])


def test_path_that_does_not_exist_is_an_error_before_anything_is_read(tmp_path: Path):
    write_tree(tmp_path, {"a.txt": "a"})
    for path, message in {
        tmp_path / "b.txt": r"b\.txt does not exist: ",
        tmp_path / "a.txt" / "c": r"a\.txt/c does not exist: ",
        "a\0b": r"'a\\x00b' is not a path: embedded null byte",
        "x" * 5000: r"'x{200}' is not a path: File name too long",
    }.items():
        with pytest.raises(SourceError, match=message):
            load([Path("/dev/zero"), path])


def test_file_over_the_limit_is_noted_and_others_are_loaded(tmp_path: Path):
    write_tree(
        tmp_path, {"a.txt": "x" * 3000, "b.txt": "b", "c.csv.gz": gzip.compress(b"1,2\n" * 800)}
    )
    limit = "over the limit of 2,000 bytes: raise max_bytes"
    for paths in ([tmp_path], [tmp_path / name for name in ("b.txt", "a.txt", "c.csv.gz")]):
        loaded = load(paths, max_bytes=2000)
        assert loaded.context == {"b.txt": "b"}
        reasons = {problem.name: problem.reason for problem in loaded.problems}
        assert reasons["a.txt"].startswith(f"has 3,000 bytes, {limit}")
        assert reasons["c.csv.gz"].startswith("brings the sources to over 2,000 bytes: raise")
        assert "tables" not in loaded.tools
    with pytest.raises(SourceError, match=r"^a\.txt has 3,000 bytes, over the limit .*--strict$"):
        load([tmp_path], max_bytes=2000, strict=True)
