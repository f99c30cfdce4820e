"""Documents: whether text, tables and places arrive complete, what bad ones do, and the core.

    python benchmarks/inputs.py --part documents

Each document is written by a tool of its format, with numbered facts in headings, paragraphs and
cells of tables, each in a part whose place is known. A fact counts if it is in the text once, and
its line is in that place. The tools are among the extra ``dev``.
"""

from __future__ import annotations

import io
import json
import mailbox
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from pathlib import Path

from figures import Figure

from ramify.sources.document_parts import place_at_line
from ramify.sources.load_sources import load
from ramify.sources.loaded_sources import LoadedContext

NUM_PARTS = 40
_LIBRARIES = (
    "duckdb pyarrow openpyxl pypdf markitdown mammoth bs4 lxml pptx odfdo oxmsg py7zr onnxruntime"
)


def figures(quick: bool) -> Iterator[Figure]:
    num_parts = NUM_PARTS // 4 if quick else NUM_PARTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, write in WRITERS.items():
            path = folder / f"facts.{kind}"
            place = write(path, num_parts)
            started = time.perf_counter()
            share = _share(load([path]), num_parts, place)
            yield Figure(
                f"facts of {num_parts} parts that arrive at their place: {kind}",
                share,
                "of all",
                {"time to read": f"{time.perf_counter() - started:.2f} s"},
                least=1.0,
            )
        yield Figure("the same in zip, tar.zst and 7z", _in_archives(folder), "of all", {}, least=1)
        yield _bad(folder / "bad")
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, ramify; print(len(set({_LIBRARIES.split()}) & set(sys.modules)))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    yield Figure(
        "libraries of inputs that import ramify loads", int(loaded.stdout), "modules", {}, floor=0
    )


# --- facts


def _facts(part: int) -> tuple[str, str, str, str]:
    """Heading, paragraph and two cells of a part."""
    return f"Topic {part:04}h", f"Fact {part:04}p.", f"left {part:04}l", f"right {part:04}r"


def _share(loaded: LoadedContext, num_parts: int, place: Callable[[int], str]) -> float:
    """Share of the facts that are in the text once, at the place of their part."""
    text, (item,) = str(loaded.context), loaded.items
    lines, good = text.split("\n"), 0
    for part in range(1, num_parts + 1):
        for fact in _facts(part):
            at = [number for number, line in enumerate(lines, 1) if fact in line]
            found = place_at_line(item.places, at[0]) if len(at) == 1 else ""
            good += place(part) in found and bool(found)
    return good / (4 * num_parts)


def _heading(part: int) -> str:
    return _facts(part)[0]


def _html(part: int) -> str:
    heading, fact, left, right = _facts(part)
    return f"<h2>{heading}</h2><p>{fact}</p><table><tr><td>{left}</td><td>{right}</td></tr></table>"


# --- writers: each writes a document and returns the place of a part


def _docx(path: Path, num_parts: int) -> Callable[[int], str]:
    import docx

    document = docx.Document()
    for part in range(1, num_parts + 1):
        heading, fact, left, right = _facts(part)
        document.add_heading(heading, 1)
        document.add_paragraph(fact)
        table = document.add_table(rows=1, cols=2)
        table.cell(0, 0).text, table.cell(0, 1).text = left, right
    document.save(path)
    return _heading


def _pptx(path: Path, num_parts: int) -> Callable[[int], str]:
    import pptx
    from pptx.util import Inches

    deck = pptx.Presentation()
    for part in range(1, num_parts + 1):
        heading, fact, left, right = _facts(part)
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = heading, fact
        size = Inches(1), Inches(6), Inches(4), Inches(1)
        table = slide.shapes.add_table(1, 2, *size).table
        table.cell(0, 0).text, table.cell(0, 1).text = left, right
    deck.save(path)
    return "slide {},".format


def _xlsx(path: Path, num_parts: int) -> Callable[[int], str]:
    import openpyxl

    book = openpyxl.Workbook()
    book.remove(book.active)
    for part in range(1, num_parts + 1):
        sheet = book.create_sheet(f"S{part:04}")
        for row in zip(_facts(part)[::2], _facts(part)[1::2], strict=True):
            sheet.append(row)
    book.save(path)
    return "sheet S{:04}".format


def _odt(path: Path, num_parts: int) -> Callable[[int], str]:
    import odfdo

    document = odfdo.Document("text")
    document.body.clear()
    for part in range(1, num_parts + 1):
        heading, fact, left, right = _facts(part)
        table = odfdo.Table(f"T{part}", width=2, height=1)
        table.set_value("A1", left)
        table.set_value("B1", right)
        for each in (odfdo.Header(1, heading), odfdo.Paragraph(fact), table):
            document.body.append(each)
    document.save(str(path))
    return _heading


