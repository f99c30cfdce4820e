"""Documents as text with places. Each file is written by a tool of its format."""

from __future__ import annotations

import io
import json
import mailbox
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path

import pytest

from ramify.errors import SourceError
from ramify.sources.load_sources import UnreadableSource, load

pytest.importorskip("markitdown")

ENCRYPTED_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)


def places(path: Path) -> list[tuple[int, str]]:
    (item,) = load([path]).items
    return [(place.line, place.name) for place in item.places]


def make_docx(path: Path) -> Path:
    import docx

    document = docx.Document()
    document.add_heading("Annual report", 0)
    document.add_heading("Revenue", 1)
    document.add_paragraph("Revenue was 12.")
    table = document.add_table(rows=2, cols=2)
    for index, text in enumerate(("Region", "Q1", "East | West", "12")):
        table.cell(index // 2, index % 2).text = text
    document.add_heading("Currency", 2)
    document.add_paragraph("first point", style="List Bullet")
    document.save(path)
    return path


def make_pptx(path: Path) -> Path:
    import pptx
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE
    from pptx.util import Inches

    deck = pptx.Presentation()
    for number in (1, 2):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text = f"Title {number}"
        slide.placeholders[1].text = f"body {number}\n<!-- Slide number: 9 -->\nend"
        slide.notes_slide.notes_text_frame.text = f"note {number}"
    size = [Inches(1), Inches(7), Inches(1), Inches(1)]
    table = deck.slides[0].shapes.add_table(1, 2, *size).table
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
    chart = CategoryChartData()
    chart.categories = ["East", "West"]
    chart.add_series("Q1", (19.2, 21.4))
    deck.slides[1].shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *size, chart)
    deck.save(path)
    return path


def make_odt(path: Path) -> Path:
    import odfdo

    document = odfdo.Document("text")
    document.body.clear()
    document.body.append(odfdo.Header(1, "Report"))
    document.body.append(odfdo.Paragraph("Revenue was 12."))
    table = odfdo.Table("Sales", width=2, height=1)
    table.set_value("A1", "left")
    table.set_value("B1", "right")
    document.body.append(table)
    document.body.append(odfdo.Header(2, "Risks"))
    document.save(str(path))
    return path


def make_epub(path: Path) -> Path:
    from ebooklib import epub

    book = epub.EpubBook()
    book.set_identifier("id")
    book.set_title("The Book")
    chapters = []
    for number in (1, 2):
        chapter = epub.EpubHtml(title=f"Part {number}", file_name=f"part {number}.xhtml")
        body = f"<p>text {number} &amp; more</p>" if number == 1 else "<h2>Second</h2><p>text 2</p>"
        chapter.content = (
            f"<html><head><title>Part {number}</title></head><body>{body}</body></html>"
        )
        book.add_item(chapter)
        chapters.append(chapter)
    book.toc = chapters
    book.add_item(epub.EpubNcx())
    book.add_item(epub.EpubNav())
    book.spine = ["nav", *chapters]
    epub.write_epub(str(path), book)
    return path


def make_message(subject: str = "Grüße", body: str | None = "Hello") -> EmailMessage:
    message = EmailMessage()
    message["From"], message["To"] = "Ann <ann@example.com>", "bob@example.com"
    message["Subject"], message["Date"] = subject, "Thu, 26 Nov 2026 10:00:00 +0000"
    if body is not None:
        message.set_content(body)
    return message


HEADERS = (
    "From: Ann <ann@example.com>\nTo: bob@example.com\n"
    "Date: Thu, 26 Nov 2026 10:00:00 +0000\nSubject: Grüße\n"
)


# --- text and places


def test_word_document_is_markdown_with_headings(tmp_path: Path):
    path = make_docx(tmp_path / "a.docx")
    loaded = load([path])
    assert loaded.context == (
        "# Annual report\n\n# Revenue\n\nRevenue was 12.\n\n|  |  |\n| --- | --- |\n| Region | Q1 |\n"
        "| East \\| West | 12 |\n\n## Currency\n\n* first point"
    )
    assert places(path) == [(1, "Annual report"), (3, "Revenue"), (12, "Revenue / Currency")]
    assert loaded.describe() == ["a.docx: Word document, 132 characters"]


