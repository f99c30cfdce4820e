"""Sockets: proxies and certificate authorities from the environment, and lazy imports."""

import asyncio
import shutil
import ssl
import subprocess
import sys

import pytest

from ramify.clients.addresses import proxy_for
from ramify.clients.loopback import LoopbackServer
from ramify.clients.pool import ClientPool
from ramify.errors import ConfigError, Unreachable
from tests.clients.helpers import Books, Says, request, run

REPLY = b'{"choices": [{"message": {"content": "hello"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
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
        "import sys; from ramify.clients.pool import ClientPool; ClientPool(keys={'openai': "
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
            pool = ClientPool(max_attempts=1)
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
            pool = ClientPool()
            await pool.ask(pool.client("vllm:m@http://model.invalid/v1"), request(), Books())
            await pool.close()
            return proxy.asked[0].path, proxy.asked[0].headers["proxy-authorization"]

    assert run(main()) == ("http://model.invalid/v1/chat/completions", "Basic dXNlcjpwYXNz")


def test_unreachable_proxy_is_named_without_its_password(monkeypatch):
    async def main():
        async with Says(lambda _: (200, REPLY, {})) as proxy:
            root = proxy.root
        monkeypatch.setenv("http_proxy", root.replace("//", "//user:pass@"))
        pool = ClientPool(max_attempts=1)
        with pytest.raises(Unreachable) as caught:
            await pool.ask(pool.client("vllm:m@http://model.invalid/v1"), request(), Books())
        await pool.close()
        return f"through the proxy {root}" in str(caught.value), "pass" in str(caught.value)

    assert run(main()) == (True, False)


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    pem, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            str(key),
            "-out",
            str(pem),
        ],
        check=True,
        capture_output=True,
    )
    return pem, key


@pytest.mark.parametrize(
    "variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", None]
)
def test_certificate_authority_is_taken_from_the_environment(variable, certificate, monkeypatch):
    pem, key = certificate
    if variable is not None:
        monkeypatch.setenv(variable, str(pem))

    async def main():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem, key)
        http = LoopbackServer(lambda exchange: exchange.send(200, REPLY), tls=context)
        await http.start()
        pool, notices = ClientPool(), []
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
        ("REQUESTS_CA_BUNDLE", "/no/such/bundle.pem", r"certificate bundle /no/such/bundle\.pem: "),
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
        pool = ClientPool(keys={"openai": "key-123"})
        with pytest.raises(ConfigError, match=message):
            await pool.ask(pool.client("openai:m@https://localhost:1/v1"), request(), Books())
        await pool.close()

    run(main())
