"""``ramify serve`` as a process: it prints its address, answers, and shuts down cleanly."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ramify.cli.main import load_subcommand
from ramify.cli.parser import UsageError
from tests.cli.helpers import SESSION_SCRIPT, Shell


@contextmanager
def serving(shell: Shell, *options: str, code: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (base URL, key that the server has made or empty), then stop the server with Ctrl-C and
    check its exit code."""
    process = shell.start("serve", "--port", "0", *options)
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        line = process.stderr.readline().decode()
        assert " at http://127.0.0.1:" in line, line
        key = "" if "--keys" in options else process.stderr.readline().decode().split()[1]
        yield line.split(" at ")[1].split()[0], key
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == code
        assert process.stdout.read() == b""
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stderr.close()
        process.stdout.close()


def post(url: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_server_answers_chat_completion_and_stores_the_run(shell: Shell) -> None:
    """The run uses the jail and is stored."""
    script = [
        {"match": "How long", "reply": SESSION_SCRIPT[0]},
        {"match": "", "reply": SESSION_SCRIPT[1]},
    ]
    model = shell.model(script)
    with serving(shell, "--model", model, "--name", "mine", "--max-calls", "10") as (url, key):
        text = "x" * 40_000
        parts = [{"type": "text", "text": each} for each in (text, "How long?")]
        status, reply = post(
            url, {"model": "any", "messages": [{"role": "user", "content": parts}]}, key
        )
        assert (status, reply["model"]) == (200, "mine")
        assert reply["choices"][0]["message"]["content"] == "40000"
        assert post(url, {"messages": [], "model": "any"}, "rk-guessed")[0] == 401
        status, wrong = post(url, {"messages": [], "model": "any"}, key)
        assert (status, wrong["error"]["param"]) == (400, "messages")
    shown = json.loads(shell.run("show", "last", "--json").out)
    assert (shown["id"], shown["stop"]) == (reply["ramify"]["run"], "final")


def test_keys_are_checked_and_their_budget_persists(shell: Shell) -> None:
    model = shell.model([{"match": "", "reply": "hello"}])
    keys = shell.write("keys.toml", '[alice]\nkey = "sk-alice"\nmax-tokens = 30000\n')
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with serving(shell, "--model", model, "--keys", keys) as (url, _):
        assert post(url, asked, "")[0] == 401
        assert post(url, asked, "sk-alice")[0] == 200
    spent = shell.folder / "store" / "served.json"
    found = json.loads(spent.read_text())["alice"]
    assert (found["runs"], found["held_tokens"]) == (1, 0)
    spent.write_text(json.dumps({"alice": {"tokens": 30000}}))
    with serving(shell, "--model", model, "--keys", keys) as (url, _):
        status, error = post(url, asked, "sk-alice")
        assert (status, error["error"]["code"]) == (429, "insufficient_quota")
    assert "sk-alice" not in spent.read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "no model is set"),
        (["--model", "openai:x"], "OPENAI_API_KEY"),
        (["--model", "scripted:nowhere.json"], "nowhere.json"),
        (
            ["--model", "scripted:script.json", "--host", "0.0.0.0", "--open-to-this-machine"],
            "0.0.0.0 is reachable from other machines",
        ),
        (["--model", "scripted:script.json", "--unix-socket"], "remove --port"),
        (["--model", "scripted:script.json", "--api-key", "k"], "did you mean --key-file?"),
        (
            ["--model", "scripted:script.json", "--key-file", "nowhere"],
            "--key-file nowhere cannot be read",
        ),
        (
            ["--model", "scripted:script.json", "--keys", "nowhere.toml"],
            "nowhere.toml cannot be read",
        ),
        (
            ["--model", "scripted:script.json", "--max-body", "big"],
            "--max-body 'big' is not understood",
        ),
    ],
)
def test_setup_errors_exit_with_usage_code(shell: Shell, options: list[str], says: str) -> None:
    shell.model([{"match": "", "reply": "hello"}])
    done = shell.run("serve", "--port", "0", *options)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_port_in_use_is_reported(shell: Shell) -> None:
    model = shell.model([{"match": "", "reply": "hello"}])
    with serving(shell, "--model", model) as (url, _):
        port = url.split(":")[2].split("/")[0]
        done = shell.run("serve", "--model", model, "--port", port)
        assert done.code == 2
        assert f"cannot listen on 127.0.0.1:{port}" in done.err


@pytest.mark.parametrize(
    ("words", "says"), [(["--max-runs", "0"], "at least 1"), (["--grace", "-1"], "at least 0")]
)
def test_out_of_range_options_are_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_MODEL", "openai:x")
    with pytest.raises(UsageError, match=says):
        load_subcommand("serve").call(words)


def test_meter_serves_one_model_and_prints_what_was_spent(shell: Shell) -> None:
    script = shell.folder / "replies.json"
    script.write_text(json.dumps([{"match": "", "reply": "four words of reply"}]))
    options = ("serve", "--meter", f"scripted:{script}", "--port", "0", "--max-calls", "2")
    process = shell.start(*options)
    assert process.stderr is not None
    try:
        url = process.stderr.readline().decode().split(" at ")[1].split()[0]
        key = process.stderr.readline().decode().split()[1]
        record = Path(process.stderr.readline().decode().split()[-1])
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", body, headers)
        for _ in range(2):
            with urllib.request.urlopen(request) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 5
        with pytest.raises(urllib.error.HTTPError, match="402"):
            urllib.request.urlopen(request)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0
        assert process.stderr.read().decode() == (
            "default: 2 requests, 2 + 10 tokens, $0.00, 1 refused\n"
        )
        assert record.stat().st_mode & 0o777 == 0o600
        assert record.read_text().count('"type":"request"') == 3
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stderr.close()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--meter", "openai:m", "--model", "openai:m"], "--meter names the model: remove --model"),
        (["--meter-record", "a.jsonl"], "--meter-record needs --meter: add it"),
        (["--meter", "openai:m", "--open-to-this-machine"], "each caller of a meter needs a key"),
        (["--meter", "openai:m", "--sub-model", "openai:n"], "--meter serves one model"),
        (["--meter", "openai:unpriced", "--max-cost", "1"], "has no known price"),
    ],
)
def test_wrong_options_of_a_meter(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_subcommand("serve").call(words)