def test_docx_comments_and_margins_of_pages_are_read_once(tmp_path: Path) -> None:
    import docx
    from docx.enum.section import WD_SECTION

    document = docx.Document()
    paragraph = document.add_paragraph("The price is 12 euros.")
    document.add_comment(paragraph.runs, "Not agreed yet", author="Ann", initials="A")
    for _ in range(2):
        section = document.add_section(WD_SECTION.NEW_PAGE)
        section.header.is_linked_to_previous = section.footer.is_linked_to_previous = False
        section.header.paragraphs[0].text = "Draft of 3 May"
        section.footer.paragraphs[0].text = "Page of a secret report"
    document.save(str(tmp_path / "a.docx"))
    assert load([tmp_path / "a.docx"]).context == (
        "The price is 12 euros.[[A1]](#comment-0)\n\n"
        "Comment [A1]\n:   Not agreed yet [↑](#comment-ref-0)\n"
        "--- headers and footers of pages ---\nDraft of 3 May\nPage of a secret report"
    )


def test_presentation_keeps_slides_tables_charts_and_notes(tmp_path: Path):
    path = make_pptx(tmp_path / "a.pptx")
    loaded = load([path])
    text = loaded.context
    assert isinstance(text, str)
    assert text.startswith("--- slide 1 ---\n# Title 1\n")
    assert "body 1\n<!-- Slide number: 9 -->\nend\n" in text
    first, second = text.split("--- slide 2 ---")
    assert "| left | right |" in first
    assert "### Notes:\nnote 1" in first
    assert "| East | 19.2 |\n| West | 21.4 |" in second
    assert [name for _, name in places(path)][:2] == ["slide 1", "slide 1, Title 1"]
    assert "presentation: 2 slides" in loaded.describe()[0]


def test_open_document_text_is_markdown_with_headings(tmp_path: Path):
    path = make_odt(tmp_path / "a.odt")
    text = load([path]).context
    assert isinstance(text, str)
    assert text.startswith("# Report\n\nRevenue was 12.\n\n| left | right |\n")
    assert [name for _, name in places(path)] == ["Report", "Report / Risks"]


def test_book_keeps_chapters(tmp_path: Path):
    path = make_epub(tmp_path / "a.epub")
    loaded = load([path])
    assert loaded.context == (
        "--- chapter 1: Part 1 ---\ntext 1 & more\n--- chapter 2 ---\n## Second\n\ntext 2"
    )
    assert places(path) == [(1, "chapter 1: Part 1"), (3, "chapter 2"), (4, "chapter 2, Second")]
    assert loaded.describe() == ["a.epub: book 'The Book': 2 chapters, 75 characters"]


def test_page_is_markdown_and_its_scripts_are_left_out(tmp_path: Path):
    path = tmp_path / "a.html"
    path.write_text(
        "<html><head><title>T</title><script>bad()</script></head><body><h1>Größe</h1>"
        "<table><tr><th>a|b</th></tr><tr><td>1</td></tr></table></body></html>",
        encoding="utf-8",
    )
    assert load([path]).context == "# Größe\n\n| a\\|b |\n| --- |\n| 1 |"
    assert load(["-"], stdin=io.BytesIO(path.read_bytes())).context == load([path]).context
    other = '<meta charset="windows-1251"><p>Привет, мир</p>'
    path.write_bytes(other.encode("windows-1251"))
    assert load([path]).context == "Привет, мир"
    path.write_text("<script>render()</script>", encoding="utf-8")
    loaded = load([path])
    assert loaded.context == "<script>render()</script>"
    assert loaded.items[0].detail == "markup of a page, because it is a page without text"


def test_notebook_keeps_outputs(tmp_path: Path):
    image = {"output_type": "display_data", "data": {"image/png": "AAAA"}, "metadata": {}}
    result = {"output_type": "execute_result", "data": {"text/plain": ["4", "2"]}}
    trace = {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["\x1b[31mE: v"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "f()", "outputs": [result, image, trace]},
    ]
    notebook = {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4}
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook))
    loaded = load([path])
    assert loaded.context == (
        "--- cell 1 ---\n# Title\ntext\n--- cell 2 ---\n```python\nf()\n```\n\n"
        "Output:\n```\n42\n```\n\nOutput:\n```\nE: v\n```"
    )
    assert places(path) == [(1, "cell 1"), (2, "cell 1, Title"), (4, "cell 2")]
    assert loaded.items[0].detail == "notebook: 2 cells; 1 outputs without text left out"
    path.write_text('{"worksheets": []}')
    assert load([path]).context == '{"worksheets": []}'


