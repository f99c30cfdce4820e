"""Zip, tar and compressed files: members as texts, and refusal of decompression bombs."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ramify.errors import SourceError
from ramify.sources.load_sources import UnreadableSource, load

FILES = {"a.txt": b"text", "sub/b.csv": b"x,y\n1,2\n", "sub/pic.png": b"\x89PNG\r\n", ".hid": b"h"}


def make_zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def make_tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("passwd")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


def test_zip_members_become_separate_texts(tmp_path: Path):
    (tmp_path / "z.zip").write_bytes(make_zip(FILES))
    loaded = load([tmp_path / "z.zip"])
    assert loaded.context == {"z.zip/a.txt": "text", "z.zip/sub/b.csv": "x,y\n1,2\n"}
    assert loaded.items[1].detail == "CSV: 2 columns x, y; 1 row"
    assert loaded.problems == [
        UnreadableSource(
            "z.zip/sub/pic.png", "is a picture in an archive: unpack it, and name the picture"
        )
    ]
    assert loaded.left_out == {"hidden": ["z.zip/.hid"]}


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("t.tar", bytes),
        ("t.tgz", gzip.compress),
        ("t.tar.bz2", bz2.compress),
        ("t.tar.xz", lzma.compress),
    ],
)
def test_tar_members_become_separate_texts(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
):
    (tmp_path / name).write_bytes(pack(make_tar(FILES)))
    loaded = load([tmp_path / name])
    assert loaded.context == {f"{name}/a.txt": "text", f"{name}/sub/b.csv": "x,y\n1,2\n"}
    assert loaded.problems == [
        UnreadableSource(
            f"{name}/sub/pic.png", "is a picture in an archive: unpack it, and name the picture"
        ),
        UnreadableSource(f"{name}/passwd", "is a link or a device, not a file"),
    ]


@pytest.mark.parametrize(
    ("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
def test_single_compressed_file_is_decompressed(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
):
    path = tmp_path / f"t.csv.{suffix}"
    path.write_bytes(pack(b"a,b\n1,2\n"))
    loaded = load([path])
    assert loaded.context == "a,b\n1,2\n"
    assert (loaded.items[0].name, loaded.items[0].kind) == ("t.csv", "csv")


def test_archive_from_stdin_or_in_folder(tmp_path: Path):
    assert load(["-"], stdin=io.BytesIO(make_zip({"a.txt": b"x"}))).context == {"stdin/a.txt": "x"}
    (tmp_path / "z.zip").write_bytes(make_zip({"a.txt": b"x"}))
    (tmp_path / "b.txt").write_text("b")
    assert load([tmp_path]).context == {"b.txt": "b", "z.zip/a.txt": "x"}


def test_path_traversal_is_neutralised_and_duplicate_names_are_kept(tmp_path: Path):
    (tmp_path / "z.zip").write_bytes(
        make_zip({"../../etc/x": b"1", "/etc/x": b"2", "a\\..\\b": b"3"})
    )
    loaded = load([tmp_path / "z.zip"])
    assert loaded.context == {"z.zip/b": "3", "z.zip/etc/x": "1", "z.zip/etc/x (2)": "2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["z.zip"]


def test_nested_archives_are_reported(tmp_path: Path):
    inner = make_zip({"a.txt": b"x"})
    (tmp_path / "z.zip").write_bytes(
        make_zip({"in.zip": inner, "in.gz": gzip.compress(b"x"), "t.txt": b"t"})
    )
    loaded = load([tmp_path / "z.zip"])
    assert loaded.context == {"z.zip/t.txt": "t"}
    reason = "is an archive within an archive: unpack the outer one first"
    assert loaded.problems == [
        UnreadableSource("z.zip/in.zip", reason),
        UnreadableSource("z.zip/in.gz", reason),
    ]


def test_damaged_archives_are_reported(tmp_path: Path):
    whole = make_zip({"a.txt": b"x" * 1000})
    (tmp_path / "cut.zip").write_bytes(whole[:40])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(bytes(range(256)) * 100)[:200])
    (tmp_path / "cut.tar").write_bytes(make_tar({"a.txt": b"x" * 10_000})[:5000])
    for name, message in {
        "cut.zip": "is a damaged zip archive: File is not a zip file",
        "cut.gz": "is a damaged archive: Compressed file ended before the end-of-stream marker",
        "cut.tar": "is a damaged archive: ",
    }.items():
        with pytest.raises(SourceError, match=rf"{name} {message}"):
            load([tmp_path / name])
    broken = bytearray(whole)
    broken[40] ^= 0xFF
    (tmp_path / "crc.zip").write_bytes(broken)
    (tmp_path / "ok.txt").write_text("ok")
    loaded = load([tmp_path / "crc.zip", tmp_path / "ok.txt"])
    assert loaded.context == {"ok.txt": "ok"}
    assert loaded.problems[0].name == "crc.zip/a.txt"
    assert loaded.problems[0].reason.startswith("cannot be unpacked: ")


def test_an_encrypted_member_is_named(tmp_path: Path):
    data = bytearray(make_zip({"a.txt": b"x"}))
    for mark in (b"PK\3\4", b"PK\1\2"):
        at = data.index(mark) + (6 if mark == b"PK\3\4" else 8)
        data[at : at + 2] = struct.pack("<H", 1)
    (tmp_path / "z.zip").write_bytes(data)
    with pytest.raises(
        SourceError, match=r"z\.zip has no text to read \(z\.zip/a\.txt is encrypted\)"
    ):
        load([tmp_path / "z.zip"])


BOMB_BYTES = 200 << 20


def bomb_zip() -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("zeros", "w") as member,
    ):
        for _ in range(BOMB_BYTES >> 20):
            member.write(b" " * (1 << 20))
    return buffer.getvalue()


def bomb_gz(head: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb", compresslevel=6) as file:
        file.write(head)
        for _ in range(BOMB_BYTES >> 20):
            file.write(b" " * (1 << 20))
    return buffer.getvalue()


def bomb_pax() -> bytes:
    """A tar whose first extended header claims to be as long as the bomb."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, BOMB_BYTES
    return bomb_gz(info.tobuf(tarfile.USTAR_FORMAT))


