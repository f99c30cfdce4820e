"""Other systems: commands of the user, and the errors of those that cannot run."""

from __future__ import annotations

import ast
import asyncio
import venv
from pathlib import Path

import pytest

from ramify.errors import ConfigError
from ramify.evaluate.run_evaluation import AttemptOutcome
from ramify.evaluate.score_budget_curves import score_by_budget_curves
from ramify.evaluate.systems.attempt import attempt_with_system, parse_system
from ramify.evaluate.systems.base import (
    EvaluatedSystem,
    EvaluatedSystemAnswer,
    MeteredModelAccess,
    TaskItemBudget,
)
from ramify.evaluate.systems.peer_libraries import PEERS, PeerLibrarySystem
from ramify.tasks.base import DatasetTask, Item
from ramify.types.trajectory import Stop

QUESTION = 'Which word is "first", and who\'s \u00e9mile?'


def seat() -> MeteredModelAccess:
    return MeteredModelAccess(
        "item",
        base_url="http://127.0.0.1:9/v1",
        key="rk-secret-of-this-seat",
        model="model",
        window=1000,
        budget=TaskItemBudget(),
        price=None,
    )


def answered(system: EvaluatedSystem, context: str = "text") -> EvaluatedSystemAnswer:
    return asyncio.run(system.answer(QUESTION, context, seat=seat()))


def script(folder: Path, code: str) -> str:
    """A command that runs ``code`` with the question and the context's file."""
    path = folder / "program.py"
    path.write_text(f"import os, pathlib, sys, time\n{code}\n")
    return f"{{python}} {path} {{question}} {{context_file}}"


def test_a_command_gets_the_item_and_its_output_is_the_answer(tmp_path: Path) -> None:
    code = (
        "text = pathlib.Path(sys.argv[2]).read_bytes().decode()\n"
        "print(); print([sys.argv[1], text, os.environ['OPENAI_BASE_URL'],"
        " os.environ['OPENAI_API_KEY'], os.listdir(), 'PYTEST_VERSION' in os.environ, sys.argv[2]])"
    )
    system = parse_system(script(tmp_path, code))
    context = "alpha \u20ac\r\n" * 3
    given = answered(system, context)
    assert given.failure == ""
    *seen, context_file = ast.literal_eval(given.answer or "")
    expected = [QUESTION, context, "http://127.0.0.1:9/v1", "rk-secret-of-this-seat", [], False]
    assert seen == expected
    assert not Path(context_file).parent.exists()


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (
            "print('key', os.environ['OPENAI_API_KEY'], file=sys.stderr); sys.exit(3)",
            "it ended with status 3: key KEY",
        ),
        ("print('   ')", "it ended and wrote nothing to stdout"),
        ("os.kill(os.getpid(), 9)", "it was killed by signal 9"),
        ("time.sleep(1000)", "it did not end within 0.5 s and was ended"),
        (
            "while True: os.write(1, b'x' * 65536)",
            "it wrote more than 8 MB and was ended",
        ),
    ],
)
def test_a_command_that_goes_wrong(tmp_path: Path, code: str, failure: str) -> None:
    timeout_s = 0.5 if "sleep" in code else 60.0
    system = parse_system(script(tmp_path, code), timeout_s=timeout_s)
    given = answered(system)
    assert given.answer is None
    assert given.failure.startswith(failure)


def test_a_cancelled_command_leaves_no_process_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(1000)"
    system = parse_system(script(tmp_path, code))

    async def cancel() -> None:
        answering = asyncio.ensure_future(system.answer(QUESTION, "text", seat=seat()))
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.02)
        answering.cancel()
        await asyncio.wait([answering])
        assert answering.cancelled()

    asyncio.run(cancel())
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cat {context_file}", r"has no \{question\}.*add \{question\}"),
        ("cat {question} {contex_file}", "unknown placeholder {contex_file}: .*context_file"),
        ("cat {question:>8}", "placeholder {question} cannot have a format"),
        ("no-such-program {question}", "the program 'no-such-program' was not found: install it"),
        ("rlm", "'rlm' is not a system: .*'rlms'"),
        ("", "'' is not a system"),
    ],
)
def test_a_wrong_system_is_an_error_before_anything_runs(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_system(words)


def test_a_missing_peer_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_SYSTEMS", str(tmp_path / "a folder"))
    with pytest.raises(ConfigError, match=r"--with dspy: dspy==.* is not installed in") as raised:
        parse_system("dspy")
    folder = f"'{tmp_path}/a folder/dspy-3.4.1'"
    assert f"-m venv {folder} && {folder}/bin/pip install dspy==" in str(raised.value)


def test_an_attempt_is_scored_and_a_failure_scores_as_no_answer(tmp_path: Path) -> None:
    task = DatasetTask("t", {"test": []}, lambda answer, item: float(answer == item.gold))
    item = Item("How many?", "context", gold="12", kind="count", id="t/test/0")
    right = parse_system(script(tmp_path, "print(12)"))
    outcome = asyncio.run(attempt_with_system(right, task, item, 0, seat=seat()))
    assert (outcome.reward, outcome.answer, outcome.stop) == (1.0, "12", Stop.FINAL)
    assert (outcome.kind, outcome.error) == ("count", "")
    (tmp_path / "b").mkdir()
    wrong = parse_system(script(tmp_path / "b", "sys.exit(1)"))
    outcome = asyncio.run(attempt_with_system(wrong, task, item, 1, seat=seat()))
    assert (outcome.reward, outcome.answer, outcome.stop) == (0.0, None, Stop.ERROR)
    assert outcome.error == "it ended with status 1"


def outcome(
    item: str, cost: float | None, reward: float | None, attempt: int = 0
) -> AttemptOutcome:
    return AttemptOutcome(item=item, attempt=attempt, cost=cost, reward=reward)


def test_scores_against_money_count_an_attempt_beyond_the_budget_as_unanswered() -> None:
    cheap = [outcome("a", 0.01, 1.0), outcome("b", 0.02, 0.0), outcome("c", 0.02, 1.0)]
    dear = [
        outcome("a", 0.05, 1.0),
        outcome("a", 0.2, 1.0, 1),
        outcome("b", 0.1, 1.0),
        outcome("c", 0.1, None),
    ]
    curves = score_by_budget_curves(
        {"cheap": cheap, "dear": dear, "free": [outcome("a", None, 1.0)]}
    )
    assert curves["free"] == ()
    budgets = [point.dollars for point in curves["cheap"]]
    assert budgets == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2])
    assert budgets == [point.dollars for point in curves["dear"]]
    assert [point.score.value for point in curves["cheap"]] == pytest.approx([1 / 3] + [2 / 3] * 4)
    assert [point.score.value for point in curves["dear"]] == [0, 0, 0.25, 0.75, 1.0]
    assert [point.within for point in curves["dear"]] == [0, 0, 1, 2, 3]
    last = curves["dear"][-1].score
    assert (last.value, last.low < 1.0) == (1.0, True)


