"""``ramify ask`` with incomplete or missing replies: its output, its exit code, and a later resume."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest

from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message, Reply
from tests.cli.helpers import Done, Shell

NUMBER = '{"type": "integer"}'


def ask(shell: Shell, script: list[Any], *arguments: str) -> Done:
    """Run ``ramify ask`` with a scripted server on loopback."""

    async def main() -> Done:
        async with ScriptedServer(script) as server:
            return await asyncio.to_thread(
                shell.run, "ask", "-m", f"openai:m@{server.url}", *arguments
            )

    return asyncio.run(main())


def said(done: Done) -> list[str]:
    """What a command wrote to stderr, without the warning that its model has no known price.

    The warning is there once for each address, and a port may come again.
    """
    return [line for line in done.err.splitlines() if "has no known price, so the" not in line]


def reply_with_finish(text: str, finish: Any) -> Reply:
    return Reply(Message("assistant", text), finish=finish)


def test_truncated_answer_is_printed_and_exits_with_code_3(shell: Shell) -> None:
    done = ask(shell, ["A long story " * 100], "tell me", "--max-reply-tokens", "6")
    why, summary = said(done)
    assert (done.code, done.out) == (3, ("A long story " * 2)[:24] + "\n")
    assert "openai:m" in why
    assert why.endswith(
        "the reply was cut at its limit of 6 tokens; ask for less, or raise --max-reply-tokens"
    )
    assert summary.startswith("max_tokens · 1 turn, 1 request")


def test_truncated_answer_as_json_has_stop_max_tokens(shell: Shell) -> None:
    done = ask(shell, [reply_with_finish("half", "length")], "tell me", "--json")
    answer = json.loads(done.out)
    assert (done.code, answer["answer"], answer["stop"]) == (3, "half", "max_tokens")
    assert "cut at its limit" in answer["error"]


def test_truncated_answer_does_not_satisfy_a_schema(shell: Shell) -> None:
    done = ask(shell, [reply_with_finish("12", "length")], "how many?", "--answer-schema", NUMBER)
    assert (done.code, done.out) == (4, "")
    assert "cut at its limit" in done.err


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (reply_with_finish("```repl\nx = [1,", "length"), "cut at its limit of 8192 tokens"),
        (
            reply_with_finish("", "stop"),
            "3 replies in a row had neither code nor FINAL(…), so the run has no answer",
        ),
        (
            reply_with_finish("```repl\nFINAL(None)\n```", "stop"),
            "the model gave None as its final answer",
        ),
    ],
)
def test_reason_for_missing_answer_is_printed_once(shell: Shell, reply: Reply, why: str) -> None:
    shell.write("log.txt", "abc")
    done = ask(shell, [reply] * 9, "how long?", "log.txt", "--no-direct")
    _, error, summary = said(done)
    assert (done.code, done.out) == (4, "")
    assert error.startswith("ramify: no answer: ")
    assert why in error
    assert " · run " in summary


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--max-turns", "2"],
            "no answer: max_turns: 2 of 2 turns were used, .*: raise --max-turns",
        ),
        (["--max-calls", "1"], "no answer: max_calls: 0 of 1 requests .*: raise --max-calls"),
        (["--max-tokens", "500"], "nothing was asked: .* 500 of 500 were left: raise --max-tokens"),
        (["--max-turns", "0"], "limit --max-turns=0 allows nothing: give a positive number, or .*"),
        (["--memory", "1"], "sandbox --memory is 1, too little for a Python session: .*"),
        (["--patience=-1"], "limit --patience=-1.0 allows nothing: .*"),
    ],
)
def test_errors_name_options_and_not_fields(shell: Shell, options: list[str], why: str) -> None:
    shell.write("log.txt", "abc")
    script = ["```repl\nprint(1)\n```"] * 9
    arguments = ["how long?", "log.txt", "--no-direct", "--answer-schema", NUMBER, *options]
    done = shell.ask(script, *arguments, "--json")
    [error] = [line for line in done.err.splitlines() if line.startswith("ramify: ")]
    assert re.fullmatch(f"ramify: {why}", error)
    if done.out:  # its fields keep their names
        assert f"raise {options[0][2:].replace('-', '_')}" in json.loads(done.out)["error"]


def test_failed_run_can_be_continued_with_another_model(shell: Shell) -> None:
    """An unknown model, for example, fails again in the same way."""
    failed = shell.ask([], "hm?")
    hint = r"continue this run with: ramify ask --resume (\S+), and with --model NAME for another model"
    assert failed.code == 1
    [run] = re.findall(hint, failed.err)
    other = shell.model(["yes"], "other.json")
    continued = shell.run("ask", "--resume", run, "--model", other)
    assert (continued.code, continued.out) == (0, "yes\n")
    again = shell.run("ask", "--resume", run, "--model", other)
    assert (again.code, again.out) == (0, "yes\n")
    assert "no model is asked, so --model is ignored" in again.err


@pytest.mark.parametrize("text", ["", "The first half"])
def test_content_filtered_answer_is_an_error(shell: Shell, text: str) -> None:
    done = ask(shell, [reply_with_finish(text, "content_filter")], "tell me")
    assert (done.code, done.out) == (1, "")
    assert "a content filter stopped the reply (content_filter)" in said(done)[0]


def free_local_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("command", ["ask", "map", "plan"])
def test_local_server_that_was_not_started_ends_the_command_before_it_begins(
    shell: Shell, command: str
) -> None:
    url = free_local_url()
    shell.write("a.csv", "a,b\n1,2\n")
    settings = f'[models.own]\nmodel = "openai:m"\nbase-url = "{url}"\n'
    shell.write("config/ramify/config.toml", settings)
    arguments = {"plan": ["--yes"], "map": ["--out", "out.jsonl"]}.get(command, [])
    for model in (f"openai:m@{url}/v1", "own"):
        done = shell.run(command, "-m", model, "how?", "a.csv", *arguments)
        assert (done.code, done.out) == (2, ""), done
        assert f"no server is running at {url} (connection refused for 3 s)" in done.err
        assert done.err.endswith("give --patience SECONDS\n")


def test_without_patience_a_request_is_sent_once(shell: Shell) -> None:
    done = shell.run("ask", "-m", f"openai:m@{free_local_url()}", "--patience", "0", "how?")
    assert (done.code, done.out) == (5, "")
    assert "cannot reach" in done.err
    assert "waiting" not in done.err


def test_waiting_line_names_the_option(shell: Shell) -> None:
    done = shell.run("ask", "-m", f"openai:m@{free_local_url()}", "--patience", "3", "how?")
    (waiting,) = [line for line in done.err.splitlines() if line.startswith("waiting: ")]
    assert waiting.endswith("s at most); --patience sets for how long")


def test_run_suspended_by_connection_failure_can_be_resumed(shell: Shell) -> None:
    async def main() -> tuple[Done, Done]:
        script = ["fine"]
        async with ScriptedServer(script) as server:
            url, port = server.url, int(server.url.rsplit(":", 1)[1].split("/")[0])
        failed = await asyncio.to_thread(
            shell.run, "ask", "-m", f"openai:m@{url}", "--patience", "0.1", "how?"
        )
        async with ScriptedServer(script, port=port):
            return failed, await asyncio.to_thread(shell.run, "ask", "--resume", "last")

    failed, resumed = asyncio.run(main())
    assert (failed.code, failed.out) == (5, "")
    # The wait before a second attempt is random; a short one fits within the patience.
    suspended, total = [line for line in said(failed) if not line.startswith("waiting: ")]
    assert re.fullmatch(
        r"ramify: suspended after [\d.]+ m?s: openai:m@.*: cannot reach .* \(connection refused\); "
        r"continue with: ramify ask --resume \S+-how",
        suspended,
    )
    assert total.startswith("suspended · ")
    assert (resumed.code, resumed.out) == (0, "fine\n")


def test_a_model_without_a_price_is_warned_about_before_it_is_asked(shell: Shell) -> None:
    model = ("-m", "openai:gpt-5-minni@http://127.0.0.1:9/v1", "--patience", "0.1")
    warning, *_ = shell.run("ask", *model, "how?").err.splitlines()
    assert warning.startswith("openai:gpt-5-minni@http://127.0.0.1:9/v1 has no known price, so the")
