"""Pictures beside the calls that showed them to a model: their bytes by HTTP, and on the page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import ramify
from ramify.sources.load_sources import load
from ramify.types.picture import picture_from_bytes
from ramify.viewer.view_server import ViewServer
from tests.viewer.browser import photograph, served, tab
from tests.viewer.requests import Get, session, with_server


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (120, 80), color).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")
CELL = "```repl\nFINAL(llm_query('Which?', images=[context['red.png']]))\n```"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(store, id of a run whose call 0.0 has shown one of two pictures)."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, data in (("red.png", RED), ("blue.png", BLUE)):
        (folder / name).write_bytes(data)
    client = ramify.ScriptedClient([CELL, "the red one"])
    with ramify.RLM(client, store=ramify.Store(folder / "store")) as rlm:
        result = rlm.completion(load([folder]), "Which one?", direct=False)
    return folder / "store", result.run_id


def test_a_call_names_its_pictures_and_the_server_sends_their_bytes(run: tuple[Path, str]) -> None:
    store, id = run
    digest = picture_from_bytes(RED).digest

    async def ask(get: Get, server: ViewServer) -> Any:
        call = await get("/api/call", key=id, id="0.0")
        url = f"http://127.0.0.1:{server.port}/api/picture"
        async with session(server) as http:
            answers = []
            for query in (
                {"id": "0.0", "digest": digest},
                {
                    "id": "0.0",
                    "digest": picture_from_bytes(BLUE).digest,
                },  # in the store, but not shown
                {"id": "0", "digest": digest},
                {"id": "0.0", "digest": "../../runs"},
            ):
                async with http.get(url, params={"key": id, **query}) as response:
                    answers.append((response.status, response.content_type, await response.read()))
        async with session(ViewServerWithout(server)) as http, http.get(url) as response:
            denied = response.status
        return call, answers, denied

    call, answers, denied = with_server([store], ask)
    (message,) = [each for each in call["turns"][0]["prompt"] if each.get("pictures")]
    assert message["pictures"] == [
        {
            "digest": digest,
            "name": "red.png",
            "about": f"PNG picture, 120 × 80 pixels, {len(RED)} bytes",
            "width": 120,
            "height": 80,
        }
    ]
    assert answers[0] == (200, "image/png", RED)
    assert [status for status, *_ in answers[1:]] == [404, 404, 404]
    assert denied in (401, 403)


class ViewServerWithout:
    """A server's address without its token."""

    token = "wrong"

    def __init__(self, server: ViewServer) -> None:
        self.port = server.port


def test_a_damaged_blob_is_not_sent(run: tuple[Path, str], tmp_path: Path) -> None:
    store, id = run
    digest = picture_from_bytes(RED).digest
    (path,) = (store / "blobs").rglob(digest)
    path.chmod(0o600)
    path.write_bytes(BLUE)
    try:
        found = with_server(
            [store],
            lambda get, _: get("/api/picture", key=id, id="0.0", digest=digest),
        )
    finally:
        path.write_bytes(RED)
    assert "is damaged in the store" in str(found)


def test_the_page_shows_the_picture_beside_the_call(
    browser: Any, run: tuple[Path, str], tmp_path: Path
) -> None:
    store, id = run
    with served(store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{id}/call/0.0")
        image = page.locator(".sent-picture img")
        image.wait_for()
        page.wait_for_function("document.querySelector('.sent-picture img').naturalWidth === 120")
        assert image.get_attribute("alt") == "red.png"
        assert (
            page.locator(".sent-picture figcaption").inner_text().startswith("red.png: PNG picture")
        )
        photograph(page, "picture", tmp_path)
