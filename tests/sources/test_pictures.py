"""Pictures as values of the context: what is read, what is refused, and what is scaled down."""

import contextlib
import hashlib
import io
import random
import struct
import zlib

import pytest
from PIL import Image

from ramify.errors import SourceError
from ramify.sources.load_sources import load
from ramify.types.picture import (
    MAX_PICTURE_BYTES,
    MAX_SIDE,
    InvalidPictureError,
    PictureTooLarge,
    picture_from_bytes,
    pictures_in,
    size_of,
)


def encoded(format, size=(60, 40), **options):
    file = io.BytesIO()
    Image.new("RGB", size, "navy").save(file, format, **options)
    return file.getvalue()


def png_header(width, height):
    """A PNG file of a few bytes that states any size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


FILES = {
    "a.png": encoded("PNG"),
    "a.jpg": encoded("JPEG"),
    "progressive.jpeg": encoded("JPEG", progressive=True, quality=30),
    "with_exif.jpg": encoded("JPEG", exif=b"Exif\0\0II*\0" + bytes(500)),
    "lossy.webp": encoded("WEBP"),
    "lossless.webp": encoded("WEBP", lossless=True),
    "extended.webp": encoded("WEBP", exif=b"Exif\0\0II*\0"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_header_of_each_format_gives_the_size_that_its_own_library_wrote(name):
    size = size_of(FILES[name])
    assert (size.width, size.height) == (60, 40)
    assert size.kind == {"g": "jpeg", "p": "webp"}[name[-1]] if name != "a.png" else "png"


@pytest.mark.parametrize("name", FILES)
def test_every_beginning_of_a_picture_is_refused_and_raises_nothing_else(name):
    data = FILES[name]
    for end in {*range(min(60, len(data) - 2)), len(data) // 2, len(data) - 20}:
        with pytest.raises(InvalidPictureError):
            size_of(data[:end])


@pytest.mark.parametrize("name", FILES)
def test_damaged_bytes_never_raise_anything_else(name):
    data = FILES[name]
    for at in range(min(len(data), 200)):
        for value in (0, 0xFF):
            with contextlib.suppress(InvalidPictureError):
                size_of(data[:at] + bytes([value]) + data[at + 1 :])


def test_a_bomb_is_refused_by_its_header():
    with pytest.raises(PictureTooLarge, match=r"has 60,000 × 60,000 pixels, and at most 8,000"):
        picture_from_bytes(png_header(60_000, 60_000))
    with pytest.raises(PictureTooLarge, match="bytes, and at most 3,932,160 are sent"):
        picture_from_bytes(png_header(10, 10) + bytes(MAX_PICTURE_BYTES))


def test_a_single_picture_is_the_context(tmp_path):
    (tmp_path / "chart.png").write_bytes(FILES["a.png"])
    loaded = load([tmp_path / "chart.png"])
    digest = hashlib.sha256(FILES["a.png"]).hexdigest()
    assert loaded.context == {
        "picture": digest,
        "name": "chart.png",
        "kind": "png",
        "width": 60,
        "height": 40,
        "bytes": len(FILES["a.png"]),
    }
    assert loaded.pictures == {digest: tmp_path / "chart.png"}
    assert loaded.manifest() == "It is the picture 'chart.png': PNG picture, 60 × 40 pixels."
    assert loaded.describe() == ["chart.png: PNG picture, 60 × 40 pixels"]


def test_pictures_beside_texts_are_values_by_name(tmp_path):
    (tmp_path / "notes.txt").write_text("the sales of May")
    (tmp_path / "chart.webp").write_bytes(FILES["lossy.webp"])
    loaded = load([tmp_path / "notes.txt", tmp_path / "chart.webp"])
    assert list(loaded.context) == ["chart.webp", "notes.txt"]
    assert loaded.context["chart.webp"]["kind"] == "webp"
    assert [each["name"] for each in pictures_in(loaded.context)] == ["chart.webp"]


def test_a_folder_of_pictures_is_loaded_and_icons_beside_code_are_left_out(tmp_path):
    for name in ("a.png", "a.jpg"):
        (tmp_path / name).write_bytes(FILES[name])
    assert sorted(load([tmp_path]).context) == ["a.jpg", "a.png"]
    (tmp_path / "code.py").write_text("print(1)")
    loaded = load([tmp_path])
    assert list(loaded.context) == ["code.py"]
    assert list(loaded.left_out.values()) == [["a.jpg", "a.png"]]
    assert "name them to load them" in loaded.warnings()[0]
    assert len(load([tmp_path, tmp_path / "a.png"]).context) == 2


def test_the_same_picture_is_stored_once(tmp_path):
    for name in ("one.png", "two.png"):
        (tmp_path / name).write_bytes(FILES["a.png"])
    loaded = load([tmp_path / "one.png", tmp_path / "two.png"])
    assert len(loaded.context) == 2
    assert len(loaded.pictures) == 1
    assert len(pictures_in(loaded.context)) == 1


def test_a_picture_that_is_too_large_is_scaled_down(tmp_path):
    (tmp_path / "wide.png").write_bytes(encoded("PNG", (9000, 300)))
    loaded = load([tmp_path / "wide.png"])
    assert (loaded.context["width"], loaded.context["height"]) == (2000, 67)
    assert "scaled down from 9,000 × 300" in loaded.describe()[0]
    (data,) = loaded.pictures.values()
    assert picture_from_bytes(data).digest == loaded.context["picture"]


def test_noise_of_many_bytes_becomes_a_jpeg_that_fits(tmp_path):
    pixels = random.Random(0).randbytes(1800 * 1200 * 3)
    noise = Image.frombytes("RGB", (1800, 1200), pixels)
    noise.save(tmp_path / "noise.png")
    value = load([tmp_path / "noise.png"]).context
    assert value["kind"] == "jpeg"
    assert value["bytes"] <= MAX_PICTURE_BYTES
    assert value["width"] <= MAX_SIDE


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("huge.png", png_header(60_000, 60_000), "60,000 × 60,000 pixels.*150,000,000 pixels"),
        ("empty.png", png_header(9000, 10), "cannot be scaled down"),
        ("cut.png", FILES["a.png"][:-30], "damaged or cut PNG.*save it again"),
        ("cut.jpg", FILES["a.jpg"][:-30], "damaged or cut JPEG"),
        ("none.png", png_header(0, 10), "no pixels"),
        ("loop.gif", b"GIF89a" + bytes(20), "is a GIF image"),
    ],
)
def test_a_picture_that_cannot_be_sent_is_one_sentence(tmp_path, name, data, error):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=error) as raised:
        load([tmp_path / name])
    assert "\n" not in str(raised.value)
    # Beside another source, it is a problem, and the other one is read.
    (tmp_path / "good.png").write_bytes(FILES["a.png"])
    loaded = load([str(tmp_path / "*.*g*")])
    assert [problem.name for problem in loaded.problems] == [name]
    assert "good.png" in loaded.context
