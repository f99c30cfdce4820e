"""Sockets: proxies and certificate authorities from the environment, and lazy imports."""

import asyncio
import contextlib
import subprocess
import sys

import pytest

from ramify.clients.mock_http_server import MockHttpServer
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ConfigError, ModelError, Unreachable
from ramify.http_client.urls_and_proxies import proxy_for
from tests.clients.helpers import Books, Says, request, run, server_tls

REPLY = (
    b'{"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
)
VARIABLES = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_naming_models_imports_no_http_library():
    code = (
        "import sys; from ramify.clients.rate_limited_requests import RateLimitedClientPool; RateLimitedClientPool(keys={'openai': "
        "'key-123'}).client('openai:gpt-5');"
        "print([name for name in ('aiohttp', 'anthropic', 'litellm', 'asyncio') if name in "
        "sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "['asyncio']\n"
    )


@pytest.mark.parametrize(
    ("environ", "url", "proxy"),
    [
        ({}, "http://host/v1", None),
        ({"HTTP_PROXY": "http://p:1"}, "http://host/v1", "http://p:1"),
        ({"HTTP_PROXY": "p:1"}, "http://host/v1", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, "https://host/v1", None),
        ({"ALL_PROXY": "http://p:1"}, "https://host/v1", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "host,other"}, "http://host:8000/v1", None),
    ],
)
def test_proxy_is_taken_from_the_environment(environ, url, proxy, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name.lower(), value)
    assert proxy_for(url) == proxy


def test_unsupported_proxy_is_named(monkeypatch):
    monkeypatch.setenv("all_proxy", "socks5://p:1")
    with pytest.raises(
        ConfigError,
        match="names a socks5 proxy for https://host/v1: give an http:// proxy in HTTPS_PROXY",
    ):
        proxy_for("https://host/v1")


@pytest.mark.parametrize("proxy", ["http://[::1", "http://user:pass@p:port", "p:99999", "http://"])
def test_invalid_proxy_url_is_named_without_its_password(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(
        ConfigError, match="not a URL: write it as http://host:port in HTTP_PROXY"
    ) as caught:
        proxy_for("http://host/v1")
    assert "pass@" not in str(caught.value)


def test_tls_to_a_plain_http_server_is_reported():
    async def refuse(reader, writer):
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main():
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            pool = RateLimitedClientPool(max_attempts=1)
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            with pytest.raises(Unreachable) as caught:
                await pool.ask(pool.client(f"vllm:m@{url}"), request(), Books())
            await pool.close()
            return str(caught.value)

    assert run(main()).endswith("does not speak TLS at this port: write http://")


def test_a_request_goes_through_the_proxy(monkeypatch):
    async def main():
        async with Says(lambda _: (200, REPLY, {})) as proxy:
            monkeypatch.setenv("http_proxy", proxy.root.replace("//", "//user:pass@"))
            pool = RateLimitedClientPool()
            await pool.ask(pool.client("vllm:m@http://model.invalid/v1"), request(), Books())
            await pool.close()
            return proxy.asked[0].path, proxy.asked[0].headers["proxy-authorization"]

    assert run(main()) == ("http://model.invalid/v1/chat/completions", "Basic dXNlcjpwYXNz")


def test_unreachable_proxy_is_named_without_its_password(monkeypatch):
    async def main():
        async with Says(lambda _: (200, REPLY, {})) as proxy:
            root = proxy.root
        monkeypatch.setenv("http_proxy", root.replace("//", "//user:pass@"))
        pool = RateLimitedClientPool(max_attempts=1)
        with pytest.raises(Unreachable) as caught:
            await pool.ask(pool.client("vllm:m@http://model.invalid/v1"), request(), Books())
        await pool.close()
        return f"through the proxy {root}" in str(caught.value), "pass" in str(caught.value)

    assert run(main()) == (True, False)


class Tunnel:
    """A proxy that opens connections on CONNECT, or refuses with ``status``."""

    def __init__(self, status=200, early=b"", tls=None):
        self.heads, self.answer, self._tls = [], b"HTTP/1.1 %d X\r\n\r\n%s" % (status, early), tls
        self.is_open = status == 200

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self._tasks = set()
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        await asyncio.gather(*self._tasks)
        await self._server.wait_closed()

    async def _talk(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head.decode())
        writer.write(self.answer)
        if self.is_open:
            place = head.split()[1].decode().rsplit(":", 1)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(place[1]))
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        writer.close()


