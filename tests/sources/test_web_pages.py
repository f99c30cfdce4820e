"""Pages and files on the web as sources, over real connections on loopback."""

from __future__ import annotations

import gzip
import io
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import SourceError
from ramify.secret_redaction import SecretRedactor
from ramify.sources.http_content_type import file_name
from ramify.sources.http_download import PrivateAddressError, filter_public_addresses, is_public
from ramify.sources.load_sources import LoadedContext, load
from ramify.sources.url_recognition import (
    RemoteFileInfo,
    redact_url_for_display,
    reloadable_redacted_url,
)
from tests.cli.helpers import Done, Shell, code, kill_at_second_request
from tests.clients.helpers import self_signed, server_tls
from tests.sources.site_server import SiteServer

HTML = {"Content-Type": "text/html; charset=utf-8"}


@pytest.fixture(scope="module")
def running_site() -> Iterator[SiteServer]:
    site = SiteServer()
    yield site
    site.close()


@pytest.fixture
def site(running_site: SiteServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SiteServer:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    running_site.pages.clear()
    running_site.asked.clear()
    return running_site


def fetched(*urls: str, **options: Any) -> LoadedContext:
    return load(list(urls), allow_private=True, **options)


def refused(*urls: str, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        load(list(urls), **{"allow_private": True, **options})
    return str(caught.value)


def redirect(to: str, status: int = 302) -> tuple[int, dict[str, str], bytes]:
    return status, {"Location": to}, b""


# --- pages and files


def test_a_text_is_named_by_its_path_and_read_as_a_local_file_is(site: SiteServer):
    site.pages["/logs/app.log"] = 200, {"Content-Type": "text/plain"}, "größer\n".encode()
    loaded = fetched(f"{site.url}/logs/app.log?x=1#part")
    assert loaded.context == "größer\n"
    assert [(item.name, item.kind) for item in loaded.items] == [("app.log", "text")]
    assert site.paths() == ["/logs/app.log?x=1"]


def test_a_page_is_read_as_markdown(site: SiteServer):
    pytest.importorskip("markitdown")
    page = "<!doctype html><title>T</title><h1>Größe</h1><p>one <b>two</b></p><script>x()</script>"
    site.pages["/report"] = (
        200,
        {"Content-Type": "text/html; charset=latin-1"},
        page.encode("latin-1"),
    )
    loaded = fetched(f"{site.url}/report")
    assert loaded.items[0].name == "report.html"
    assert isinstance(loaded.context, str)
    assert "# Größe" in loaded.context
    assert "one **two**" in loaded.context
    assert "x()" not in loaded.context


def test_several_addresses_are_named_by_host_and_path(site: SiteServer, tmp_path: Path):
    site.pages["/a/one.txt"] = 200, {}, b"one"
    site.pages["/b/one.txt"] = 200, {}, b"two"
    (tmp_path / "local.txt").write_text("three")
    loaded = fetched(f"{site.url}/a/one.txt", f"{site.url}/b/one.txt", str(tmp_path / "local.txt"))
    host = f"localhost:{site.port}"
    assert loaded.context == {
        f"{host}/a/one.txt": "one",
        f"{host}/b/one.txt": "two",
        "local.txt": "three",
    }


def test_a_table_by_url_is_queried(site: SiteServer):
    pytest.importorskip("duckdb")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = io.BytesIO()
    parquet.write_table(arrow.table({"a": list(range(100))}), data)
    site.pages["/get"] = (
        200,
        {"Content-Disposition": 'attachment; filename="t.parquet"'},
        (data.getvalue()),
    )
    loaded = fetched(f"{site.url}/get")
    assert loaded.items[0].name == "t.parquet"
    assert loaded.tools["sql"]("SELECT sum(a) FROM t") == [(4950,)]


def test_an_archive_by_url_is_opened(site: SiteServer):
    site.pages["/a.txt.gz"] = 200, {"Content-Type": "application/gzip"}, gzip.compress(b"packed")
    assert fetched(f"{site.url}/a.txt.gz").context == "packed"


def test_the_declared_charset_counts_unless_the_bytes_are_utf8(site: SiteServer):
    text = "日本語のテキスト\n"
    kind = {"Content-Type": "text/plain; charset=Shift_JIS"}
    site.pages["/sjis.txt"] = 200, kind, text.encode("shift_jis")
    site.pages["/jis.txt"] = (
        200,
        {"Content-Type": "text/plain; charset=iso-2022-jp"},
        text.encode("iso2022_jp"),
    )
    latin = {"Content-Type": "text/plain; charset=ISO-8859-1"}
    site.pages["/utf8.txt"] = 200, latin, text.encode()
    site.pages["/unknown.txt"] = 200, {"Content-Type": "text/plain; charset=klingon"}, b"abc"
    for name in ("sjis", "jis", "utf8"):
        assert fetched(f"{site.url}/{name}.txt").context == text
    assert fetched(f"{site.url}/unknown.txt").context == "abc"


@pytest.mark.parametrize(
    ("path", "head", "begin", "expected"),
    [
        ("/", {"content_type": "text/html"}, b"<!doctype html>", "host.html"),
        ("/view.php?id=3", {"content_type": "text/html"}, b"\n<html>", "view.php.html"),
        ("/lib.py", {"content_type": "text/html"}, b"<html>a page about it", "lib.py.html"),
        ("/lib.py", {"content_type": "text/html"}, b"import os", "lib.py"),
        ("/page.htm", {"content_type": "text/html"}, b"<html>", "page.htm"),
        ("/export", {"content_type": "text/csv; header=present"}, b"a,b", "export.csv"),
        ("/export", {"content_type": "application/json"}, b"{}", "export.json"),
        ("/data.csv", {"content_type": "application/octet-stream"}, b"a,b", "data.csv"),
        ("/v1.2", {"content_type": "application/pdf"}, b"%PDF-", "v1.2.pdf"),
        ("/latest", {"final_url": "https://cdn/x/report.pdf"}, b"%PDF-", "report.pdf"),
        ("/x", {"file_name": "../../etc/passwd"}, b"a", "passwd"),
        ("/x", {"file_name": "..\\.bashrc"}, b"a", "bashrc"),
        ("/%2e%2e%2f%2e%2e%2fa%0ab.txt", {}, b"a", "a_b.txt"),
        ("/" + "long" * 100 + ".csv", {}, b"a", "long" * 29 + ".csv"),
    ],
)
def test_names_tell_the_kind_and_lead_nowhere(path, head, begin, expected):
    assert file_name(f"https://host{path}", RemoteFileInfo(**head), begin) == expected


# --- the cache


def test_an_unchanged_file_is_not_sent_again(site: SiteServer, tmp_path: Path):
    def page(handler: Any):
        if handler.headers.get("If-None-Match") == '"one"':
            return 304, {"ETag": '"one"'}, b""
        return 200, {"ETag": '"one"', "Content-Type": "text/csv; charset=utf-8"}, b"a,b\n1,2\n"

    site.pages["/export"] = page
    first, second = fetched(f"{site.url}/export"), fetched(f"{site.url}/export")
    assert first.context == second.context == "a,b\n1,2\n"
    assert second.items == first.items  # its type is remembered
    assert [asked[2].get("if-none-match") for asked in site.asked] == [None, '"one"']
    site.pages["/export"] = 200, {"ETag": '"two"'}, b"new"
    assert fetched(f"{site.url}/export").context == "new"
    files = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert {
        stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files if path.suffix == ".data"
    } == {0}
    assert stat.S_IMODE((tmp_path / "home" / "downloads").stat().st_mode) == 0o700


def test_without_a_version_or_with_no_store_a_file_is_asked_for_again(site: SiteServer):
    site.pages["/plain.txt"] = 200, {}, b"plain"
    site.pages["/kept.txt"] = 200, {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, b"kept"
    site.pages["/secret.txt"] = 200, {"ETag": '"x"', "Cache-Control": "no-store"}, b"secret"
    for _ in range(2):
        for name in ("plain", "kept", "secret"):
            assert fetched(f"{site.url}/{name}.txt").context == name
    conditions = [
        (path, asked.get("if-none-match") or asked.get("if-modified-since"))
        for _, path, asked in site.asked[3:]
    ]
    assert conditions == [
        ("/plain.txt", None),
        ("/kept.txt", "Thu, 01 Jan 2026 00:00:00 GMT"),
        ("/secret.txt", None),
    ]


def test_a_damaged_copy_is_fetched_again(site: SiteServer, tmp_path: Path):
    site.pages["/a.txt"] = 200, {"ETag": '"x"'}, b"whole"
    fetched(f"{site.url}/a.txt")
    (copy,) = (tmp_path / "home").rglob("*.data")
    copy.write_bytes(b"cut")
    assert fetched(f"{site.url}/a.txt").context == "whole"


# --- limits


def test_a_file_above_the_limit_is_refused_by_its_size_before_it_is_read(site: SiteServer):
    site.pages["/big.txt"] = 200, {}, b"x" * 50_000
    message = refused(f"{site.url}/big.txt", max_bytes=10_000)
    assert message.startswith(
        f"{site.url}/big.txt has 50,000 bytes, over the limit of 10,000 bytes"
    )
    assert message.endswith(": raise max_bytes")


def test_the_sizes_of_all_files_are_checked_before_the_first_is_fetched(
    site: SiteServer, tmp_path: Path
):
    for name in "abc":
        site.pages[f"/{name}.txt"] = 200, {}, b"x" * 4000
    urls = [f"{site.url}/{name}.txt" for name in "abc"]
    assert "have 12,000 bytes, over the limit of 10,000 bytes; nothing was fetched" in refused(
        *urls, max_bytes=10_000
    )
    assert not list((tmp_path / "home").rglob("*.data"))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_file_of_unknown_size_ends_at_the_limit(site: SiteServer, is_packed: bool, tmp_path):
    """A server may send without end, and a few packed bytes may become many."""
    data = bytes(20_000_000) if is_packed else b"x" * 300_000
    body = gzip.compress(data) if is_packed else data

    def endless(handler: Any):
        handler.send_response(200)
        if is_packed:
            handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Connection", "close")
        handler.end_headers()
        try:
            for _ in range(1 if is_packed else 100_000):
                handler.wfile.write(body)
        except OSError:
            return 200, {}, b""
        return 200, {}, b""

    site.pages["/endless.txt"] = endless
    message = refused(f"{site.url}/endless.txt", max_bytes=1_000_000)
    assert "brings the downloads over the limit of 1,000,000 bytes" in message
    assert not list(tmp_path.rglob("*.data"))


def test_a_body_that_breaks_off_is_not_a_shorter_file(site: SiteServer):
    site.pages["/cut.txt"] = 200, {"Content-Length": "1000", "Connection": "close"}, b"only this"
    assert f"{site.url}/cut.txt was cut off" in refused(f"{site.url}/cut.txt")


# --- answers that are no files


def test_busy_server_is_asked_again(site: SiteServer):
    busy = iter([(503, {"Retry-After": "0"}, b""), (429, {"Retry-After": "0"}, b"")])
    site.pages["/x.txt"] = lambda _: next(busy, (200, {}, b"at last"))
    assert fetched(f"{site.url}/x.txt").context == "at last"
    assert site.paths() == ["/x.txt"] * 3


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (404, {}, "does not exist (the server answered 404)"),
        (410, {}, "does not exist (the server answered 410)"),
        (401, {}, "the server answered 401: no right to read it"),
        (403, {}, "the server answered 403: no right to read it"),
        (429, {"Retry-After": "7"}, "too many requests): try again in 7 s"),
        (500, {}, "the server answered 500"),
        (503, {"Retry-After": "9"}, "the server answered 503): try again in 9 s"),
        (304, {}, "the server answered 304"),
        (418, {}, "the server answered 418"),
    ],
)
def test_each_refusal_is_one_sentence(site: SiteServer, status, headers, expected):
    site.pages["/x"] = status, headers, b""
    message = refused(f"{site.url}/x")
    assert message.startswith(f"{site.url}/x ")
    assert expected in message
    assert "\n" not in message


def test_one_bad_address_does_not_stop_the_others_unless_strict(site: SiteServer):
    site.pages["/good.txt"] = 200, {}, b"good"
    urls = f"{site.url}/good.txt", f"{site.url}/bad.txt"
    loaded = fetched(*urls)
    assert loaded.context == {f"localhost:{site.port}/good.txt": "good"}
    assert [problem.name for problem in loaded.problems] == [f"{site.url}/bad.txt"]
    assert "bad.txt" in refused(*urls, strict=True)


def test_hosts_that_do_not_answer_are_one_sentence():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert "cannot be fetched (connection refused)" in refused(f"http://127.0.0.1:{port}/")
    assert "cannot be fetched (" in refused("http://no-such-host.invalid/")
    assert refused("https:///x") == "https:///x names no host: write https://host/path"
    assert "is not a URL" in refused("http://host:99999999/")


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    certificate = self_signed(tmp_path)
    site = SiteServer(server_tls(certificate))
    try:
        site.pages["/a.txt"] = 200, {}, b"encrypted"
        message = refused(f"{site.url}/a.txt")
        assert "no trusted connection: self-signed certificate" in message
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert fetched(f"{site.url}/a.txt").context == "encrypted"
        # The certificate is that of localhost.
        assert "no trusted connection" in refused(f"https://127.0.0.1:{site.port}/a.txt")
    finally:
        site.close()


# --- redirects and private addresses


def test_redirects_are_followed_and_name_the_file(site: SiteServer):
    site.pages["/latest"] = redirect("/v2/notes.txt", 301)
    site.pages["/v2/notes.txt"] = redirect(f"{site.url}/v3/notes.txt", 307)
    site.pages["/v3/notes.txt"] = 200, {}, b"third"
    loaded = fetched(f"{site.url}/latest")
    assert (loaded.context, loaded.items[0].name) == ("third", "notes.txt")


def test_loops_and_other_schemes_are_refused(site: SiteServer):
    site.pages["/a"] = redirect("/b")
    site.pages["/b"] = redirect("/a")
    site.pages["/file"] = redirect("file:///etc/passwd")
    site.pages["/s3"] = redirect("s3://bucket/key")
    site.pages["/odd"] = redirect("http://[half")
    assert "redirects in a loop" in refused(f"{site.url}/a")
    assert "redirects to file:, which is refused" in refused(f"{site.url}/file")
    assert "redirects to s3:, which is refused" in refused(f"{site.url}/s3")
    assert "redirects to something that is not a URL" in refused(f"{site.url}/odd")
    for number in range(20):
        site.pages[f"/{number}"] = redirect(f"/{number + 1}")
    assert "redirects more than 10 times" in refused(f"{site.url}/0")


def test_a_redirect_from_https_to_http_is_refused(
    site: SiteServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    certificate = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    secure = SiteServer(server_tls(certificate))
    try:
        site.pages["/open"] = 200, {}, b"open"
        secure.pages["/x"] = redirect(f"{site.url}/open?token=1234567890")
        secure.pages["/a.txt"] = 200, {}, b"secure"
        message = refused(f"{secure.url}/x")
        assert f"redirects from https to {site.url}/open, which is refused" in message
        assert site.paths() == []
        site.pages["/up"] = redirect(f"{secure.url}/a.txt")
        assert fetched(f"{site.url}/up").context == "secure"
    finally:
        secure.close()


def test_private_addresses_are_refused_unless_allowed(site: SiteServer):
    site.pages["/x"] = 200, {}, b"inside"
    for host in ("localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"):
        message = refused(f"http://{host}:{site.port}/x", allow_private=False)
        assert "a private network: allow it with --allow-private" in message, host
    assert site.paths() == []


def test_a_proxy_is_asked_for_no_private_address(site: SiteServer, monkeypatch: pytest.MonkeyPatch):
    """A proxy resolves names itself, and the site stands for one here."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{site.port}")
    monkeypatch.setenv("no_proxy", "")
    site.pages["http://example.com/a.txt"] = 200, {}, b"through the proxy"
    site.pages["http://example.com/in"] = redirect("http://169.254.169.254/latest/meta-data")
    site.pages["*"] = 200, {}, b"inside"
    outside = load("http://example.com/a.txt")
    assert outside.context == "through the proxy"
    for url in ("http://example.com/in", "http://10.0.0.1/", "http://localhost/"):
        assert "an address of this machine or a private network" in refused(
            url, allow_private=False
        )
    assert site.paths() == ["http://example.com/a.txt", "http://example.com/in"]


PRIVATE = (
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 "
    "255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fc00::1 ff02::1 ::ffff:10.0.0.1 ::127.0.0.1 "
    "64:ff9b::a00:1 64:ff9b:1::1 fec0::1 2002:7f00:1:: 2001:db8::1 localhost"
)


@pytest.mark.parametrize("address", PRIVATE.split())
def test_special_addresses_are_not_public(address):
    assert not is_public(address)


def test_only_public_addresses_of_a_name_are_connected_to():
    """So a name with a public and a private address reaches the public one, and no other."""
    assert all(map(is_public, ["8.8.8.8", "2606:2800:220:1::1", "64:ff9b::808:808"]))
    mixed = ["10.0.0.1", "93.184.216.34", "2606:2800:220:1::1", "::1"]
    assert filter_public_addresses("mixed.example", mixed) == [
        "93.184.216.34",
        "2606:2800:220:1::1",
    ]
    with pytest.raises(
        PrivateAddressError, match=r"leads to inside\.example, which is 10\.0\.0\.1"
    ):
        filter_public_addresses("inside.example", ["10.0.0.1", "::1"])


# --- secrets


def test_a_login_is_sent_to_its_own_server_only(site: SiteServer):
    other = SiteServer()
    try:
        other.pages["/end.txt"] = 200, {}, b"end"
        site.pages["/same"] = redirect("/away")
        site.pages["/away"] = redirect(f"http://thief:pw@localhost:{other.port}/end.txt")
        address = site.url.replace("//", "//me:secret-password@")
        loaded = fetched(f"{address}/same")
        assert loaded.context == "end"
        sent = [headers.get("authorization") for _, _, headers in site.asked + other.asked]
        assert sent == ["Basic bWU6c2VjcmV0LXBhc3N3b3Jk"] * 2 + [None]
        assert all("referer" not in headers for _, _, headers in other.asked)
    finally:
        other.close()


def test_secrets_of_a_url_are_in_no_error_and_no_record(site: SiteServer, tmp_path: Path):
    key = "1234567890abcdef"
    address = site.url.replace("//", "//me:pass-word-123@")
    url = f"{address}/gone/x.txt?sig={key}&page=2"
    message = refused(url)
    assert message.startswith(f"{site.url}/gone/x.txt does not exist")
    site.pages["/gone/x.txt"] = 200, {"ETag": '"e"'}, b"text"
    loaded = fetched(url)
    recorded = reloadable_redacted_url(url)
    assert recorded == f"{site.url}/gone/x.txt?sig=«redacted»&page=2"
    stored = [p.read_text() for p in tmp_path.rglob("*.json")]
    for text in (message, str(loaded), recorded, *stored):
        assert key not in text
        assert "pass-word" not in text
    assert key not in SecretRedactor().redact(f"a session printed {key}")
    assert "ask the question again" in refused(recorded)


def test_a_run_over_a_url_leaves_no_secret_and_is_resumed_without_one(
    site: SiteServer, tmp_path: Path
):
    pytest.importorskip("duckdb")
    site.pages["/t.csv"] = 200, {"Content-Type": "text/csv"}, b"a,b\n1,2\n3,4\n"
    shell, key = Shell(tmp_path), "1234567890abcdef"
    login = site.url.replace("//", "//me:pass-word-123@")
    query = code("x = sql('SELECT sum(a) FROM t')\nprint(x)")

    def killed(url: str) -> Done:
        first = shell.model([query, {"fail": "stalled"}])
        options = ["ask", "-v", "--allow-private", "--no-direct", "-m", first]
        kill_at_second_request(shell, shell.start(*options, "sum?", url))
        shell.model([query, code("FINAL(x)")])
        stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert not [data for data in stored if key.encode() in data or b"pass-word" in data]
        done = shell.run("ask", "--resume", "last", "-q")
        assert key not in f"{done}{shell.run('show', 'last', '--json')}"
        return done

    refusal = killed(f"{login}/t.csv?sig={key}")
    assert refusal.code == 2
    assert "was fetched with a key that is not recorded: ask the question again" in refusal.err
    shell.run("runs", "prune", "--keep", "0")
    done = killed(f"{site.url}/t.csv?page=2")  # that it may be private is recorded
    assert (done.code, "4" in done.out) == (0, True), done


def test_an_address_in_place_of_the_question_is_refused(tmp_path: Path):
    done = Shell(tmp_path).run("ask", "https://me:secret-word@example.org/a?sig=1234567890abcdef")
    assert done.code == 2
    assert "https://example.org/a is an address, and the question comes first" in done.err
    assert "secret-word" not in done.err


def test_shown_and_recorded_urls():
    assert redact_url_for_display("HTTPS://u:p@h:1/a/b?c=d#e") == "https://h:1/a/b"
    assert redact_url_for_display("s3://key:secret@bucket/a") == "s3://bucket/a"
    assert redact_url_for_display("abfs://box@account.host/a?b") == "abfs://box@account.host/a?b"
    assert reloadable_redacted_url("s3://bucket/a#1") == "s3://bucket/a#1"
    assert "contains a key" in refused("s3://key:secret@bucket/a")


def test_the_address_of_an_unknown_scheme_is_refused():
    message = refused("ftp://me:pw@host/x")
    assert message.startswith("ftp://host/x is not an address that can be read")


def test_sources_need_no_network_unless_they_are_addresses(tmp_path: Path, monkeypatch):
    """A local file whose name has a colon and slashes in it is not an address."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("https:")
    Path("https:/a.txt").write_text("local")
    assert load("https:/a.txt").context == "local"