# --- e-mail


def test_message_is_its_headers_and_text_and_attachments_are_read_as_their_kind(tmp_path: Path):
    message = make_message()
    message.add_alternative("<h1>Hello</h1>", subtype="html")
    message.add_attachment(b"a,b\n1,2\n", maintype="text", subtype="csv", filename="../t.csv")
    forwarded = make_message("Inner", "older")
    message.add_attachment(forwarded)
    path = tmp_path / "a.eml"
    path.write_bytes(bytes(message))
    loaded = load([path])
    assert isinstance(loaded.context, dict)
    assert loaded.context["a.eml"] == f"{HEADERS}Attachments: ../t.csv, Inner.eml\n\nHello"
    assert loaded.context["a.eml/t.csv"] == "a,b\n1,2\n"
    assert loaded.context["a.eml/Inner.eml"].endswith("Subject: Inner\n\nolder")
    assert [table["file"] for table in loaded.tools["tables"]] == ["a.eml/t.csv"]


def test_message_with_html_alone_is_markdown(tmp_path: Path):
    message = make_message(body=None)
    message.set_content("<p>Hello <b>you</b></p>", subtype="html")
    (tmp_path / "a.eml").write_bytes(bytes(message))
    assert load([tmp_path / "a.eml"]).context == f"{HEADERS}\nHello **you**"


def test_damaged_message_is_read_as_far_as_possible(tmp_path: Path):
    path = tmp_path / "a.eml"
    path.write_bytes(
        b"From: =?utf-8?q?x?= <\nSubject: a\nContent-Type: text/plain; charset=unknown\n\nbody \xff"
    )
    text = load([path]).context
    assert isinstance(text, str)
    assert text.endswith("Subject: a\n\nbody \N{REPLACEMENT CHARACTER}")


def test_attachments_of_attachments_end(tmp_path: Path):
    message = make_message()
    for _ in range(5):
        outer = make_message()
        outer.add_attachment(message, filename="m.eml")
        message = outer
    (tmp_path / "a.eml").write_bytes(bytes(message))
    loaded = load([tmp_path / "a.eml"])
    assert len(loaded.items) == 4
    assert loaded.problems == [
        UnreadableSource(
            "a.eml/m.eml/m.eml/m.eml/m.eml",
            "is attached below 3 messages: save it and name it",
        )
    ]


def test_mailbox_keeps_messages(tmp_path: Path):
    box = mailbox.mbox(tmp_path / "a.mbox")
    box.add(make_message())
    second = make_message("Two", "From here on\nsecond")
    second.add_attachment(b"x", maintype="text", subtype="plain", filename="n.txt")
    box.add(second)
    box.close()
    loaded = load([tmp_path / "a.mbox"])
    assert isinstance(loaded.context, dict)
    assert loaded.context["a.mbox/message 2/n.txt"] == "x"
    lines = loaded.context["a.mbox"].split("\n")
    item = loaded.items[0]
    assert [(lines[each.line - 1], each.name) for each in item.places] == [
        ("--- message 1: Grüße ---", "message 1: Grüße"),
        ("--- message 2: Two ---", "message 2: Two"),
    ]
    assert item.detail == "mailbox: 2 messages, 1 attachment"
    assert "From here on\nsecond" in loaded.context["a.mbox"]


