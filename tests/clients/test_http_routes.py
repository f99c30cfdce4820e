"""Where a request goes and what its head says: URLs, proxies, addresses, and failures to connect."""

import asyncio
import base64
import socket
import ssl

import pytest

from ramify.errors import ConfigError, ModelError, Unreachable
from ramify.http_client.http_transport import (
    HttpConnectionPool,
    HttpResponse,
    route_to,
    route_to_socket,
)
from tests.clients.helpers import SkippingLoop, run
from tests.clients.test_http_transport import OK, Raw

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def lines_of(head):
    first, *fields = head.decode("latin-1").removesuffix("\r\n").split("\r\n")
    return first, dict(field.split(": ", 1) for field in fields)


@pytest.mark.parametrize(
    ("url", "origin", "target", "host"),
    [
        ("http://host/v1", ("http", "host", 80), "/v1", "host"),
        ("https://host/v1", ("https", "host", 443), "/v1", "host"),
        ("https://host:80", ("https", "host", 80), "/", "host:80"),
        ("http://Host:8080/a b?c=d e&f", ("http", "host", 8080), "/a%20b?c=d%20e&f", "host:8080"),
        ("http://[::1]:9/", ("http", "::1", 9), "/", "[::1]:9"),
        ("http://[::1]/", ("http", "::1", 80), "/", "[::1]"),
        (
            "http://bücher.example/",
            ("http", "xn--bcher-kva.example", 80),
            "/",
            "xn--bcher-kva.example",
        ),
    ],
)
def test_url_becomes_an_address_and_a_request_line(url, origin, target, host):
    route = route_to(url, {"Authorization": "Bearer key"})
    assert route.origin == (*origin, "")
    line, fields = lines_of(route.head)
    assert line == f"POST {target} HTTP/1.1"
    assert fields["Host"] == host
    assert fields["Content-Type"] == "application/json"
    assert "key" not in repr(route)
    assert route.connect == b""


def test_only_a_post_names_the_type_of_its_body():
    for head in (
        route_to("http://host/", {}, "GET").head,
        route_to_socket("/s", "/x", {}, "GET").head,
    ):
        assert "Content-Type" not in lines_of(head)[1]


def test_socket_is_an_origin_without_a_port():
    route = route_to_socket("/run/engine.sock", "/images?all=1", {}, "GET")
    assert route.origin == ("unix", "/run/engine.sock", 0, "")
    assert lines_of(route.head)[0] == "GET /images?all=1 HTTP/1.1"


def test_routes_and_responses_can_be_shared():
    """No request can change where another one is sent, or what it was answered."""
    for fixed, field in (
        (route_to("http://host/", {}), "url"),
        (HttpResponse(200, {}, b""), "body"),
    ):
        with pytest.raises(AttributeError):
            setattr(fixed, field, getattr(fixed, field))


def test_host_that_is_not_a_name_is_refused():
    with pytest.raises(ConfigError, match="is not a host name"):
        route_to("http://" + "ü" * 80 + "/", {})


