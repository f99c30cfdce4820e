"""The HTTP shell, with an application of one route: keys, names, origins, heads, bodies, and sockets.
All front ends stand behind this shell."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ramify.errors import ConfigError, StoreError
from ramify.http_server.access import AcceptedApiKeys, ListenAddress, digest_of
from ramify.http_server.base_server import CALLER, AiohttpServer, receive_body
from ramify.http_server.http_limits import HttpLimits

KEY = {"Authorization": "Bearer right"}


async def echo(http: web.Request) -> web.Response:
    async with receive_body(http) as body:
        return web.json_response({"bytes": len(body), "caller": http[CALLER]})


async def fail(http: web.Request) -> web.Response:
    if "store" in http.query:
        raise StoreError("no such run")
    raise KeyError("a bug")


@asynccontextmanager
async def shell(
    address: ListenAddress | None = None, **options: Any
) -> AsyncIterator[AiohttpServer]:
    app = web.Application()
    app.router.add_post("/v1/echo", echo)
    app.router.add_get("/v1/fail", fail)
    app.router.add_get("/health", echo)
    address = address or ListenAddress()
    keys = {"a": digest_of("right"), "b": digest_of("other")}
    options = {
        "keys": AcceptedApiKeys(keys) if address.needs_key else None,
        "public": ("/health",),
        "statuses": {StoreError: 404},
        **options,
    }
    server = AiohttpServer(address, **options)
    await server.start(app)
    try:
        yield server
    finally:
        await server.close()


async def raw(server: AiohttpServer, *parts: bytes) -> bytes:
    """Send ``parts`` over one connection, and return all that the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