def test_outlook_message_and_its_attachment(tmp_path: Path):
    def stored(head: bytes, **texts: str) -> dict[str, bytes]:
        """The texts of an object by the numbers of their properties, and the list of them."""
        numbers = {int(name.removeprefix("p"), 16): text for name, text in texts.items()}
        listed = head
        for number, text in numbers.items():
            listed += struct.pack("<HHIII", 0x1F, number, 6, 2 * len(text) + 2, 0)
        return {"__properties_version1.0": listed} | {
            f"__substg1.0_{number:04X}001F": text.encode("utf-16-le")
            for number, text in numbers.items()
        }

    by_value = struct.pack("<HHIII", 3, 0x3705, 6, 1, 0)
    data = struct.pack("<HHIII", 0x102, 0x3701, 6, 8, 0)
    attachment = stored(bytes(8) + by_value + data, p3707="t.csv")
    tree = {
        **stored(
            bytes(32), p0037="Grüße", p1000="Hello\r\nBob", p0C1A="Ann", p0C1F="ann@example.com"
        ),
        "__recip_version1.0_#00000000": stored(bytes(8), p3001="Bob", p39FE="bob@example.com"),
        "__attach_version1.0_#00000000": {
            **attachment,
            "__substg1.0_37010102": b"a,b\n1,2\n",
        },
    }
    (tmp_path / "a.msg").write_bytes(compound_file(tree))
    loaded = load([tmp_path / "a.msg"])
    assert isinstance(loaded.context, dict)
    assert loaded.context == {
        "a.msg": "From: Ann <ann@example.com>\nTo: Bob <bob@example.com>\nSubject: Grüße\n"
        "Attachments: t.csv\n\nHello\nBob",
        "a.msg/t.csv": "a,b\n1,2\n",
    }