def test_a_peer_is_run_in_its_own_environment(tmp_path: Path) -> None:
    """A library of the peer's name takes its place, in a real virtual environment."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "rlm" / "utils").mkdir(parents=True)
    (site / "rlm" / "utils" / "__init__.py").write_text("")
    (site / "rlm" / "utils" / "exceptions.py").write_text(
        "class TimeoutExceededError(Exception): pass\nclass TokenLimitExceededError(Exception):\n"
        "    partial_answer = 'the best so far'\n"
    )
    (site / "rlm" / "__init__.py").write_text(RLM_DOUBLE)
    system = PeerLibrarySystem("rlms", timeout_s=60, environment=tmp_path / "env")
    given = answered(system, "a text")
    assert given.answer == f"[{QUESTION}] over 6 characters, at most None tokens"
    assert (given.requests, given.input_tokens, given.output_tokens) == (3, 40, 2)
    stopped = answered(system, "limit")
    assert (stopped.answer, stopped.failure) == ("the best so far", "")
    failed = answered(system, "crash")
    assert (failed.answer, failed.failure) == (None, "ValueError: no luck with KEY")
    died = answered(system, "die")
    assert (died.answer, died.failure) == (None, "it ended with status 7")


RLM_DOUBLE = """
import os
from types import SimpleNamespace
from rlm.utils.exceptions import TokenLimitExceededError

class RLM:
    def __init__(self, backend, backend_kwargs, environment, max_tokens, max_timeout):
        assert (backend, environment, max_timeout) == ("openai", "local", 60)
        assert backend_kwargs["base_url"] == "http://127.0.0.1:9/v1"
        self.key, self.max_tokens = backend_kwargs["api_key"], max_tokens

    def completion(self, context, root_prompt):
        print("noise on stdout")
        if context == "limit":
            raise TokenLimitExceededError
        if context == "crash":
            raise ValueError(f"no luck with {self.key}")
        if context == "die":
            os._exit(7)
        text = f"[{root_prompt}] over {len(context)} characters, at most {self.max_tokens} tokens"
        count = SimpleNamespace(total_calls=3, total_input_tokens=40, total_output_tokens=2)
        usage = SimpleNamespace(model_usage_summaries={"m": count})
        return SimpleNamespace(response=text, usage_summary=usage)
"""


def test_the_peers_of_benchmarks_have_the_same_versions() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "requirements.txt").read_text()
    for name in ("rlms", "droste"):
        assert PEERS[name][0] in text.splitlines()


def test_an_outage_of_the_model_leaves_the_attempt_to_be_made_again(tmp_path: Path) -> None:
    task = DatasetTask("t", {"test": []}, lambda answer, item: float(answer == item.gold))
    item = Item("How many?", "context", gold="12", id="t/test/0")
    system = parse_system(script(tmp_path, "sys.exit(1)"))
    place = seat()
    place.outage = "openai:m: 503, overloaded"
    outcome = asyncio.run(attempt_with_system(system, task, item, 0, seat=place))
    assert (outcome.reward, outcome.error) == (None, f"the model failed: {place.outage}")
    # A budget that is used up is the system's own doing.
    place.record_refusal("all tokens are used", Stop.MAX_TOKENS)
    outcome = asyncio.run(attempt_with_system(system, task, item, 0, seat=place))
    assert (outcome.reward, outcome.reason) == (0.0, "budget")
    assert (outcome.stop, outcome.error) == (Stop.MAX_TOKENS, "budget: all tokens are used")