def records(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Texts of all records of Ramify and of aiohttp, at any level."""
    ours = [each for each in caplog.records if each.name.split(".")[0] in ("ramify", "aiohttp")]
    return [each.getMessage().partition(" at http")[0] for each in ours]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 100))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "status", "code", "says"),
    [
        (KEY, 200, None, ""),
        ({"Authorization": "bearer other"}, 200, None, ""),
        ({}, 401, "missing_key", "no API key: send the server's key as Authorization: Bearer KEY"),
        ({"Authorization": "Bearer wrong"}, 401, "wrong_key", "wrong API key: send the server's"),
        ({"Authorization": "Basic right"}, 401, "missing_key", "no API key"),
        (KEY | {"Host": "evil.example"}, 403, "wrong_host", "'evil.example' is not this machine"),
        (KEY | {"Host": "localhost:1"}, 200, None, ""),
        (KEY | {"Host": "[::1]:1"}, 200, None, ""),
        (KEY | {"Host": "127.0.0.1.evil.example"}, 403, "wrong_host", "is not this machine"),
        (KEY | {"Origin": "http://evil.example"}, 403, "wrong_origin", "may not use this server"),
        (KEY | {"Origin": "null"}, 403, "wrong_origin", "'null' may not use"),
        (KEY | {"Origin": "http://[evil"}, 403, "wrong_origin", "may not use"),
        (KEY | {"Content-Type": "text/plain"}, 415, None, "send it as application/json"),
        (KEY | {"Content-Encoding": "gzip"}, 415, None, "without Content-Encoding"),
    ],
)
def test_rejections_are_one_line_that_says_what_to_do(
    headers: dict[str, str],
    status: int,
    code: str | None,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with shell() as server, aiohttp.ClientSession() as http:
            for _ in range(20):
                async with http.post(
                    f"{server.url}/v1/echo",
                    data=b"{}",
                    headers={"Content-Type": "application/json"} | headers,
                ) as answer:
                    body = await answer.json()
                    assert answer.status == status, body
                    if status != 200:
                        assert (body["error"]["code"], "\n" in body["error"]["message"]) == (
                            code,
                            False,
                        )
                        assert says in body["error"]["message"]
            assert records(caplog) == []
            assert dict(server.num_rejected) == ({code: 20} if code else {})

    with caplog.at_level(logging.DEBUG):
        run(test)
    assert records(caplog) == ([f"requests rejected: 20 {code}"] if code else [])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n", 200),
        (b"GET /v1/fail HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n", 401),
        (b"GET /v1/fail HTTP/1.1\r\nHost: \xff\r\nAuthorization: Bearer right\r\n\r\n", 403),
        (b"GET /v1/fail HTTP/1.1\r\nHost: localhost\r\nOrigin: \xff\r\n\r\n", 403),
        (
            b"GET /%ED%A0%80\xff HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n\r\n",
            0,
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/9\r\n\r\n", 400),
        (b"GET /v1/fail HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000, 400),
        (b"GET /v1/fail HTTP/1.1\r\nHost: localhost" + b"\r\nX: y" * 20_000, 400),
    ],
)
def test_strange_heads_get_an_error_without_a_record(
    sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with shell() as server:
            head, _, body = (
                await raw(server, sent.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            ).partition(b"\r\n\r\n")
            got = int(head.split()[1])
            assert 400 <= got < 500 if not status else got in (status, 431)
            if got != 200:
                assert "message" in json.loads(body)["error"]
            assert records(caplog) == []

    with caplog.at_level(logging.DEBUG):
        run(test)


def test_errors_of_routes_have_one_format(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with shell() as server, aiohttp.ClientSession(headers=KEY) as http:
            for path, status, says in (
                ("/v1/fail?store=1", 404, "no such run"),
                ("/v1/fail", 500, "internal error: KeyError"),
                ("/v1/nothing", 404, "GET /v1/nothing: Not Found"),
                ("/nothing", 404, f"the base URL is {server.url}/v1"),
                ("/v1/echo", 405, "Method Not Allowed"),
            ):
                async with http.get(f"{server.url}{path}") as answer:
                    assert (answer.status, says in (await answer.json())["error"]["message"]) == (
                        status,
                        True,
                    )

    run(test)
    assert caplog.text.count("failed: KeyError") == 1


def test_half_heads_are_closed_and_delay_nobody() -> None:
    async def test() -> None:
        async with shell(limits=HttpLimits(head_s=0.3)) as server:
            half = [
                asyncio.create_task(raw(server, b"POST /v1/echo HTTP/1.1\r\nHost: loc"))
                for _ in range(50)
            ]
            async with (
                aiohttp.ClientSession(headers=KEY) as http,
                http.post(f"{server.url}/v1/echo", json={}) as answer,
            ):
                assert answer.status == 200
            assert set(await asyncio.gather(*half)) == {b""}

    run(test)


def test_connections_beyond_the_maximum_wait_and_are_answered() -> None:
    """Those that send nothing make room for those that ask."""

    async def test() -> None:
        async with shell(limits=HttpLimits(max_connections=8)) as server:
            silent = [asyncio.create_task(raw(server)) for _ in range(8)]
            while len(server.connections.all) < 8:
                await asyncio.sleep(0.01)
            async with aiohttp.ClientSession(headers=KEY) as http:

                async def ask() -> int:
                    async with http.post(f"{server.url}/v1/echo", json={}) as answer:
                        return answer.status

                assert await asyncio.gather(*(ask() for _ in range(40))) == [200] * 40
            assert len(server.connections.all) <= 8
            for each in silent:
                each.cancel()
            await asyncio.gather(*silent, return_exceptions=True)

    run(test)


def test_bodies_are_bounded_for_each_key_and_in_all() -> None:
    async def begin(server: AiohttpServer, key: str, length: int) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            f"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        await writer.drain()
        return reader, writer

    async def status(key: str, length: int, server: AiohttpServer) -> int:
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{server.url}/v1/echo",
                data=b"x" * length,
                headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            ) as answer,
        ):
            return answer.status

    async def test() -> None:
        async with shell(limits=HttpLimits(max_body_bytes=1_000_000)) as server:
            assert await status("right", 1_000_001, server) == 413
            _, unfinished = await begin(server, "right", 900_000)
            while not server.uploads.reserved:
                await asyncio.sleep(0.01)
            assert await status("right", 200_000, server) == 429, "the key has too much in flight"
            assert await status("right", 60_000, server) == 200, "small bodies pass"
            assert await status("other", 400_000, server) == 200
            assert await status("other", 700_000, server) == 429, "all keys have too much"
            unfinished.close()
            while server.uploads.reserved:
                await asyncio.sleep(0.01)
            assert await status("other", 1_000_000, server) == 200

    run(test)


def test_unfinished_body_ends_with_408() -> None:
    async def test() -> None:
        async with shell(limits=HttpLimits(stall_s=0.2)) as server:
            answer = await raw(
                server,
                b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n"
                b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
            )
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the body stopped after 1 bytes" in answer

    run(test)


def test_unix_socket_in_private_folder_needs_no_key(tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "x.sock"

    async def test() -> None:
        async with shell(ListenAddress(socket=path)) as server:
            assert path.parent.stat().st_mode & 0o777 == 0o700
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
                for host, status in (("localhost", 200), ("evil.example", 403)):
                    async with http.post(
                        f"{server.url}/v1/echo", json={}, headers={"Host": host}
                    ) as answer:
                        assert answer.status == status
            with pytest.raises(ConfigError, match="another server listens on"):
                async with shell(ListenAddress(socket=path)):
                    pass
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(os.fspath(path))
        async with shell(ListenAddress(socket=path)):
            pass
        path.parent.chmod(0o755)
        with pytest.raises(ConfigError, match="can be entered by other users: run chmod 700"):
            async with shell(ListenAddress(socket=path)):
                pass

    run(test)


def test_address_of_this_machine_alone_can_be_open() -> None:
    async def test() -> None:
        async with (
            shell(ListenAddress(is_open=True)) as server,
            aiohttp.ClientSession() as http,
            http.post(f"{server.url}/v1/echo", json={}) as answer,
        ):
            assert (await answer.json())["caller"] == ""

    run(test)
    for address in ({"host": "0.0.0.0"}, {"host": "example.org"}, {"socket": Path("x")}):
        with pytest.raises(ConfigError, match="cannot be used with --open-to-this-machine"):
            ListenAddress(**address, is_open=True)  # type: ignore[arg-type]
