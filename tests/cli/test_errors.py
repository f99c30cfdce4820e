"""Bad input gets a one-line error that names the cause and the remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.pip_install_command import install_command
from tests.cli.helpers import COMMAND, Shell

MODEL = ("-m", "scripted:script.json")
WORK = [*MODEL, "q", "log.txt", "--no-direct"]
CASES = {
    "unknown provider": (
        ["-m", "opnai:gpt-5", "q"],
        2,
        r"unknown provider 'opnai' .*did you mean 'openai'\?",
    ),
    "a model without a provider": (
        ["-m", "gpt-5", "q"],
        2,
        r"'gpt-5' has no provider: write provider:model",
    ),
    "missing key": (["-m", "openai:gpt-5", "q"], 2, r"no API key: set OPENAI_API_KEY"),
    "missing script": (
        ["-m", "scripted:nowhere.json", "q"],
        2,
        r"script nowhere.json: No such file",
    ),
    "nothing listens": (
        ["-m", "openai:m@http://127.0.0.1:9/v1", "--patience", "1", "q"],
        5,
        r"cannot reach http://127\.0\.0\.1:9",
    ),
    "unreadable path": ([*MODEL, "q", "nowhere.txt"], 2, r"nowhere.txt does not exist"),
    "nearest path": ([*MODEL, "q", "log.tx"], 2, r"did you mean log.txt\?"),
    "a pipe without a writer": (
        [*MODEL, "q", "pipe"],
        2,
        r"pipe is a pipe without a writer: start the program",
    ),
    "empty file": ([*MODEL, "q", "empty.txt"], 2, r"empty.txt is empty"),
    "binary file": ([*MODEL, "q", "binary.bin"], 2, r"binary.bin .*binary"),
    "invalid schema": (
        [*MODEL, "q", "log.txt", "--answer-schema", '{"type": "integr"}'],
        2,
        r"schema is not valid at type: unknown 'integr': did you mean 'integer'\? known: array, ",
    ),
    "schema that does not parse": (
        [*MODEL, "q", "--answer-schema", "{oops"],
        2,
        r"\{oops does not parse",
    ),
    "schema that is not an object": (
        [*MODEL, "q", "--answer-schema", "list.json"],
        2,
        r"list.json is a list",
    ),
    "missing schema file": (
        [*MODEL, "q", "--answer-schema", "no.json"],
        2,
        r"schema no.json cannot be read",
    ),
    "a type for a schema": (
        [*MODEL, "q", "--answer-schema", "strin"],
        2,
        r"""no such file; correct the path, or give the schema itself, .* '\{"type": "string"\}'""",
    ),
    "limit of zero": ([*MODEL, "q", "--max-calls", "0"], 2, r"limit --max-calls=0 allows nothing"),
    "negative cost": (
        [*MODEL, "q", "--max-cost", "-1"],
        2,
        r"limit --max-cost=-1.0 allows nothing",
    ),
    "a limit that cannot be enforced": (
        ["--model", "openai:unlisted@http://127.0.0.1:9/v1", "q", "--max-cost", "1"],
        2,
        r"no known price",
    ),
    "unknown sandbox": (
        [*MODEL, "q", "log.txt", "--no-direct", "--sandbox", "proces"],
        2,
        r"did you mean 'process'\?",
    ),
    "no such mount": (
        [*WORK, "--mount", "nowhere:/data"],
        2,
        r"mounts: '.*/nowhere' does not exist on this machine",
    ),
    "a mount without a place": (
        [*WORK, "--mount", "log.txt:here"],
        2,
        r"cannot be mounted at 'here': give an absolute path",
    ),
    "a mount of everything": (
        [*WORK, "--mount", "/:/all"],
        2,
        r"mounts: '/' may not be mounted: give a folder or file that holds only your data",
    ),
    "a mount without isolation": (
        [*WORK, "--sandbox", "process", "--mount", "log.txt"],
        2,
        r"'process' does not support mounts",
    ),
    "no such package": (
        [*WORK, "--package", "numpi"],
        2,
        r"no package 'numpi'; install it into the environment of",
    ),
    "a package by another name": (
        [*WORK, "--package", "pytest-timeout"],
        2,
        r"it is imported as 'pytest_timeout'",
    ),
    "too much memory": (
        [*WORK, "--memory", "900TB"],
        2,
        r"sandbox --memory is .*, more than the .* bytes of this machine",
    ),
    "too little memory": (
        [*WORK, "--memory", "1MB"],
        2,
        r"too little for a Python session: give at least 67,108,864",
    ),
    "memory that is not a size": (
        [*WORK, "--memory", "lots"],
        2,
        r"--memory 'lots' is not understood: write it as 2GB",
    ),
    "unknown tier": ([*WORK, "--tier", "D"], 2, r"sandbox tier is 'D': give 'A', 'B' or 'C'"),
    "a sandbox without its extra": (
        [*WORK, "--sandbox", "e2b"],
        1,
        r"pip install .*\[e2b\]'",
    ),
    "unknown scaffold": ([*MODEL, "q", "--scaffold", "minimum"], 2, r"did you mean 'minimal'\?"),
    "citing nothing": ([*MODEL, "q", "--cite"], 2, r"citations need a context"),
    "a cache without a store": ([*MODEL, "q", "--cache", "--no-store"], 2, r"remove --no-store"),
    "unknown option": (
        [*MODEL, "q", "--max-csot", "1"],
        2,
        r"unknown option --max-csot: did you mean --max-cost\?",
    ),
    "no key, before a source is read": (
        ["--model", "anthropic:claude-opus-5", "q", "nothing.txt"],
        2,
        r"anthropic:claude-opus-5: no API key: set ANTHROPIC_API_KEY",
    ),
    "no key of a sub-model, before a source is read": (
        [*MODEL, "--sub-model", "groq:m", "q", "nothing.txt"],
        2,
        r"groq:m: no API key: set GROQ_API_KEY",
    ),
    "a script that is not there, before a source is read": (
        ["--model", "scripted:nothing.json", "q", "nothing.txt"],
        2,
        r"script nothing.json: No such file or directory",
    ),
    "one plain call over a table": (
        [*MODEL, "How many?", "table.csv", "--mode", "direct"],
        2,
        r"one plain call \(--mode direct, direct='always'\) cannot use the tools or session setup .*--mode free",
    ),
    "swapped letters": (
        ["q", "--modle", "m"],
        2,
        r"unknown option --modle: did you mean --model\?",
    ),
    "the other form of a switch": (
        [*MODEL, "q", "--no-stroe"],
        2,
        r"unknown option --no-stroe: did you mean --no-store\?",
    ),
    "not a number": (
        [*MODEL, "q", "--max-calls", "many"],
        2,
        r"--max-calls 'many' is not a whole number: write it as 10",
    ),
    "not a number of dollars": (
        [*MODEL, "q", "--max-cost", "cheap"],
        2,
        r"--max-cost 'cheap' is not a number: write it as 2 or 0.5, without a unit",
    ),
    "no value": ([*MODEL, "q", "--max-cost"], 2, r"--max-cost needs a value"),
    "no question": ([*MODEL], 2, r"no question: ramify ask"),
    "resume with settings": (["--resume", "last", "--branches", "3"], 2, r"remove --branches"),
    "resume of nothing": (["--resume", "last"], 2, r"has no runs"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_one_line_error(shell: Shell, case: str) -> None:
    arguments, code, pattern = CASES[case]
    shell.model(["unused"])
    shell.write("log.txt", "abc")
    shell.write("table.csv", "a,b\n1,2\n")
    shell.write("empty.txt", "")
    shell.write("list.json", "[]")
    (shell.folder / "binary.bin").write_bytes(bytes(range(256)) * 100)
    os.mkfifo(shell.folder / "pipe")
    done = shell.run("ask", *arguments)
    said = [
        line
        for line in done.err.splitlines()
        if line.startswith("ramify: ") and "warning" not in line
    ]
    assert (done.code, done.out, len(said)) == (code, "", 1), done.err
    assert re.search(pattern, said[0]), said[0]
    assert "Traceback" not in done.err


def test_time_limit_during_rate_limit_names_the_last_error(shell: Shell) -> None:
    done = shell.ask(
        [{"fail": "rate_limited", "retry_after_s": 50}, "never"], "q", "--max-seconds", "1"
    )
    assert (done.code, done.out) == (4, "")
    assert (
        "ramify: the run's time is up; before that: call 0, turn 0: scripted:script.json: "
        in done.err
    )


def test_help_names_the_commands_that_begin_with_a_command(shell: Shell) -> None:
    for name, longer in (("runs", "runs check"), ("cluster", "cluster plan")):
        for words in ([name, "--help"], ["help", name]):
            done = shell.run(*words)
            assert (done.code, done.err) == (0, "")
            assert f"  {longer} " in done.out


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["sho"], r"unknown command 'sho': did you mean 'show'\?"),
        (
            ["cluster", "plna"],
            r"unknown command 'cluster': did you mean 'cluster plan' or 'cluster simulate'\?",
        ),
        (["how many?"], r"to ask a question: ramify ask 'how many\?'"),
        (["--versio"], r"unknown option --versio: did you mean --version\?"),
        (["show"], r"give RUN \(see ramify show --help\)"),
        (["show", "a", "b"], r"unexpected argument 'b'"),
        (
            ["runs", "prune", "--keep-last", "3"],
            r"unknown option --keep-last: did you mean --keep\?",
        ),
        (
            ["train", "recipe.py", "--learning-rate", "1e-4"],
            r"unknown option --learning-rate: a field of the run has no dashes, as in rl\.optim",
        ),
    ],
)
def test_wrong_usage_gets_one_line_error(shell: Shell, arguments: list[str], pattern: str) -> None:
    done = shell.run(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert re.search(pattern, done.err), done.err


def test_missing_model_error_suggests_three_ways_to_get_one(shell: Shell) -> None:
    done = shell.run("ask", "how many?")
    assert (done.code, done.out) == (2, "")
    key, local, none = done.err.splitlines()
    assert "OPENAI_API_KEY" in key
    assert "ollama:" in local
    assert "scripts/demo" in none


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server whose first reply is a web page, and whose later ones have no choices."""
    script = '[{"fail": "html"}, ' + ", ".join(['{"fail": "no_choices"}'] * 30) + "]"
    (tmp_path / "served.json").write_text(script)
    command = [sys.executable, "-m", "ramify.testing.scripted_server", "served.json"]
    env = Shell(tmp_path).env
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_server_with_unusable_replies_gets_one_line_error(shell: Shell, server: str) -> None:
    pages = shell.run("ask", "-q", "-m", f"openai:m@{server}", "--patience", "1e-9", "hm?")
    assert (pages.code, pages.out, pages.err.count("\n")) == (5, "", 1)
    assert "text/html" in pages.err
    empty = shell.run("ask", "-q", "-m", f"openai:m@{server}", "--patience", "0.1", "hm?")
    assert (empty.code, empty.out, empty.err.count("\n")) == (5, "", 1)
    assert "choices" in empty.err


