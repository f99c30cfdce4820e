"""Pages of PDFs as pictures: scans, and the function ``page_picture`` of a session."""

import contextlib
import io
import zlib

import pytest
from PIL import Image

import ramify
from ramify.errors import SourceError
from ramify.sources.load_sources import load
from ramify.store.folder_store import Store
from ramify.testing import ScriptedClient
from ramify.types.picture import picture_from_bytes, size_of
from tests.sources.test_pdf import make_pdf

pytest.importorskip("pypdfium2")


def write(folder, name, pages):
    path = folder / name
    path.write_bytes(make_pdf(pages))
    return path


def scan(folder, name="scan.pdf", num=2):
    """A PDF of pictures, as a scanner's program writes it."""
    pages = [Image.new("RGB", (850, 1100), (index * 60, 40, 200)) for index in range(num)]
    pages[0].save(folder / name, "PDF", save_all=True, append_images=pages[1:])
    return folder / name


def in_cell(code):
    return f"```repl\n{code}\n```"


def test_a_page_is_rendered_for_a_session_on_demand(tmp_path):
    loaded = load([write(tmp_path, "r.pdf", ["first", "second"])])
    assert loaded.context.startswith("--- page 1 ---")
    shot = loaded.tools["page_picture"](2, width=612)
    size = size_of(shot.data)
    assert (size.kind, size.width, size.height) == ("png", 612, 792)
    assert shot.name == "r.pdf, page 2"
    # The page shows its own text: other pages look different, and the same one the same.
    first = loaded.tools["page_picture"](1, width=612)
    assert picture_from_bytes(first.data).digest != picture_from_bytes(shot.data).digest
    assert loaded.tools["page_picture"](2, "r.pdf", 612) == shot


def test_a_session_shows_a_page_to_a_model_and_a_resumed_run_does_not_render_it_again(tmp_path):
    store, path = Store(tmp_path / "store"), write(tmp_path, "r.pdf", ["first", "second"])
    cell = in_cell(
        "shot = page_picture(2)\nFINAL([shot['name'], llm_query('What is on it?', images=[shot])])"
    )
    client = ScriptedClient([cell, "the word second"])
    with ramify.RLM(client, store=store) as rlm:
        loaded = load([path])
        result = rlm.completion(loaded, "?", direct=False)
        assert result.answer == ["r.pdf, page 2", "the word second"]
    path.unlink()
    with ramify.RLM(client, store=store, tools=loaded.tools) as rlm:
        again = rlm.replay(result.run_id)
    assert again.answer == result.answer
    system = client.requests[0].messages[0].content
    assert "`page_picture(page" in system
    assert "Pictures: a value such as" in system


def test_a_short_pdf_is_still_answered_by_one_direct_call(tmp_path):
    client = ScriptedClient(["two"])
    with ramify.RLM(client) as rlm:
        path = write(tmp_path, "r.pdf", ["first", "second"])
        assert rlm.completion(load([path]), "How many?").answer == "two"
    assert len(client.requests) == 1


def test_a_scan_that_was_named_is_shown_page_by_page_in_a_direct_call(tmp_path):
    client = ScriptedClient(["an invoice"])
    with ramify.RLM(client) as rlm:
        assert rlm.completion(load([scan(tmp_path)]), "What is it?").answer == "an invoice"
    (request,) = client.requests
    names = [picture.name for picture in request.messages[-1].pictures]
    assert names == ["scan.pdf, page 1", "scan.pdf, page 2"]


def test_a_long_scan_and_one_in_a_folder_say_how_to_look_at_them(tmp_path):
    long = load([scan(tmp_path, num=21)])
    assert long.context.startswith("'scan.pdf' has 21 pages and no text")
    assert size_of(long.tools["page_picture"](21, width=100).data).width == 100
    # Its text is short, and says nothing: only a session can look at the pages.
    client = ScriptedClient([in_cell("FINAL(page_picture(21)['name'])")])
    with ramify.RLM(client, store=Store(tmp_path / "store")) as rlm:
        result = rlm.completion(long, "?")
        assert result.answer == "scan.pdf, page 21"
    with ramify.RLM(client, store=Store(tmp_path / "store"), tools=long.tools) as rlm:
        assert rlm.replay(result.run_id).answer == "scan.pdf, page 21"
    (tmp_path / "store").rename(tmp_path.parent / "store")
    (tmp_path / "a.txt").write_text("text")
    loaded = load([tmp_path])
    assert "page_picture(number, 'scan.pdf')" in loaded.context["scan.pdf"]
    assert loaded.pictures == {}


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((3,), "r.pdf: page 3 does not exist: it has pages 1 to 2"),
        ((0,), "page 0 does not exist: it has pages 1 to 2"),
        ((1, "s.pdf"), "name one of the PDFs, such as r.pdf"),
        ((1, None, 5), "width is 5: give 100 to 4,000 pixels"),
        ((1, None, 10**9), "give 100 to 4,000 pixels"),
    ],
)
def test_what_cannot_be_rendered_is_one_sentence(tmp_path, args, error):
    page_picture = load([write(tmp_path, "r.pdf", ["first", "second"])]).tools["page_picture"]
    with pytest.raises(ValueError, match=error):
        page_picture(*args)


def test_a_file_that_changed_since_it_was_read_is_not_rendered(tmp_path):
    path = write(tmp_path, "r.pdf", ["first"])
    page_picture = load([path]).tools["page_picture"]
    path.write_bytes(make_pdf(["other"]))
    with pytest.raises(ValueError, match="it has changed since it was read"):
        page_picture(1)
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read again: No such file"):
        page_picture(1)


def test_a_page_of_any_size_stays_within_the_limits(tmp_path):
    data = make_pdf(["strip"]).replace(b"[0 0 612 792]", b"[0 0 2 14400]")
    (tmp_path / "strip.pdf").write_bytes(data)
    shot = load([tmp_path / "strip.pdf"]).tools["page_picture"](1)
    picture = picture_from_bytes(shot.data)  # would raise
    assert picture.height <= 8000


def test_a_picture_of_a_page_that_is_a_bomb_ends_its_process_alone(tmp_path):
    """A page with a picture that states 40,000 × 40,000 pixels."""
    content = b"612 0 0 792 0 0 cm /I Do"
    packed = zlib.compress(bytes(1000))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /XObject << /I 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /XObject /Subtype /Image /Width 40000 /Height 40000 /ColorSpace /DeviceRGB "
        b"/BitsPerComponent 8 /Filter /FlateDecode /Length %d >>\nstream\n%s\nendstream"
        % (len(packed), packed),
    ]
    file, offsets = io.BytesIO(b"%PDF-1.4\n"), []
    file.seek(0, 2)
    for number, body in enumerate(objects, 1):
        offsets.append(file.tell())
        file.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = file.tell()
    file.write(b"xref\n0 6\n0000000000 65535 f \n")
    file.write(b"".join(b"%010d 00000 n \n" % offset for offset in offsets))
    file.write(b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start)
    (tmp_path / "bomb.pdf").write_bytes(file.getvalue())
    # The renderer may refuse the picture, or draw a part of it. Neither harms this process.
    with contextlib.suppress(SourceError):
        assert load([tmp_path / "bomb.pdf"]).pictures
    assert load([write(tmp_path, "r.pdf", ["good"])]).tools["page_picture"](1).data
