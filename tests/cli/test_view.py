"""``ramify view`` on the command line: serving, errors, and exporting a run to a file."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.helpers import SESSION_SCRIPT, Shell


@pytest.fixture
def stored(shell: Shell) -> str:
    """Store a run and return its id."""
    shell.write("log.txt", "one\ntwo\n")
    assert shell.ask(list(SESSION_SCRIPT), "--no-direct", "how long?", "log.txt").code == 0
    return str(json.loads(shell.run("runs", "--json").out)["run"])


@contextmanager
def viewing(shell: Shell, *arguments: str) -> Iterator[str]:
    """Yield the address that the command prints; Ctrl-C must end it with exit code 0."""
    process = shell.start("view", *arguments, "--port", "0")
    assert process.stderr is not None
    try:
        yield process.stderr.readline().decode().split()[1]
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=100)[1]
    assert (process.returncode, rest) == (0, b"")


def read(address: str, path: str) -> dict[str, list[dict[str, object]]]:
    base, _, token = address.partition("#")[0].partition("?token=")
    request = urllib.request.Request(base + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=100) as response:
        found: dict[str, list[dict[str, object]]] = json.load(response)
    return found


def test_default_store_or_one_run_is_served(shell: Shell, stored: str) -> None:
    with viewing(shell) as address:
        assert [run["id"] for run in read(address, "api/runs")["runs"]] == [stored]
    for name in ("last", stored[:15], f"store/runs/{stored}.jsonl"):
        with viewing(shell, name) as address:
            key = urllib.parse.unquote(address.partition("#/run/")[2])
            assert (
                read(address, f"api/run?key={urllib.parse.quote(key, safe='')}")["head"]["id"]
                == stored
            )  # type: ignore[call-overload]


def test_folder_of_a_training_run_opens_its_page(shell: Shell) -> None:
    for name in ("out", "several/a", "several/b"):
        (shell.folder / name / "rollouts").mkdir(parents=True)
        shell.write(f"{name}/metrics.jsonl", "{}\n")
    with viewing(shell, "out") as address:
        page, _, key = address.partition("#")[2].rpartition("/")
        assert page == "/training"
        rows = read(address, "api/runs")["trainings"]
        assert [row["key"] for row in rows] == [urllib.parse.unquote(key)]
    for paths in (("several",), ("out", "several/a")):
        with viewing(shell, *paths) as address:
            assert "#" not in address


def test_record_of_an_evaluation_opens_its_page(shell: Shell) -> None:
    shell.write("rows.jsonl", '{"question": "2 + 2?", "answer": "4"}\n')
    model = shell.model([{"match": "", "reply": ["4"]}])
    done = shell.run("eval", "rows.jsonl", "--split", "train", "--direct", "--model", model)
    assert done.code == 0, done.err
    record = next((shell.folder / "store/evaluations").glob("*.jsonl"))
    for path in (record, record.parent):
        with viewing(shell, str(path)) as address:
            page, _, key = address.partition("#")[2].rpartition("/")
            assert page == "/evaluation"
            rows = read(address, "api/runs")["evaluations"]
            assert [row["key"] for row in rows] == [urllib.parse.unquote(key)]
    (record.parent / f"a{record.name}").write_bytes(record.read_bytes())
    with viewing(shell, str(record.parent)) as address:
        assert address.endswith("#/evaluation")


def test_token_is_part_of_address_and_required(shell: Shell, stored: str) -> None:
    shell.write("token", "abc\n")
    for options in ((), ("--token-file", "token")):
        with viewing(shell, *options) as address:
            base, _, token = address.partition("?token=")
            assert token == "abc" if options else len(token) > 30
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                read(base, "api/runs")
            refused.value.close()
    with viewing(shell, "--open-to-this-machine") as address:
        assert "token" not in address
        assert read(address, "api/runs")["runs"]


def test_wrong_arguments_are_refused(shell: Shell, stored: str) -> None:
    for arguments, words in {
        ("--host", "0.0.0.0", "--open-to-this-machine"): "0.0.0.0 is reachable from other machines",
        ("--token", "abc"): "unknown option --token: did you mean --token-file?",
        ("--token-file", "nowhere"): "--token-file nowhere cannot be read",
        ("nothing/here",): "no such file or folder: nothing/here",
        ("2019",): "2019 is neither a file nor a folder, and found no run '2019'",
        ("--export", "x.html"): "--export writes one run",
        ("last", "--export", "no/where/x.html"): "cannot write no/where/x.html",
    }.items():
        done = shell.run("view", *arguments)
        assert done.code != 0
        assert words in done.err


def test_unusable_address_gets_one_line_error(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for arguments, words in {
            (
                "--port",
                port,
            ): f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another --port",
            ("--port", "65536"): "--port 65536: a port must be from 1 to 65535",
            ("--host", "192.0.2.1"): "give an address of this machine as --host",
        }.items():
            done = shell.run("view", *arguments)
            assert (done.code, words in done.err, done.err.count("\n")) == (2, True, 1)


def test_run_is_exported_as_one_html_file(shell: Shell, stored: str) -> None:
    done = shell.run("view", "last", "--export", "run.html")
    assert (done.code, done.out) == (0, "")
    assert "opens in any browser" in done.err
    html = (shell.folder / "run.html").read_text()
    assert html.startswith("<!doctype html>")
    assert stored in html
    assert (
        "http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-"
        in html
    )