@pytest.mark.parametrize(
    ("login", "sent"),
    [("user:p%40ss@", "user:p@ss"), ("user@", "user:"), ("", None)],
    ids=["password", "user alone", "nobody"],
)
def test_proxy_gets_the_whole_url_and_its_own_login(login, sent, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{login}proxy:3128")
    route = route_to("http://host:8080/v1?a=b", {"Authorization": "Bearer key"})
    assert route.origin == ("http", "host", 8080, f"http://{login}proxy:3128")
    line, fields = lines_of(route.head)
    assert line == "POST http://host:8080/v1?a=b HTTP/1.1"
    wanted = None if sent is None else f"Basic {base64.b64encode(sent.encode()).decode()}"
    assert fields.get("Proxy-Authorization") == wanted
    assert route.connect == b""
    direct = route_to("http://host:8080/v1", {}, through_proxy=False)
    assert (direct.origin[3], lines_of(direct.head)[0]) == ("", "POST /v1 HTTP/1.1")


def test_tunnel_keeps_login_and_request_apart(monkeypatch):
    """The proxy never sees the key, and the server never sees the proxy's password."""
    monkeypatch.setenv("https_proxy", "http://user:pass@proxy:3128")
    route = route_to("https://[::1]/v1", {"Authorization": "Bearer key"})
    line, fields = lines_of(route.head)
    assert line == "POST /v1 HTTP/1.1"
    assert "Proxy-Authorization" not in fields
    assert route.connect.decode() == (
        "CONNECT [::1]:443 HTTP/1.1\r\nHost: [::1]:443\r\n"
        "Proxy-Authorization: Basic dXNlcjpwYXNz\r\n\r\n"
    )


# --- connections ----------------------------------------------------------------------------------


class Dialling(asyncio.SelectorEventLoop):
    """An event loop that notes every address that is dialled, and fails with ``failure``."""

    def __init__(self, failure):
        super().__init__()
        self.dialled = []
        self._failure = failure

    async def create_connection(self, factory, host, port, *, ssl=None, **options):
        self.dialled.append((host, port, options.get("server_hostname") if ssl else None))
        raise self._failure


class Silent(SkippingLoop):
    """An event loop in which no server answers, and time passes at once."""

    async def create_connection(self, *args, **options):
        await asyncio.Event().wait()


def failed_connection(loop, url):
    """Return the error of a request to ``url`` and the seconds until it was raised."""

    async def main():
        pool, began = HttpConnectionPool(), loop.time()
        with pytest.raises(ModelError) as caught:
            async with pool.prepare_exchange("m", route_to(url, {}), b"{}"):
                pass
        await pool.close()
        return caught.value, loop.time() - began

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main())


@pytest.mark.parametrize(
    ("url", "proxy", "dialled"),
    [
        ("http://host/", "", ("host", 80, None)),
        ("https://host/", "", ("host", 443, "host")),
        ("https://host:7/", "", ("host", 7, "host")),
        ("http://host:7/", "http://proxy", ("proxy", 80, None)),
        ("http://host:7/", "http://proxy:443", ("proxy", 443, None)),
        ("http://host:7/", "https://proxy", ("proxy", 443, "proxy")),
        ("https://host:7/", "http://bücher.example:9", ("xn--bcher-kva.example", 9, None)),
    ],
)
def test_address_that_is_dialled(url, proxy, dialled, monkeypatch):
    if proxy:
        monkeypatch.setenv("all_proxy", proxy)
    loop = Dialling(ConnectionRefusedError(111, "refused"))
    failed_connection(loop, url)
    assert loop.dialled == [dialled]


@pytest.mark.parametrize(
    ("url", "failure", "reason"),
    [
        ("http://host/", ConnectionRefusedError(111, "refused"), "connection refused"),
        ("https://host/", ConnectionRefusedError(111, "refused"), "connection refused"),
        ("http://host/", PermissionError(1, "no"), "operation not permitted"),
        ("http://host/", socket.gaierror(-2, "Name or service not known"), "Name or service"),
        (
            "http://host/",
            OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 101] x"),
            "connection refused",
        ),
        ("http://host/", OSError("no such luck"), "no such luck"),
        ("https://host/", OSError("no such luck"), "no such luck"),
        ("https://host/", ConnectionResetError(), "the connection closed while TLS was set up"),
    ],
)
def test_failure_to_connect_is_explained(url, failure, reason):
    error, _ = failed_connection(Dialling(failure), url)
    assert isinstance(error, Unreachable)
    assert str(error).startswith(f"m: cannot reach {url} ({reason}")
    assert str(error).endswith(")")  # without advice about a proxy


def test_broken_plain_connection_says_nothing_about_tls():
    error, _ = failed_connection(Dialling(ConnectionResetError("lost")), "http://host/")
    assert str(error) == "m: cannot reach http://host/ (lost)"


