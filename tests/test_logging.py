"""Records of the ``ramify`` loggers: one for each event, with the id of its run and no secret."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import RLM, Limits, SandboxSpec, Store
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.limits import BudgetAmount, BudgetLedger
from ramify.log_handlers import ROOMS, RUN_LOG, FileLogHandler, parse_log_levels
from ramify.logging import ComponentLogger, attached_handler, run_log_context
from ramify.progress import track_progress
from ramify.testing.reply_script import rate_limited, server_error, unreachable
from ramify.testing.scripted_client import ScriptedClient
from ramify.testing.scripted_server import ScriptedServer
from ramify.train.execute import train
from ramify.types.event import NoteAdded
from ramify.types.message import Usage
from tests.clients.helpers import Books, request
from tests.log_records import KEY, SANDBOX, of, run_rlm
from tests.train.small import small

# --- one record for each event


@pytest.mark.parametrize("failure", [rate_limited(0.01), server_error()])
def test_retry_is_recorded_once(failure: Any, records: list[logging.LogRecord]) -> None:
    async def main() -> Any:
        async with (
            ScriptedServer([failure, "FINAL(1)"]) as server,
            RLM(f"openai:test@{server.url}", sandbox=SANDBOX) as rlm,
        ):
            return await rlm.acompletion("some text", "?")

    result = asyncio.run(main())
    assert of(records, "retry") == [("ramify.clients", result.run_id)]


def test_reached_limit_is_recorded(records: list[logging.LogRecord]) -> None:
    client = ScriptedClient(["```repl\nx = 1\n```"] * 9)
    result = run_rlm(client, limits=Limits(max_turns=2))
    assert of(records, "limit") == [("ramify.engine", result.run_id)]


def test_session_death_is_recorded(records: list[logging.LogRecord]) -> None:
    async def main() -> Any:
        code = "```repl\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)\n```"
        spec = SandboxSpec(provider="process", allow_weaker=True)
        async with RLM(ScriptedClient([code, "FINAL(1)"]), sandbox=spec) as rlm:
            return await rlm.acompletion("x" * 100_000, "?")

    result = asyncio.run(main())
    assert of(records, "session_died") == [("ramify.engine", result.run_id)]


def wait_records(found: list[logging.LogRecord]) -> list[tuple[str, str]]:
    """(run, reason) of each record of a wait."""
    return [
        (record.run, record.fields["reason"])  # type: ignore[attr-defined]
        for record in found
        if record.event == "wait"  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize(("seconds", "num"), [(1.3, 2), (0.05, 0)])
def test_rate_limit_wait_is_recorded(
    seconds: float, num: int, records: list[logging.LogRecord]
) -> None:
    """The request that was limited, and a later one."""

    async def main() -> None:
        async with ScriptedServer([rate_limited(seconds), "a", "b"]) as server:
            pool = RateLimitedClientPool(base_urls={"openai": server.url}, keys={"openai": KEY})
            client = pool.client("openai:m")
            first = asyncio.ensure_future(pool.ask(client, request(), Books()))
            while not of(records, "retry"):
                await asyncio.sleep(0.01)
            await asyncio.gather(first, pool.ask(client, request(), Books()))
            await pool.close()

    with run_log_context("mine"):
        asyncio.run(main())
    assert of(records, "retry") == [("ramify.clients", "mine")]
    assert wait_records(records) == [("mine", "rate_limit")] * num


def test_budget_wait_is_recorded(records: list[logging.LogRecord]) -> None:
    """A second request fits into the budget only after the first has cost less than it might."""
    ledger, amount = BudgetLedger(Limits(max_tokens=100), priced=False), BudgetAmount(1, 80)

    class Account(Books):
        async def reserve(self) -> None:
            await ledger.reserve(amount)
            await super().reserve()

        def settle(self, usage: Usage, cost: float | None) -> None:
            ledger.settle(amount, Usage(5, 5, calls=1), cost)
            super().settle(usage, cost)

    async def main() -> None:
        async with ScriptedServer(["a", "b"], latency_s=1.2) as server:
            pool = RateLimitedClientPool(base_urls={"openai": server.url}, keys={"openai": KEY})
            asks = [pool.ask(pool.client("openai:m"), request(), Account()) for _ in range(2)]
            await asyncio.gather(*asks)
            await pool.close()

    with run_log_context("mine"):
        asyncio.run(main())
    assert wait_records(records) == [("mine", "budget")]


def test_wait_for_unreachable_model_is_recorded(records: list[logging.LogRecord]) -> None:
    async def no_time(seconds: float) -> None:
        pass

    async def main() -> None:
        client = ScriptedClient([*[unreachable()] * 5, "a"])
        pool = RateLimitedClientPool(sleep=no_time, rng=random.Random(0))
        await pool.ask(pool.register(client), request(), Books(), patience_s=300.0)

    with run_log_context("mine"):
        asyncio.run(main())
    assert of(records, "retry") == [("ramify.clients", "mine")]
    assert wait_records(records) == [("mine", "outage")]


def test_warning_record_has_location_of_its_caller(records: list[logging.LogRecord]) -> None:
    with pytest.warns(UserWarning, match="odd") as warned:
        ComponentLogger("engine").issue_python_warning("odd")
    ComponentLogger("engine").warning("warning", "odd")
    lines = [(record.filename, record.funcName) for record in records]
    assert lines == [("test_logging.py", "test_warning_record_has_location_of_its_caller")] * 2
    assert (warned[0].filename, warned[0].lineno) == (records[0].pathname, records[0].lineno)


def test_training_run_writes_log_and_continues_it_on_resume(
    tmp_path: Path, records: list[logging.LogRecord]
) -> None:
    out = tmp_path / "mine"
    run = small(warmup=None)

    learned: list[int] = []

    class Stopped(Exception):
        pass

    def stop(measured: Any) -> None:
        learned.extend(
            [measured.step] if (measured.stage, "loss" in measured.values) == ("rl", True) else []
        )
        if len(learned) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        train(run, out, listener=stop)
    first = (out / RUN_LOG).read_text()
    assert "Traceback" in first
    train(run, out, resume=out)
    whole = (out / RUN_LOG).read_text()
    assert whole.startswith(first)
    events = [line.split()[4].rstrip(":") for line in whole.splitlines()]
    assert (events.count("run_started"), events.count("run_failed")) == (2, 1)
    assert (events[-1], events.count("run_ended")) == ("run_ended", 1)
    assert all(" mine" in line for line in whole.splitlines())
    synced = [record for record in records if record.event == "weight_sync"]  # type: ignore[attr-defined]
    versions = [record.fields["version"] for record in synced]  # type: ignore[attr-defined]
    assert {record.run for record in synced} == {"mine"}  # type: ignore[attr-defined]
    num = first.count(" weight_sync: ")
    for each in (versions[:num], versions[num:]):  # one record for each version of each process
        assert each == list(range(each[0], each[0] + len(each)))
    saved = list(of(records, "checkpoint"))
    assert saved == [("ramify.train", "mine")] * len(saved) != []


def test_invalid_configuration_leaves_no_log(tmp_path: Path) -> None:
    with pytest.raises(ramify.ConfigError):
        train(small(scaffold="no-such-scaffold"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- warnings


def test_the_warnings_of_a_run_are_in_its_journal(tmp_path: Path) -> None:
    def fails(event: Any) -> None:
        raise OSError("the listener's disk is full")

    store = Store(tmp_path)

    async def main() -> Any:
        async with RLM(ScriptedClient(["FINAL(1)"]), sandbox=SANDBOX, store=store) as rlm:
            return await rlm.acompletion("text", "?", on_event=fails)

    with pytest.warns(UserWarning, match="listener"):
        result = asyncio.run(main())
    notes = [event for event in store.events(result.run_id) if isinstance(event, NoteAdded)]
    text = (
        'an event listener failed and is not called again: OSError("the listener\'s disk is full")'
    )
    assert [(note.call, note.text, note.is_warning) for note in notes] == [
        ("0", f"warning: {text}", True)
    ]
    assert store.load(result.run_id).warnings == [text]
    shown = run_cli("show", str(next(tmp_path.rglob(f"{result.run_id}*.jsonl"))))
    assert f"warning: {text}" in shown.stdout


# --- secrets


"""No pattern finds it, and URLs, JSON and ``repr`` write it in other ways."""


# --- files, levels and settings


def test_progress_is_logged_only_if_its_room_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in ("debug", "progress=info"):
        monkeypatch.setenv("RAMIFY_LOG", setting)
        with (
            attached_handler(FileLogHandler(tmp_path / setting)),
            run_log_context("mine"),
            track_progress("reading", total=3, unit="files") as task,
        ):
            for _ in range(3):
                task.advance()
    assert not (tmp_path / "debug").exists()
    lines = [
        line.split(" ", 3)[3] for line in (tmp_path / "progress=info").read_text().splitlines()
    ]
    assert [line.partition("  ")[0] for line in lines] == [
        "mine progress: reading: 0 of 3 files",
        "mine progress: reading: 3 of 3 files",
    ]


def test_warnings_about_sources_are_in_the_journal(tmp_path: Path) -> None:
    folder, store = tmp_path / "folder", Store(tmp_path / "store")
    folder.mkdir()
    (folder / "a.txt").write_text("text " * 100)
    (folder / "b.txt").write_bytes(b"caf\xe9 " * 100)
    (folder / "c.bin").write_bytes(bytes(range(256)))

    async def main() -> Any:
        async with RLM(ScriptedClient(["FINAL(1)"]), sandbox=SANDBOX, store=store) as rlm:
            return await rlm.acompletion(ramify.load(folder), "?")

    assert store.load(asyncio.run(main()).run_id).warnings == [
        "not loaded (1), is binary: c.bin",
        "b.txt: not UTF-8, read as Windows-1252",
    ]


def test_an_evaluation_keeps_a_log_beside_its_results(tmp_path: Path) -> None:
    words = [
        "eval",
        "needle",
        "--items",
        "1",
        "--model",
        "tiny",
        "--max-turns",
        "2",
        "--no-validate",
    ]
    done = run_cli(*words, "--allow-weaker", "--sandbox", "inprocess", RAMIFY_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "evaluations").glob("*.jsonl")
    events = [line.split()[3:5] for line in results.with_suffix(".log").read_text().splitlines()]
    assert [events[0], events[-1]] == [
        [results.stem, "run_started:"],
        [results.stem, "run_ended:"],
    ]


def test_verbose_prints_one_line_per_retry(tmp_path: Path) -> None:
    async def main() -> subprocess.CompletedProcess[str]:
        async with ScriptedServer([server_error(500, "it fell over"), "FINAL(1)"]) as server:
            model = f"openai:m@{server.url}"
            return await asyncio.to_thread(
                run_cli, "ask", "why?", "-v", "--model", model, RAMIFY_HOME=str(tmp_path)
            )

    done = asyncio.run(main())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("it fell over") == 1
    assert done.stderr.count("trying again") == 1


def test_log_lines_are_bounded_and_single(tmp_path: Path) -> None:
    with (
        attached_handler(FileLogHandler(tmp_path / "log")),
        run_log_context("a"),
        run_log_context("b"),
    ):
        ComponentLogger("train").info("x", "é\n\x1b[2J" * 100_000, text="y" * 100_000)
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert len(line) < 12_000
    assert " train a/b x: é | " in line
    assert "\x1b" not in line


def test_json_log_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMIFY_LOG_FORMAT", "json")
    with (
        attached_handler(FileLogHandler(tmp_path / "log")),
        run_log_context("outer"),
        run_log_context("inner"),
    ):
        ComponentLogger("train").info("checkpoint", "saved", step=3, path=tmp_path)
    row = json.loads((tmp_path / "log").read_text())
    del row["at"]
    assert row == {
        "level": "info",
        "logger": "ramify.train",
        "event": "checkpoint",
        "run": "inner",
        "outer_runs": ["outer"],
        "message": "saved",
        "fields": {"step": 3, "path": str(tmp_path)},
    }


@pytest.mark.parametrize(
    ("setting", "levels", "problem"),
    [
        ("debug", {"": 10}, ""),
        ("engine=debug, train=info", {"engine": 10, "train": 20}, ""),
        ("ramify=info,ramify.serve=ERROR", {"": 20, "serve": 40}, ""),
        ("", {}, ""),
        ("enigne=debug,info", {"": 20}, "'enigne=debug' is ignored; .* did you mean 'engine'"),
        ("engine=loud", {}, "'engine=loud' is ignored; .* known are debug, info, warning, error"),
        ("engine", {}, "'engine' is ignored; write LEVEL or ROOM=LEVEL"),
        ("=debug", {}, "'=debug' is ignored"),
    ],
)
def test_log_setting_is_parsed(setting: str, levels: dict[str, int], problem: str) -> None:
    found, problems = parse_log_levels(setting)
    assert found == levels
    assert len(problems) == bool(problem)
    if problem:
        assert re.search(problem, problems[0])


def run_cli(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ramify", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )


def test_each_logger_of_the_package_can_be_set_by_name() -> None:
    package = Path(ramify.__file__).parent
    sources = (path.read_text("utf-8") for path in package.rglob("*.py"))
    named = {name for text in sources for name in re.findall(r'ComponentLogger\("(\w+)"', text)}
    assert len(named) > 10
    assert named <= set(ROOMS)


def test_invalid_log_setting_is_one_line_and_command_continues(tmp_path: Path) -> None:
    done = run_cli("runs", "-vv", RAMIFY_LOG="enigne=debug", RAMIFY_HOME=str(tmp_path))
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == (
        "ramify: RAMIFY_LOG: 'enigne=debug' is ignored; write LEVEL or ROOM=LEVEL, as in "
        "engine=debug,train=info: did you mean 'engine'?"
    )
    assert done.stderr.count("RAMIFY_LOG") == 1


def test_invalid_log_format_is_one_line(tmp_path: Path) -> None:
    done = run_cli("runs", RAMIFY_LOG_FORMAT="jsn", RAMIFY_HOME=str(tmp_path))
    first = done.stderr.splitlines()[0]
    assert (done.returncode, first) == (
        0,
        "ramify: RAMIFY_LOG_FORMAT: 'jsn' is ignored; write json, or text",
    )


def test_run_log_continues_when_an_application_configures_logging(tmp_path: Path) -> None:
    """``dictConfig`` closes all handlers of the process, and disables the loggers it does not
    name."""
    script = (
        "import logging.config, sys; from ramify.log_handlers import FileLogHandler;"
        "from ramify.logging import ComponentLogger, attached_handler;"
        "root = {'handlers': ['stderr'], 'level': 'WARNING'};"
        "stderr = {'class': 'logging.StreamHandler'};\n"
        "with attached_handler(FileLogHandler(sys.argv[1])):\n"
        "    ComponentLogger('train').info('before', 'a')\n"
        "    logging.config.dictConfig({'version': 1, 'root': root, 'handlers': {'stderr': stderr}})\n"
        "    ComponentLogger('train').info('after', 'b')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[4] for line in lines] == ["before:", "after:"]
    assert done.stderr == ""


def test_plain_record_of_a_plugin_is_bounded_and_never_ends_a_run(tmp_path: Path) -> None:
    log, wrong = logging.getLogger("ramify.plugin"), {"event": "a\nb", "fields": {"api_key": KEY}}
    with attached_handler(FileLogHandler(tmp_path / "log")), run_log_context("mine"):
        log.warning("%d of %d", 1)
        log.warning("x" * 100_000, extra=wrong)
        log.warning("third", extra={"fields": "no dict"})
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split(" ", 2)[2][:40] for line in lines] == [
        "plugin mine message: %d of %d (1,)",
        "plugin mine a | b: " + "x" * 21,
        "plugin mine message: third",
    ]
    assert len(lines[1]) < 5_000
    assert KEY not in lines[1]


def test_importing_adds_a_null_handler_and_only_logging() -> None:
    script = (
        "import sys; before = set(sys.modules); import logging; known = set(sys.modules);"
        "import importlib, warnings, __future__; known |= set(sys.modules);"
        "import ramify;"
        "print(sorted(n for n in set(sys.modules) - known if not n.startswith('importlib')),"
        "[type(h).__name__ for h in logging.getLogger('ramify').handlers])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['ramify'] ['NullHandler']\n"


# --- a command that is stopped


def test_hangup_of_closed_terminal_is_recorded(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from tests.train.small import small\n"
        "import msgspec\n"
        "def run():\n"
        "    made = small(warmup=None)\n"
        "    rl = msgspec.structs.replace(made.rl, steps=10_000)\n"
        "    return msgspec.structs.replace(made, rl=rl)\n"
    )
    out = tmp_path / "out"
    # Under nohup, processes are started with SIGHUP ignored, and a run keeps that.
    with_hangup = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    train = ["-m", "ramify", "train", str(recipe), "--out", str(out), "--plain"]
    process = subprocess.Popen(
        [sys.executable, "-c", with_hangup, *train],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert process.stdout is not None
    assert process.stderr is not None

    def until(is_so: Callable[[str], bool]) -> str:
        while process.poll() is None:
            text = (out / RUN_LOG).read_text() if (out / RUN_LOG).exists() else ""
            if is_so(text):
                return text
            time.sleep(0.05)
        raise AssertionError(process.returncode, process.stderr.read())  # type: ignore[union-attr]

    try:
        until(lambda text: " step: " in text)
        process.stdout.close()
        process.stderr.close()  # every note from now on is a broken pipe
        steps = until(lambda text: True).count(" weight_sync: ")
        until(lambda text: text.count(" weight_sync: ") > steps + 2)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP  # after saving
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    last = (out / RUN_LOG).read_text().splitlines()[-1]
    assert re.search(
        r" run_stopped: the run was ended by SIGHUP; it is saved at step \d+; continue with: "
        rf"ramify train --resume {out}  signal=SIGHUP$",
        last,
    )


# --- rules for the code


def test_no_signature_prints_and_only_one_module_makes_loggers() -> None:
    package = Path(ramify.__file__).parent
    wrong = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        if "= print," in text or "= print)" in text or "= print\n" in text:
            wrong.append(str(path.relative_to(package)))
        if 'getLogger("ramify' in text and path.name not in ("logging.py", "__init__.py"):
            wrong.append(str(path.relative_to(package)))
        if "getLogger(__name__)" in text:
            wrong.append(str(path.relative_to(package)))
    assert wrong == []
    assert not [
        parameter
        for parameter in inspect.signature(train).parameters.values()
        if parameter.default is print
    ]
