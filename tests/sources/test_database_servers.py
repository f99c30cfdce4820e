"""Databases on servers: real ones of Debian packages, on a Unix socket's folder and a free port."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.errors import SourceError
from ramify.sources.database_urls import parse_address, without_password
from ramify.sources.load_sources import load
from tests.cli.helpers import Shell, code, kill_at_second_request
from tests.clients.helpers import self_signed

pytestmark = pytest.mark.slow  # starting a server takes longer than its tests
PASSWORD = "corr3ct-h0rse"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(name: str) -> str:
    found = shutil.which(name) or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), ""
    )
    if not found:
        pytest.skip(f"needs {name}: scripts/setup")
    return found


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a database with one table."""
    import psycopg

    initdb, server = _program("initdb"), _program("postgres")
    folder = tmp_path_factory.mktemp("postgres")
    user = []
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        for path in (folder, *folder.parents):
            if path.stat().st_uid == 0 and path != Path("/") and not path.stat().st_mode & 0o001:
                path.chmod(path.stat().st_mode | 0o011)
        shutil.chown(folder, "postgres", "postgres")
    (folder / "pw").write_text(PASSWORD)
    (folder / "pw").chmod(0o644)
    subprocess.run(
        [
            *user,
            initdb,
            "-D",
            folder / "data",
            "-U",
            "ann",
            "-A",
            "scram-sha-256",
            "--no-sync",
            f"--pwfile={folder / 'pw'}",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    port = _free_port()
    process = subprocess.Popen(
        [
            *user,
            server,
            "-D",
            folder / "data",
            "-p",
            str(port),
            "-k",
            folder,
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "fsync=off",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        url = f"postgresql://ann:{PASSWORD}@127.0.0.1:{port}/postgres"
        for _ in range(100):
            try:
                connection = psycopg.connect(url, autocommit=True)
                break
            except psycopg.OperationalError:  # it is still starting
                time.sleep(0.1)
        with connection:
            connection.execute("CREATE TABLE orders (id int, price numeric, day date)")
            connection.execute("INSERT INTO orders VALUES (1, 2.5, '2024-01-02'), (2, 3, NULL)")
        yield url
    finally:
        process.send_signal(2)
        process.wait(30)


def test_postgresql_is_described_and_queried(postgres: str):
    loaded = load([postgres])
    assert isinstance(loaded.context, str)
    assert '"orders" (id integer, price numeric, day date)\n--   (1, 2.5, ' in loaded.context
    assert PASSWORD not in f"{loaded.context}{loaded.manifest()}{loaded.describe()}{loaded.items}"
    sql = loaded.tools["sql"]
    assert sql("SELECT id, price, day FROM orders WHERE id = %s", [1], db="postgres") == [
        (1, 2.5, "2024-01-02")
    ]
    assert sql("SELECT count(*) FROM orders") == [(2,)]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM orders",
        "SELECT 1; COMMIT; DROP TABLE orders",
        "WITH x AS (DELETE FROM orders RETURNING 1) SELECT * FROM x",
        "COPY orders TO '/tmp/out'",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "SET default_transaction_read_only = off",
        "SELECT set_config('transaction_read_only', 'off', false)",
        "SELECT nextval('x')",
    ],
)
def test_postgresql_is_only_read(postgres: str, query: str):
    sql = load([postgres]).tools["sql"]
    with pytest.raises((PermissionError, ValueError), match=r"^sql: ") as caught:
        sql(query)
    assert PASSWORD not in str(caught.value)
    assert sql("SELECT count(*) FROM orders") == [(2,)]


def test_postgresql_results_are_bounded(postgres: str):
    with pytest.raises(ValueError, match="more than 10,000 rows"):
        load([postgres]).tools["sql"]("SELECT * FROM generate_series(1, 20000)")


def test_wrong_password_is_not_in_the_error(postgres: str):
    with pytest.raises(SourceError, match=r"cannot be read: .*password") as caught:
        load([postgres.replace(PASSWORD, "wr0ng-secret")])
    assert "wr0ng-secret" not in str(caught.value)


@pytest.fixture(scope="module")
def mysql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import pymysql

    install, server = _program("mariadb-install-db"), _program("mariadbd")
    folder = tmp_path_factory.mktemp("maria")
    certificate, key = self_signed(folder)
    own = ["--no-defaults", f"--datadir={folder / 'data'}"]
    user = [f"--user={'root' if os.getuid() == 0 else os.environ.get('USER', '')}"]
    subprocess.run(
        [install, *own, *user, "--auth-root-authentication-method=normal"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    port = _free_port()
    process = subprocess.Popen(
        [
            server,
            *own,
            *user,
            f"--port={port}",
            "--bind-address=127.0.0.1",
            f"--socket={folder / 's'}",
            f"--pid-file={folder / 'pid'}",
            f"--ssl-cert={certificate}",
            f"--ssl-key={key}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        connection = pymysql.connect(unix_socket=str(folder / "s"), user="root")
        with connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE shop")
            cursor.execute("CREATE TABLE shop.orders (id int, name varchar(9))")
            cursor.execute("INSERT INTO shop.orders VALUES (1, 'a'), (2, 'b')")
            cursor.execute(f"CREATE USER ann@localhost IDENTIFIED BY '{PASSWORD}'")
            cursor.execute("GRANT ALL ON *.* TO ann@localhost")
            connection.commit()
        yield f"mysql://ann:{PASSWORD}@127.0.0.1:{port}/shop"
    finally:
        process.terminate()
        process.wait(30)


def test_mysql_is_described_and_only_read(mysql: str, tmp_path: Path):
    loaded = load([mysql])
    assert isinstance(loaded.context, str)
    assert "`orders` (id int, name varchar)" in loaded.context
    sql = loaded.tools["sql"]
    assert sql("SELECT name FROM orders WHERE id = %s", [2]) == [("b",)]
    for query in (
        "DELETE FROM orders",
        "SELECT 1; DELETE FROM orders",
        f"SELECT 1 INTO OUTFILE '{tmp_path}/x'",
        "WITH x AS (SELECT 1) DELETE FROM orders",
    ):
        with pytest.raises((PermissionError, ValueError), match=r"^sql: "):
            sql(query)
    assert sql("SELECT count(*) FROM orders") == [(2,)]


def test_tls_to_mysql_is_as_the_url_says(mysql: str, tmp_path_factory: pytest.TempPathFactory):
    (authority,) = tmp_path_factory.getbasetemp().glob("maria0/cert.pem")
    other, _ = self_signed(tmp_path_factory.mktemp("other"))
    named = mysql.replace("127.0.0.1", "localhost")  # the name in the certificate

    def cipher(url: str) -> str:
        ((_, used),) = load([url]).tools["sql"]("SHOW STATUS LIKE 'Ssl_cipher'")
        return str(used)

    assert cipher(f"{mysql}?ssl-mode=DISABLED") == ""
    assert cipher(f"{mysql}?ssl_mode=required")
    assert cipher(f"{mysql}?ssl-mode=VERIFY_CA&ssl-ca={authority}")
    assert cipher(f"{named}?ssl-mode=VERIFY_IDENTITY&ssl-ca={authority}")
    for url, reason in {
        f"{mysql}?ssl-mode=VERIFY_IDENTITY&ssl-ca={authority}": "certificate is not valid for",
        f"{mysql}?ssl-mode=VERIFY_CA&ssl-ca={other}": "certificate verify failed",
        f"{mysql}?ssl-ca={other}": "certificate verify failed",
        f"{mysql}?ssl-mode=VERIFY_CA": "certificate verify failed",
        f"{mysql}?ssl-ca=/no/such/file": "No such file",
    }.items():
        with pytest.raises(SourceError, match=r"cannot be read: ") as caught:
            load([url])
        assert reason in str(caught.value)
        assert PASSWORD not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_tls_to_postgresql_is_as_the_url_says(postgres: str):
    """This server has no TLS."""
    assert load([f"{postgres}?sslmode=prefer"]).tools
    with pytest.raises(SourceError, match="does not support SSL"):
        load([f"{postgres}?sslmode=require"])


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("mysql://db/shop?ssl-mode=MAYBE", "write one of DISABLED, PREFERRED"),
        ("mysql://db/shop?ssl-key=k.pem", "ssl-key without ssl-cert"),
        ("mysql://db/shop?local_infile=1", "'local-infile', which is not supported"),
        ("mysql://db/shop?init_command=DROP", "'init-command', which is not supported"),
        ("mysql://db/shop?sslmode=require", "only these TLS options are: ssl-mode"),
        ("postgresql://db/shop?options=-c%20x=y", "'options', which is not supported"),
        ("postgresql://db/shop?host=/tmp", "'host', which is not supported"),
        ("postgresql://db/shop?password=s3cret", "remove it and set PGPASSWORD"),
        ("mysql://db/shop?passwd=s3cret", "remove it and set MYSQL_PWD"),
        ("mysql://db/shop?ssl-key-password=s3cret", "remove it and set MYSQL_PWD"),
    ],
)
def test_an_option_is_obeyed_or_refused(address: str, expected: str):
    with pytest.raises(SourceError) as caught:
        parse_address(address)
    assert expected in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_the_password_is_nowhere_but_in_the_process_that_asks(
    postgres: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """It is searched for in whatever a run leaves or prints, and in what other users of the machine
    can see."""
    shell = Shell(tmp_path)
    shell.env["RAMIFY_LOG"] = "debug"
    query = "sql('SELECT sum(price) FROM orders')"
    script = [code(f"x = {query}; print(x)"), code("sql('SELECT nonsense')"), code("FINAL(x)")]
    done = shell.ask(script, "-v", "--no-direct", "sum?", postgres)
    assert (done.code, "5.5" in done.out) == (0, True), done
    printed = [
        done,
        shell.run("show", "last", "--json"),
        shell.run("show", "last", "-v"),
        shell.run("runs"),
        shell.run("view", "last", "--export", "run.html"),
        shell.ask(script, "sum?", postgres.replace("/postgres", "/nothing")),
        shell.ask(script, "--dry-run", "sum?", postgres),
    ]
    seen = [text for each in printed for text in (each.out, each.err)]
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"SELECT sum(price)" in data for data in stored)
    assert not [text for text in seen if PASSWORD in text]
    assert not [data for data in stored if PASSWORD.encode() in data]

    sql = load([postgres]).tools["sql"]  # its process is idle afterwards, and alive
    assert sql("SELECT 1") == [(1,)]
    children = [
        Path(f"/proc/{pid}")
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    commands = [(child / "cmdline").read_bytes() for child in children]
    assert any(b"database_servers" in command for command in commands)
    assert not [command for command in commands if PASSWORD.encode() in command]
    assert not [c for c in children if PASSWORD.encode() in (c / "environ").read_bytes()]


def test_resume_asks_the_server_again_and_needs_the_password_again(postgres: str, tmp_path: Path):
    shell = Shell(tmp_path)
    process = shell.start(
        "ask",
        "-v",
        "-m",
        shell.model([code("x = 1"), {"fail": "stalled"}]),
        "sum?",
        f"{postgres}?sslmode=prefer",
    )
    kill_at_second_request(shell, process)
    shell.model([code("FINAL(sql('SELECT sum(price) FROM orders'))")])
    done = shell.run("ask", "--resume", "last", "-q")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "set PGPASSWORD if it needs a password" in done.err
    done = shell.run("ask", "--resume", "last", "-q", PGPASSWORD=PASSWORD)
    assert (done.code, "5.5" in done.out) == (0, True), done
    replayed = shell.run("replay", "last", PGPASSWORD=PASSWORD)
    assert replayed.code == 0, replayed
    refused = shell.run("replay", "last")
    assert "set PGPASSWORD if it needs a password" in refused.err


def test_addresses_are_shown_without_password():
    url = "postgresql://ann:p@ss:w/ord@db.example/shop?sslmode=require&password=zzz"
    assert without_password(url) == "postgresql://ann@db.example/shop?sslmode=require"
    assert without_password("mysql://a:b@h/s?SSL_CA=/a%20b.pem&x=y") == (
        "mysql://a@h/s?SSL_CA=/a+b.pem"
    )
    assert parse_address("mysql://ann@db/shop").port == 3306
    with pytest.raises(SourceError, match="names no database"):
        parse_address("mysql://ann:secret-word@db")