@pytest.mark.parametrize(
    ("failure", "transient"),
    [(ssl.SSLEOFError(8, "EOF occurred"), True), (ssl.SSLError(1, "NO_CIPHERS"), False)],
)
def test_only_a_broken_tls_handshake_is_tried_again(failure, transient):
    error, _ = failed_connection(Dialling(failure), "https://host/")
    assert str(error).startswith("m: no trusted connection to https://host/ (")
    assert error.transient is transient


@pytest.mark.parametrize(
    ("url", "proxy", "hint"),
    [
        ("http://host/", "", ""),
        ("https://host/", "", "; if the server does not speak TLS at this port, write http://"),
        ("http://host/", "http://proxy", "; set http_proxy, or name host in NO_PROXY"),
        ("https://host/", "http://proxy", "; set https_proxy, or name host in NO_PROXY"),
    ],
)
def test_silent_address_is_given_up_after_half_a_minute(url, proxy, hint, monkeypatch):
    if proxy:
        monkeypatch.setenv(url.partition(":")[0] + "_proxy", proxy)
    error, seconds = failed_connection(Silent(), url)
    through = " through the proxy http://proxy" if proxy else ""
    assert str(error) == f"m: cannot reach {url}{through} (no answer in 30 s){hint}"
    assert 30 <= seconds < 31


class TwoAddresses(SkippingLoop):
    """An event loop in which every host has two addresses, of which the first is silent. Its time
    passes only in waits."""

    def __init__(self):
        super().__init__()
        self.tried_s = []

    def time(self):
        return self._skipping.skipped_s

    async def getaddrinfo(self, host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))] * 2

    async def sock_connect(self, sock, address):
        self.tried_s.append(self.time())
        if len(self.tried_s) == 1:
            await asyncio.Event().wait()
        await super().sock_connect(sock, address)


def test_second_address_is_tried_after_a_quarter_of_a_second():
    loop = TwoAddresses()

    async def main():
        async with Raw(OK) as server:
            pool, route = (
                HttpConnectionPool(),
                route_to(server.url.replace("127.0.0.1", "host"), {}),
            )
            async with pool.prepare_exchange("m", route, b"{}") as sent:
                assert (await sent.read()).body == b"hello"
            await pool.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert loop.tried_s == [0.0, 0.25]


class Dropping(asyncio.SelectorEventLoop):
    """An event loop whose connections break as soon as they are open."""

    def __init__(self, iterations):
        super().__init__()
        self._iterations = iterations

    async def create_connection(self, *args, **options):
        transport, protocol = await super().create_connection(*args, **options)
        transport.abort()
        for _ in range(self._iterations):
            await asyncio.sleep(0)
        return transport, protocol


@pytest.mark.parametrize("iterations", [0, 5], ids=["breaking", "broken"])
def test_request_that_was_not_sent_cannot_have_been_paid(iterations):
    async def talk(_, writer):
        writer.close()

    async def main():
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port, pool = server.sockets[0].getsockname()[1], HttpConnectionPool()
            with pytest.raises(Unreachable, match="before the request was sent") as caught:
                async with pool.prepare_exchange(
                    "m", route_to(f"http://127.0.0.1:{port}/", {}), b"{}"
                ):
                    pass
            await pool.close()
            for _ in range(5):  # the server's end
                await asyncio.sleep(0)
            return caught.value.may_be_paid

    with asyncio.Runner(loop_factory=lambda: Dropping(iterations)) as runner:
        assert runner.run(main()) is False


# --- one request after another --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [("GET", b"", None), ("DELETE", b"", None), ("POST", b"", 0), ("POST", b"{}", 2)],
)
def test_length_is_sent_with_every_post_and_every_body(method, body, length):
    heads = []

    async def talk(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 -\r\n\r\n")
        await reader.read()
        writer.close()

    async def main():
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            pool = HttpConnectionPool()
            async with pool.prepare_exchange("m", route_to(url, {}, method), body) as sent:
                assert (await sent.read()).body == b""
            await pool.close()

    run(main())
    wanted = None if length is None else str(length)
    assert lines_of(heads[0][:-2])[1].get("Content-Length") == wanted