async def pump(reader, writer):
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@pytest.mark.parametrize("near", ["plain", "TLS"])
def test_tls_goes_through_a_proxy(near, certificate, monkeypatch):
    """The proxy sees the host and its password, and nothing of the request."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    tls = server_tls(certificate)

    async def main():
        http = MockHttpServer(lambda exchange: exchange.send(200, REPLY), tls=tls)
        await http.start()
        async with Tunnel(tls=tls if near == "TLS" else None) as proxy:
            scheme = "https" if near == "TLS" else "http"
            monkeypatch.setenv("https_proxy", f"{scheme}://user:pass@localhost:{proxy.port}")
            pool = RateLimitedClientPool()
            client = pool.client(f"vllm:m@https://localhost:{http.port}/v1")
            texts = [(await pool.ask(client, request(), Books())).message.content for _ in range(2)]
            await pool.close()
        await http.close()
        return texts, proxy.heads, http.port

    texts, heads, port = run(main())
    place = f"localhost:{port}"
    assert texts == ["hello", "hello"]
    assert heads == [
        f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n"
        "Proxy-Authorization: Basic dXNlcjpwYXNz\r\n\r\n"
    ]


@pytest.mark.parametrize(
    ("status", "early", "says", "again"),
    [
        (407, b"", "the proxy answered 407: it wants a user and password in its URL", False),
        (403, b"", "the proxy answered 403", False),
        (499, b"", "the proxy answered 499", False),
        (500, b"", "the proxy answered 500", True),
        (502, b"", "the proxy answered 502", True),
        (200, b"HTTP/1.1 200 OK\r\n\r\n", "the proxy answered 200", False),
    ],
)
def test_proxy_that_opens_no_connection_is_named(status, early, says, again, monkeypatch):
    async def main():
        async with Tunnel(status, early) as proxy:
            proxy.is_open = False
            monkeypatch.setenv("HTTPS_PROXY", f"http://user:pass@127.0.0.1:{proxy.port}")
            pool = RateLimitedClientPool(max_attempts=1)
            with pytest.raises(Unreachable) as caught:
                await pool.ask(pool.client("vllm:m@https://model.invalid/v1"), request(), Books())
            await pool.close()
            return str(caught.value), caught.value.transient, proxy.port

    text, transient, port = run(main())
    assert text.endswith(
        f"cannot reach https://model.invalid/v1/chat/completions through the proxy "
        f"http://127.0.0.1:{port} ({says}); set HTTPS_PROXY, or name model.invalid in NO_PROXY"
    )
    assert transient is again


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"SSH-2.0-x\r\n", "the proxy: the reply is not HTTP: it begins with b'SSH-2.0-x"),
        (b"", "the proxy: the connection broke before the reply was whole"),
        (
            b"HTTP/1.1 101 -\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            "the proxy: the reply is not HTTP: it switches to a protocol that was not asked for",
        ),
    ],
    ids=["another protocol", "nothing", "an upgrade"],
)
def test_proxy_that_speaks_no_http_is_named_and_tried_again(answer, says, monkeypatch):
    async def main():
        async with Tunnel() as proxy:
            proxy.answer, proxy.is_open = answer, False
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
            pool = RateLimitedClientPool(max_attempts=1)
            with pytest.raises(Unreachable) as caught:
                await pool.ask(pool.client("vllm:m@https://model.invalid/v1"), request(), Books())
            await pool.close()
            return str(caught.value), caught.value.transient

    text, transient = run(main())
    assert f"({says}" in text
    assert transient


def test_dead_proxy_is_named_with_its_variable(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def main():
        pool = RateLimitedClientPool(max_attempts=1)
        with pytest.raises(Unreachable) as caught:
            await pool.ask(pool.client("vllm:m@https://model.invalid/v1"), request(), Books())
        await pool.close()
        return str(caught.value)

    assert run(main()).endswith(
        "through the proxy http://127.0.0.1:1 (connection refused); set ALL_PROXY, or name "
        "model.invalid in NO_PROXY"
    )


def test_certificate_of_another_host_is_refused(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))

    async def main():
        http = MockHttpServer(
            lambda exchange: exchange.send(200, REPLY), tls=server_tls(certificate)
        )
        await http.start()
        pool = RateLimitedClientPool()
        client = pool.client(f"vllm:m@https://127.0.0.1:{http.port}/v1")
        with pytest.raises(Unreachable, match=r"no trusted connection to .*mismatch") as caught:
            await pool.ask(client, request(), Books())
        await pool.close()
        await http.close()
        return caught.value.transient

    assert run(main()) is False


def test_plain_request_to_a_tls_server_is_reported():
    async def alert(reader, writer):
        await reader.read(100)
        writer.write(b"\x15\x03\x01\x00\x02\x02\x46")
        writer.close()

    async def main():
        async with await asyncio.start_server(alert, "127.0.0.1", 0) as server:
            pool = RateLimitedClientPool(max_attempts=1)
            client = pool.client(f"vllm:m@http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            with pytest.raises(ModelError) as caught:
                await pool.ask(client, request(), Books())
            await pool.close()
            return str(caught.value)

    assert "speaks TLS at this port: write https://" in run(main())


@pytest.mark.parametrize(
    "variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", None]
)
def test_certificate_authority_is_taken_from_the_environment(variable, certificate, monkeypatch):
    if variable is not None:
        monkeypatch.setenv(variable, str(certificate[0]))

    async def main():
        tls = server_tls(certificate)
        http = MockHttpServer(lambda exchange: exchange.send(200, REPLY), tls=tls)
        await http.start()
        pool, notices = RateLimitedClientPool(), []
        try:
            client = pool.client(f"vllm:m@https://localhost:{http.port}/v1")
            return (await pool.ask(client, request(), Books(), notices.append)).message.content
        except Unreachable as error:
            return "name your certificate authority in SSL_CERT_FILE" in str(error), notices
        finally:
            await pool.close()
            await http.close()

    assert run(main()) == ("hello" if variable is not None else (True, []))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "REQUESTS_CA_BUNDLE",
            "/no/such/bundle.pem",
            r"REQUESTS_CA_BUNDLE names /no/such/bundle\.pem: No such file",
        ),
        (
            "SSL_CERT_FILE",
            "/no/such/ca.pem",
            r"SSL_CERT_FILE names /no/such/ca\.pem: No such file or directory; fix or",
        ),
        (
            "SSL_CERT_FILE",
            __file__,
            r"SSL_CERT_FILE names .*, which holds no certificate in PEM format; fix or unset it",
        ),
        (
            "SSL_CERT_DIR",
            "/no/such:/nor/this",
            r"SSL_CERT_DIR names /no/such:/nor/this, which is not a folder",
        ),
    ],
)
def test_unusable_certificate_bundle_is_named(variable, value, message, monkeypatch):
    monkeypatch.setenv(variable, value)

    async def main():
        pool = RateLimitedClientPool(keys={"openai": "key-123"})
        with pytest.raises(ConfigError, match=message):
            await pool.ask(pool.client("openai:m@https://localhost:1/v1"), request(), Books())
        await pool.close()

    run(main())