def test_internal_error_is_one_line_with_traceback_on_request(shell: Shell) -> None:
    prices = shell.write("prices.json", '{"a": {"input": 1, "output": 2, "window": 0}}')
    broken = shell.write(
        "sitecustomize.py", "import ramify.cli.settings as s; s.config_path = None"
    )
    env = {"PYTHONPATH": f"{shell.folder}:{shell.env['PYTHONPATH']}", "RAMIFY_PRICES": prices}
    assert broken
    done = shell.run("ask", "q", **env)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("ramify: internal error: TypeError: ")
    assert "RAMIFY_DEBUG=1" in done.err
    assert "Traceback" in shell.run("ask", "q", **env, RAMIFY_DEBUG="1").err


@pytest.mark.parametrize(
    ("package", "command"), [("torch", "train --out run"), ("transformers", "cluster plan")]
)
def test_missing_extra_is_named_with_the_command_that_installs_it(
    shell: Shell, package: str, command: str
) -> None:
    missing = shell.folder / "without" / f"{package}.py"
    missing.parent.mkdir()
    missing.write_text(f"raise ModuleNotFoundError('not here', name='{package}')")
    recipe = Path(__file__).parents[2] / "recipes" / "tiny.py"
    env = {"PYTHONPATH": f"{missing.parent}:{shell.env['PYTHONPATH']}"}
    done = shell.run(*command.split(), str(recipe), **env)
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"ramify: this needs {package}: {install_command('train')}"


