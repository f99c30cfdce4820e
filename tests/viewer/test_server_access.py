"""Access to the viewer's server: tokens, hosts, paths, and what its responses allow a page."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import aiohttp

from ramify import Store
from ramify.http_server.access import ListenAddress
from ramify.store.reviews import HumanRunReview
from ramify.viewer.page_headers import POLICY
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.view_server import STATIC, ViewServer
from tests.data.golden import JOURNAL
from tests.viewer.conftest import World
from tests.viewer.requests import Get, session, with_server


def test_token_in_url_is_exchanged_for_cookie() -> None:
    async def main() -> None:
        async with ViewServer(
            RunCatalog([JOURNAL]), address=ListenAddress("0.0.0.0"), token="s3cret/+"
        ) as server:
            base = f"http://127.0.0.1:{server.port}"
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http:
                for path in ("/", "/api/runs", "/static/main.js", "/?token=wrong"):
                    async with http.get(base + path) as response:
                        assert response.status == 401
                        assert "s3cret" not in await response.text()
                async with http.get(
                    server.url.replace("0.0.0.0", "127.0.0.1"), allow_redirects=False
                ) as response:
                    assert (response.status, response.headers["Location"]) == (303, "/")
                    assert "HttpOnly" in response.headers["Set-Cookie"]
                    assert "SameSite=Lax" in response.headers["Set-Cookie"]
                async with http.get(f"{base}/api/runs") as response:
                    assert response.status == 200
            bearer = {"Authorization": "Bearer s3cret/+"}
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"{base}/api/runs", headers=bearer) as response,
            ):
                assert response.status == 200

    asyncio.run(main())


def test_paths_outside_served_folders_are_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_bytes(JOURNAL.read_bytes())
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "run.jsonl").write_bytes(JOURNAL.read_bytes())
    (tmp_path / "shown" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")

    async def ask(get: Get, server: ViewServer) -> None:
        for key in (
            "p0/../secret.jsonl",
            f"p0/{tmp_path}/secret.jsonl",
            "p0/link.jsonl",
            "p9/run.jsonl",
            "../secret",
        ):
            for path in ("/api/run", "/api/journal", "/api/events"):
                error = (await get(path, key=key))["error"]["message"]
                name = key.partition("/")[2] if key.startswith("p0/") else key
                unknown = f"unknown run '{key}': choose one from the list"
                assert error == unknown if key.startswith("p9/") else error.endswith(f"'{name}'")
                assert key.startswith("p9/") or "/shown has no " in error
        async with session(server) as http:
            for path in (
                "/static/../server.py",
                "/static/%2e%2e/server.py",
                "/static/..%2fserver.py",
                "/static/%00",
                "/static/" + "x" * 300,
                "/static/%ff",
            ):
                async with http.get(f"http://127.0.0.1:{server.port}{path}") as response:
                    assert response.status == 404, path

    with_server([tmp_path / "shown"], ask)


def test_files_that_are_not_runs_are_not_served(tmp_path: Path) -> None:
    files = {
        ".env": "OPENAI_API_KEY=sk-secret\n",
        "config.json": '{"key": "sk-secret"}\n',
        "notes.jsonl": '["sk-secret"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    async def ask(_: Get, server: ViewServer) -> None:
        async with session(server) as http:
            for key in [f"p0/{name}{line}" for name in files for line in ("", ":1")] + ["p0/"]:
                for path in ("run", "journal", "texts", "call", "search", "evaluation", "training"):
                    query = {"key": key, "id": "0", "q": "sk-"}
                    async with http.get(
                        f"http://127.0.0.1:{server.port}/api/{path}", params=query
                    ) as response:
                        assert "sk-secret" not in await response.text()
                        assert path != "journal" or response.status == 404

    with_server([tmp_path], ask)


def test_every_response_has_content_security_policy(world: World) -> None:
    async def ask(_: Get, server: ViewServer) -> None:
        async with session(server) as http:
            for path in ("/", "/static/app.js", "/api/runs", "/nothing"):
                async with http.get(f"http://127.0.0.1:{server.port}{path}") as response:
                    assert response.headers["Content-Security-Policy"] == POLICY
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
            async with http.get(
                f"http://127.0.0.1:{server.port}/api/journal", params={"key": world.tree}
            ) as response:
                assert (
                    await response.read()
                    == (world.store / "runs" / f"{world.tree}.jsonl").read_bytes()
                )
                assert response.headers["Content-Disposition"].startswith("attachment")

    with_server([world.store], ask)


def test_review_needs_private_page_and_same_origin(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.store, tmp_path / "store")
    body = {"key": world.tree, "labels": ["odd"], "rewards": {"correct": 1.0}}

    async def post(is_open: bool, wanted: Any, **headers: str) -> tuple[int, Any]:
        address = ListenAddress(is_open=is_open)
        async with (
            ViewServer(RunCatalog([tmp_path / "store"]), address=address) as server,
            session(server) as http,
            http.post(
                f"http://127.0.0.1:{server.port}/api/review", json=wanted, headers=headers
            ) as response,
        ):
            return response.status, await response.json()

    def status(*given: Any, **headers: str) -> int:
        return asyncio.run(post(*given, **headers))[0]

    assert status(True, body) == 403
    assert status(False, body, Origin="http://evil.example") == 403
    assert status(False, body | {"labels": ["x" * 61]}) == 400
    assert status(False, body | {"key": "p7/none"}) == 404
    assert status(False, {"labels": []}) == 400
    assert Store(tmp_path / "store").review(world.tree).labels == ()
    assert asyncio.run(post(False, body))[1]["rewards"] == {"correct": 1.0}
    assert Store(tmp_path / "store").review(world.tree).labels == ("odd",)


def test_verdicts_of_many_runs_are_saved_at_once(world: World, tmp_path: Path) -> None:
    """Each keeps what was there: another person's verdict, labels and note."""
    store = Store(shutil.copytree(world.store, tmp_path / "store"))
    store.write_review(world.plain, HumanRunReview(("odd",), "n", verdicts={"ben": "wrong"}))

    async def post(path: str, wanted: Any) -> tuple[int, Any]:
        async with (
            ViewServer(RunCatalog([store.root])) as server,
            session(server) as http,
            http.post(f"http://127.0.0.1:{server.port}{path}", json=wanted) as response,
        ):
            return response.status, await response.json()

    def say(**wanted: Any) -> tuple[int, Any]:
        return asyncio.run(post("/api/verdict", wanted))

    both = [world.tree, world.plain]
    assert say(keys=both, verdict="perhaps")[0] == 400
    assert say(keys=[], verdict="right")[0] == 400
    assert say(keys=["p7/none"], verdict="right")[0] == 404
    status, answer = say(keys=both, verdict="right", person="ana")
    assert (status, answer["person"]) == (200, "ana")
    assert [answer["reviews"][run]["verdict"] for run in both] == ["right", "disputed"]
    kept = store.review(world.plain)
    assert (kept.labels, kept.note, kept.rewards) == (("odd",), "n", {})
    assert kept.verdicts == {"ben": "wrong", "ana": "right"}
    assert store.review(world.tree).rewards == {"correct": 1.0}
    say(keys=[world.tree], note="look again")
    assert store.review(world.tree).note == "look again"
    say(keys=[world.tree], verdict="none", person="ana", note="")
    assert store.review(world.tree).is_empty()
    form = {"key": world.plain, "labels": ["even"]}
    assert asyncio.run(post("/api/review", form))[1]["verdicts"] == kept.verdicts


def test_no_script_builds_html_from_strings() -> None:
    ours = list(STATIC.glob("*.js"))
    assert len(ours) > 10
    sinks = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc|ContextualFragment"
    )
    assert {path.name: found for path in ours if (found := sinks.findall(path.read_text()))} == {}


def test_vendored_scripts_have_licences() -> None:
    vendored = STATIC / "vendor"
    assert {path.stem.split("-")[0] for path in vendored.glob("*.js")} == {
        path.stem for path in vendored.glob("*.LICENSE")
    }