def bomb_members() -> bytes:
    """A zip of many members, none of which is suspicious by itself."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(80):
            archive.writestr(f"{number}.txt", b"a" * 1_000_000)
    return packed.getvalue()


def bomb_skipped() -> bytes:
    """A tar with a hidden, so skipped, member as long as the bomb."""
    info = tarfile.TarInfo(".hidden")
    info.size = BOMB_BYTES
    return bomb_gz(info.tobuf(tarfile.USTAR_FORMAT))


@pytest.mark.parametrize("make", [bomb_zip, bomb_gz, bomb_pax, bomb_skipped, bomb_members])
def test_decompression_bombs_are_refused(tmp_path: Path, make: Callable[[], bytes]):
    path = tmp_path / "bomb"
    path.write_bytes(make())
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(
            SourceError, match=r"unpacks to over 250 times its size, as a zip bomb would"
        ):
            load([path])
        with pytest.raises(SourceError, match=r"is over the limit of 20 MB: raise max_bytes$"):
            load([path], max_bytes=20_000_000)
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - began < 60


def test_bomb_is_noted_beside_others_and_nothing_of_it_is_loaded(tmp_path: Path):
    (tmp_path / "bomb.zip").write_bytes(bomb_zip())
    with zipfile.ZipFile(tmp_path / "bomb.zip", "a") as archive:
        archive.writestr("later.txt", "later")
    (tmp_path / "a.txt").write_text("a")
    for paths in ([tmp_path], [tmp_path / "a.txt", tmp_path / "bomb.zip"]):
        loaded = load(paths)
        assert loaded.context == {"a.txt": "a"}
        assert [problem.name for problem in loaded.problems] == ["bomb.zip"]
        assert "as a zip bomb would: unpack it yourself" in loaded.problems[0].reason


def test_archive_with_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ramify.sources.archives.MAX_MEMBERS", 10)
    files = {f"{number}.txt": b"x" for number in range(11)}
    for name, data in (("z.zip", make_zip(files)), ("t.tar", make_tar(files))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError, match=f"{name} has over 10 members: unpack it and name"):
            load([tmp_path / name])
