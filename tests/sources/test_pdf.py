"""Text of PDFs by page, and PDFs without text."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from ramify.errors import SourceError
from ramify.sources.load_sources import load

pypdf = pytest.importorskip("pypdf")


def make_pdf(pages: list[str]) -> bytes:
    """The smallest PDF that shows one line of text on each page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    trailer = (
        f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    )
    return data + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()


def test_pages_are_separated_by_headings(tmp_path: Path):
    (tmp_path / "r.pdf").write_bytes(make_pdf(["first page", "second page"]))
    loaded = load([tmp_path / "r.pdf"])
    assert loaded.context == "--- page 1 ---\nfirst page\n--- page 2 ---\nsecond page"
    assert loaded.describe() == ["r.pdf: PDF: 2 pages, 52 characters"]


def test_pdf_is_recognised_by_content(tmp_path: Path):
    (tmp_path / "scan").write_bytes(make_pdf(["", ""]))
    (tmp_path / "noname").write_bytes(make_pdf(["hello"]))
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4\ngarbage")
    loaded = load([tmp_path])
    assert loaded.context == {
        "noname": "--- page 1 ---\nhello",
        "scan": "'scan' has 2 pages and no text: it may be a scan. page_picture(number, 'scan') "
        "returns the picture of a page.",
    }
    assert [problem.name for problem in loaded.problems] == ["broken.pdf"]


def test_broken_or_encrypted_pdf_is_an_error(tmp_path: Path):
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4\ngarbage")
    with pytest.raises(SourceError, match=r"broken\.pdf is a PDF that cannot be read: ") as caught:
        load([tmp_path / "broken.pdf"])
    assert "\n" not in str(caught.value)
    writer = pypdf.PdfWriter(io.BytesIO(make_pdf(["secret"])))
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    with pytest.raises(
        SourceError, match=r"locked\.pdf is an encrypted PDF: save it without a password"
    ):
        load([tmp_path / "locked.pdf"])


def test_slow_pdf_is_abandoned_at_time_limit(tmp_path: Path):
    """Half a million pieces of text on one page, which take a parser far longer than the time
    limit."""
    content = "BT /F1 12 Tf " + "1 0 0 1 72 700 Tm (x) Tj " * 500_000 + "ET"
    (tmp_path / "slow.pdf").write_bytes(
        make_pdf(["@"]).replace(b"BT /F1 12 Tf 72 700 Td (@) Tj ET", content.encode())
    )
    (tmp_path / "good.pdf").write_bytes(make_pdf(["hello"]))
    with pytest.raises(
        SourceError,
        match=r"slow\.pdf is a PDF that takes more than 0\.2 s to read: convert it to text",
    ):
        load([tmp_path / "slow.pdf"], max_file_s=0.2)
    loaded = load([tmp_path / "good.pdf"], max_file_s=30)
    assert loaded.context == "--- page 1 ---\nhello"


def test_missing_pypdf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (tmp_path / "r.pdf").write_bytes(make_pdf(["x"]))
    with pytest.raises(
        SourceError, match=r"r\.pdf is a PDF: reading it needs pip install .*\[inputs\]'"
    ):
        load([tmp_path / "r.pdf"])


def test_rows_of_a_table_stay_together_and_forms_and_rotated_text_are_read(tmp_path: Path):
    canvas = pytest.importorskip("reportlab.pdfgen.canvas").Canvas(str(tmp_path / "r.pdf"))
    for row, cells in enumerate((("Region", "Q1"), ("East region", "12"))):
        for column, cell in enumerate(cells):  # each cell is drawn by itself
            canvas.drawString(72 + 200 * column, 700 - 20 * row, cell)
    canvas.showPage()
    canvas.beginForm("form")
    canvas.drawString(72, 600, "inside a form")
    canvas.endForm()
    canvas.doForm("form")
    canvas.drawString(72, 700, "outside")
    canvas.showPage()
    canvas.rotate(90)
    canvas.drawString(100, -300, "rotated")
    canvas.save()
    loaded = load([tmp_path / "r.pdf"])
    table, form, rotated = str(loaded.context).split("\n--- page ")
    assert re.search(r"^Region {2,}Q1\nEast region {2,}12$", table, re.MULTILINE)
    assert "inside a form" in form
    assert "outside" in form
    assert "rotated" in rotated
    assert [place.name for place in loaded.items[0].places] == ["page 1", "page 2", "page 3"]