def _page(path: Path, num_parts: int) -> Callable[[int], str]:
    path.write_text(f"<html><body>{''.join(map(_html, range(1, num_parts + 1)))}</body></html>")
    return _heading


def _epub(path: Path, num_parts: int) -> Callable[[int], str]:
    from ebooklib import epub

    book, chapters = epub.EpubBook(), []
    book.set_identifier("facts")
    book.set_title("Facts")
    for part in range(1, num_parts + 1):
        chapter = epub.EpubHtml(title=f"{part}", file_name=f"{part}.xhtml")
        chapter.content = f"<html><body>{_html(part)}</body></html>"
        book.add_item(chapter)
        chapters.append(chapter)
    book.add_item(epub.EpubNcx())
    book.add_item(epub.EpubNav())
    book.spine = chapters
    epub.write_epub(str(path), book)
    return "chapter {},".format


def _mbox(path: Path, num_parts: int) -> Callable[[int], str]:
    box = mailbox.mbox(path)
    for part in range(1, num_parts + 1):
        heading, *others = _facts(part)
        message = EmailMessage()
        message["Subject"] = f"message {part}"
        message.set_content("\n".join([heading, *others]))
        box.add(message)
    box.close()
    return "message {}:".format


def _ipynb(path: Path, num_parts: int) -> Callable[[int], str]:
    cells = []
    for part in range(1, num_parts + 1):
        heading, fact, left, right = _facts(part)
        output = {"output_type": "stream", "text": f"{left}\t{right}\n"}
        source = f"# {heading}\n# {fact}"
        cells.append({"cell_type": "code", "source": source, "outputs": [output]})
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    return "cell {}".format


def _pdf(path: Path, num_parts: int) -> Callable[[int], str]:
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate, Table

    styles, flow = getSampleStyleSheet(), []
    for part in range(1, num_parts + 1):
        heading, fact, left, right = _facts(part)
        flow += [Paragraph(heading, styles["Heading1"]), Paragraph(fact, styles["Normal"])]
        flow += [Table([[left, right]]), PageBreak()]
    SimpleDocTemplate(str(path)).build(flow)
    return "page {}".format


WRITERS = {
    "docx": _docx,
    "pptx": _pptx,
    "xlsx": _xlsx,
    "odt": _odt,
    "html": _page,
    "epub": _epub,
    "mbox": _mbox,
    "ipynb": _ipynb,
    "pdf": _pdf,
}


# --- archives and bad input


def _in_archives(folder: Path) -> float:
    """Share of documents whose text is the same from an archive."""
    import py7zr

    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    names = [f"facts.{kind}" for kind in WRITERS]
    archives = [folder / "all.zip", folder / "all.tar.zst", folder / "all.7z"]
    with zipfile.ZipFile(archives[0], "w") as zipped:
        for name in names:
            zipped.write(folder / name, name)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            tar.add(folder / name, name)
    archives[1].write_bytes(zstd.compress(packed.getvalue()))
    with py7zr.SevenZipFile(archives[2], "w") as seven:
        for name in names:
            seven.write(folder / name, name)
    good = 0
    for archive in archives:
        found = load([archive]).context
        assert isinstance(found, dict)
        good += sum(
            found.get(f"{archive.name}/{name}") == load([folder / name]).context for name in names
        )
    return good / (len(archives) * len(names))


def _bad(folder: Path) -> Figure:
    """Bad documents beside a good one: each must give one sentence."""
    folder.mkdir()
    ole = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)
    for name in ("encrypted.docx", "encrypted.pptx", "encrypted.xlsx", "old.doc"):
        (folder / name).write_bytes(ole)
    for kind, write in WRITERS.items():
        if kind in ("docx", "pptx", "xlsx", "odt", "epub", "pdf"):
            path = folder / f"damaged.{kind}"
            write(path, 4)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    for kind in ("docx", "pptx", "odt", "epub", "xlsx"):
        with zipfile.ZipFile(folder / f"other.{kind}", "w") as archive:
            archive.writestr("other.txt", "x")
    num_bad = len(list(folder.iterdir()))
    (folder / "good.txt").write_text("good")
    loaded = load([folder])
    is_read = loaded.context == {"good.txt": "good"}
    told = sum("\n" not in str(each) for each in loaded.problems) * is_read
    return Figure(
        "bad documents that give one sentence while the others are read",
        told / num_bad,
        f"of {num_bad}",
        {},
        least=1.0,
    )