def compound_file(tree: dict[str, bytes | dict[str, bytes]]) -> bytes:
    """Write storages and streams as Outlook does: an OLE compound file of version 3, whose sectors
    have 512 bytes. All streams are short, so they are in the mini stream of 64-byte sectors."""
    free, end, none = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF
    entries: list[list[int | str]] = []  # name, kind, right sibling, child, start, size
    mini, mini_table = b"", []

    def add(
        name: str, content: bytes | dict[str, bytes] | dict[str, bytes | dict[str, bytes]]
    ) -> int:
        nonlocal mini
        number = len(entries)
        entry: list[int | str] = [name, 2 if isinstance(content, bytes) else 1, none, none, 0, 0]
        entries.append(entry)
        if isinstance(content, bytes):
            first, count = len(mini_table), -(-len(content) // 64)
            entry[4:] = [first if count else end, len(content)]
            mini += content.ljust(count * 64, b"\0")
            mini_table.extend([*range(first + 1, first + count), *([end] * bool(count))])
            return number
        # A tree that is a list: each entry is the right sibling of the one before.
        names = sorted(content, key=lambda each: (len(each), each.upper()))
        before = None
        for each in names:
            child = add(each, content[each])
            if before is None:
                entry[3] = child
            else:
                entries[before][2] = child
            before = child
        return number

    add("Root Entry", tree)
    entries[0][1] = 5
    sectors: list[bytes] = []

    def put(data: bytes, fill: bytes = b"\0") -> tuple[int, int]:
        first, count = len(sectors), max(1, -(-len(data) // 512))
        padded = data.ljust(count * 512, fill)
        sectors.extend(padded[at : at + 512] for at in range(0, len(padded), 512))
        return first, count

    chains = []
    mini_start, mini_count = put(mini)
    entries[0][4:] = [mini_start, len(mini)]
    chains.append((mini_start, mini_count))
    table_start, table_count = put(struct.pack(f"<{len(mini_table)}I", *mini_table), b"\xff")
    chains.append((table_start, table_count))
    directory = b""
    for name, kind, right, child, start, size in entries:
        encoded = f"{name}\0".encode("utf-16-le")
        directory += encoded.ljust(64, b"\0") + struct.pack("<HBB", len(encoded), kind, 1)
        directory += struct.pack("<III", none, right, child) + bytes(36)
        directory += struct.pack("<IQ", start, size)
    directory_start, directory_count = put(directory)
    chains.append((directory_start, directory_count))
    table = [free] * 128
    for first, count in chains:
        table[first : first + count] = [*range(first + 1, first + count), end]
    table[len(sectors)] = 0xFFFFFFFD
    fat_start, _ = put(struct.pack("<128I", *table))
    header = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    header += struct.pack("<HHHHH6x", 0x3E, 3, 0xFFFE, 9, 6)
    header += struct.pack(
        "<IIIIIIIIII", 0, 1, directory_start, 0, 4096, table_start, table_count, end, 0, fat_start
    )
    header = header.ljust(512, b"\xff")
    return header + b"".join(sectors)


# --- archives


def test_documents_in_zip_tar_zstd_and_7z(tmp_path: Path):
    import py7zr

    document = make_docx(tmp_path / "a.docx").read_bytes()
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("in/a.docx", document)
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "a.docx", "in/a.docx")
    packed = zstd_compress((tmp_path / "t.tar").read_bytes())
    (tmp_path / "t.tar.zst").write_bytes(packed)
    (tmp_path / "log.txt.zst").write_bytes(zstd_compress(b"line\n" * 3))
    with py7zr.SevenZipFile(tmp_path / "s.7z", "w") as seven:
        seven.writestr(document, "in/a.docx")
        seven.writestr("hidden", ".env")
        seven.writestr("text", "b.txt")
    text = load([tmp_path / "a.docx"]).context
    assert load([tmp_path / "z.zip"]).context == {"z.zip/in/a.docx": text}
    assert load([tmp_path / "t.tar"]).context == {"t.tar/in/a.docx": text}
    assert load([tmp_path / "t.tar.zst"]).context == {"t.tar.zst/in/a.docx": text}
    assert load([tmp_path / "log.txt.zst"]).context == "line\n" * 3
    loaded = load([tmp_path / "s.7z"])
    assert loaded.context == {"s.7z/b.txt": "text", "s.7z/in/a.docx": text}
    assert loaded.left_out == {"hidden": ["s.7z/.env"]}
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "a.docx", "log.txt.zst", "s.7z", "t.tar", "t.tar.zst", "z.zip",
    ]  # fmt: skip


def zstd_compress(data: bytes) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.compress(data)


# --- bad input


def damaged(path: Path) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


@pytest.mark.parametrize(
    ("make", "name"),
    [(make_docx, "d.docx"), (make_pptx, "d.pptx"), (make_odt, "d.odt"), (make_epub, "d.epub")],
)
def test_damaged_document_is_one_sentence_and_others_continue(
    tmp_path: Path, make: Callable[[Path], Path], name: str
):
    damaged(make(tmp_path / name))
    (tmp_path / "good.txt").write_text("good")
    loaded = load([tmp_path])
    assert loaded.context == {"good.txt": "good"}
    (problem,) = loaded.problems
    assert problem.name == name
    assert problem.reason.startswith("is a damaged ")
    with pytest.raises(SourceError, match="is a damaged "):
        load([tmp_path], strict=True)


def test_zip_without_a_document_is_one_sentence(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as archive:
        archive.writestr("other.txt", "x")
    with pytest.raises(SourceError, match=r"a\.docx is a Word document that cannot be read: \w+"):
        load([tmp_path / "a.docx"])


def test_encrypted_documents_are_one_sentence_each(tmp_path: Path):
    for name in ("a.docx", "b.pptx", "c.xlsx", "d.doc"):
        (tmp_path / name).write_bytes(ENCRYPTED_OFFICE)
    make_odt(tmp_path / "e.odt")
    with zipfile.ZipFile(tmp_path / "e.odt") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    entry = b'<manifest:encryption-data xmlns:manifest="m"/></manifest:manifest>'
    manifest = parts["META-INF/manifest.xml"].replace(b"</manifest:manifest>", entry)
    with zipfile.ZipFile(tmp_path / "e.odt", "w") as archive:
        for name, data in (parts | {"META-INF/manifest.xml": manifest}).items():
            archive.writestr(name, data)
    (tmp_path / "good.txt").write_text("good")
    assert load([tmp_path]).problems == [
        UnreadableSource("a.docx", "is an encrypted document: save it without a password"),
        UnreadableSource("b.pptx", "is an encrypted document: save it without a password"),
        UnreadableSource("c.xlsx", "is an encrypted workbook: save it without a password"),
        UnreadableSource("d.doc", "is an old Office document: save it as text or PDF"),
        UnreadableSource("e.odt", "is an encrypted document: save it without a password"),
    ]


def test_encrypted_7z_is_one_sentence(tmp_path: Path):
    import py7zr

    with py7zr.SevenZipFile(tmp_path / "s.7z", "w", password="secret") as archive:
        archive.writestr("x", "a.txt")
    with pytest.raises(SourceError, match=r"s\.7z is an encrypted archive: unpack it first"):
        load([tmp_path / "s.7z"])


@pytest.mark.parametrize("name", ["report", "report.zip", "report.pdf"])
def test_document_with_a_wrong_suffix_is_read_by_its_content(tmp_path: Path, name: str):
    make_docx(tmp_path / "a.docx").rename(tmp_path / name)
    loaded = load([tmp_path / name])
    assert isinstance(loaded.context, str)
    assert [item.kind for item in loaded.items] == ["docx"]


def test_macros_are_not_run(tmp_path: Path):
    make_docx(tmp_path / "a.docm")
    with zipfile.ZipFile(tmp_path / "a.docm", "a") as archive:
        archive.writestr("word/vbaProject.bin", b"\xd0\xcf\x11\xe0")
    (item,) = load([tmp_path / "a.docm"]).items
    assert item.detail == "Word document; its macros were not run"


def with_part(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, data in parts.items():
            archive.writestr(each, change(data) if each == name else data)


def test_document_that_unpacks_like_a_bomb_is_refused(tmp_path: Path):
    path = make_docx(tmp_path / "a.docx")
    with_part(path, "word/document.xml", lambda data: data + b" " * (80 << 20))
    with pytest.raises(SourceError, match="unpacks to over 250 times its size"):
        load([path])


@pytest.mark.parametrize(
    ("make", "name", "part"),
    [(make_docx, "a.docx", "word/document.xml"), (make_odt, "a.odt", "content.xml")],
)
def test_entities_of_xml_neither_grow_nor_read_files(
    tmp_path: Path, make: Callable[[Path], Path], name: str, part: str
):
    secret = tmp_path / "secret.txt"
    secret.write_text("TOP SECRET")
    path = make(tmp_path / name)
    laughs = "".join(f'<!ENTITY l{level} "{f"&l{level - 1};" * 10}">' for level in range(1, 10))
    entities = f'<!DOCTYPE x [<!ENTITY l0 "ha">{laughs}<!ENTITY f SYSTEM "file://{secret}">]>'

    def attacked(data: bytes) -> bytes:
        head, _, rest = data.partition(b"?>")
        body = rest if head.startswith(b"<?xml") else data
        start = head + b"?>" if head.startswith(b"<?xml") else b""
        return start + entities.encode() + body.replace(b"Revenue was 12", b"x &l9; &f; y")

    with_part(path, part, attacked)
    try:
        text = str(load([path], max_file_s=20).context)
    except SourceError as error:
        text = str(error)
    assert "TOP SECRET" not in text
    assert len(text) < 1_000_000


def test_deeply_nested_page_is_still_text(tmp_path: Path):
    (tmp_path / "a.html").write_text("<div>" * 5_000 + "deep" + "</div>" * 5_000)
    assert "deep" in str(load([tmp_path / "a.html"]).context)


def test_page_that_takes_too_long_is_its_markup(tmp_path: Path):
    markup = "<table>" + "<tr><td>cell|x</td></tr>" * 50_000
    (tmp_path / "a.html").write_text(markup)
    loaded = load([tmp_path / "a.html"], max_file_s=0.2)
    assert loaded.context == markup
    assert loaded.items[0].detail == (
        "markup of a page, because it is a page that takes more than 0.2 s to read"
    )


@pytest.mark.parametrize("name", ["a.docx", "a.odt", "a.msg"])
def test_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    for module in ("markitdown", "odfdo", "oxmsg"):
        monkeypatch.setitem(sys.modules, module, None)
    head = ENCRYPTED_OFFICE if name == "a.msg" else b"PK\x03\x04" + bytes(100)
    (tmp_path / name).write_bytes(head)
    with pytest.raises(SourceError, match=r"reading it needs pip install .*\[inputs\]'"):
        load([tmp_path / name])
    (tmp_path / "a.html").write_text("<p>x</p>")
    assert load([tmp_path / "a.html"]).context == "<p>x</p>"


def test_no_library_is_imported_before_a_document_is_read(tmp_path: Path):
    (tmp_path / "a.docx").write_bytes(ENCRYPTED_OFFICE)
    code = (
        "import sys; from ramify.sources.load_sources import load; load(['.'], strict=False)\n"
        "print([n for n in ('markitdown', 'bs4', 'lxml', 'odfdo', 'pypdf', 'onnxruntime') if n in sys.modules])"
    )
    (tmp_path / "b.txt").write_text("x")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_pages_are_converted_without_the_libraries_of_other_formats():
    """They would add a second of a processor to each process that converts documents."""
    code = (
        "import sys; from ramify.sources.office_documents import convert_html\n"
        "print(convert_html(b'<h1>Tide</h1><p>rises').text.split())\n"
        "print([n for n in ('onnxruntime', 'pandas') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['#', 'Tide', 'rises']", "[]"]