def test_full_disk_is_not_reported_as_internal_error(shell: Shell) -> None:
    with Path("/dev/full").open("wb") as full:
        process = shell.start("doctor", stdout=full)
    assert re.fullmatch(
        rb"ramify: cannot write to stdout: No space left on device\n",
        process.communicate(timeout=60)[1],
    )
    assert process.returncode == 1


def test_an_answer_that_cannot_be_written_is_in_the_store(shell: Shell) -> None:
    with Path("/dev/full").open("wb") as full:
        process = shell.start("ask", "-m", shell.model(["seven"]), "how many?", stdout=full)
    error, summary = process.communicate(timeout=60)[1].decode().splitlines()
    start = (
        "ramify: the answer cannot be written to stdout: No space left on device; read it with: "
    )
    assert error.startswith(f"{start}ramify show 2")
    assert (process.returncode, summary.partition(" · ")[0]) == (1, "final")
    assert "seven" in shell.run(*error.removeprefix(f"{start}ramify ").split()).out


def test_path_in_place_of_the_question_is_refused(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    for words in (("log.txt",), ("log.txt", "how many?"), (".",)):
        done = shell.ask(["never asked"], *words)
        assert (done.code, done.out) == (2, "")
        assert f"{words[0]} is a file or folder, and the question comes first" in done.err
    assert shell.ask(["three"], "log.txt", "log.txt").out == "three\n"


def test_question_in_another_encoding_is_decoded(shell: Shell) -> None:
    def asked(question: bytes, **env: str) -> str:
        script = shell.model(
            [{"match": "café|漢", "reply": "read"}, {"match": "", "reply": "lost"}]
        )
        command = [os.fsencode(word) for word in (*COMMAND, "ask", "-q", "-m", script)]
        done = subprocess.run(
            [*command, question],
            cwd=shell.folder,
            env={**shell.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        return done.stdout.decode()

    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert asked("café?".encode()) == asked("café?".encode("latin-1")) == "read\n"
    assert asked("漢?".encode(), **ascii_only) == "read\n"


def test_empty_pipe_is_reported(shell: Shell) -> None:
    done = shell.ask(["31"], "how many days has May?", stdin="")
    assert (done.code, done.out) == (0, "31\n")
    assert done.err.startswith("standard input is empty, so the question has no context\n")
    assert "standard input" not in shell.ask(["31"], "how many days has May?").err


def test_help_shows_the_help_of_a_command(shell: Shell) -> None:
    assert shell.run("help", "runs", "rm").out == shell.run("runs", "rm", "--help").out
    assert shell.run("help", "nope").code == 2


def test_early_error_leaves_no_temporary_files(shell: Shell) -> None:
    (shell.folder / "tmp").mkdir()
    shell.write("log.txt", "abc")
    done = shell.run(
        "ask", *MODEL, "--no-direct", "hm?", "log.txt", TMPDIR=str(shell.folder / "tmp")
    )
    assert (done.code, "No such file" in done.err, list((shell.folder / "tmp").iterdir())) == (
        2,
        True,
        [],
    )
