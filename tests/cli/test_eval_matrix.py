"""``ramify eval`` with a matrix: its rows, what it asks, its refusals, and resuming it after a kill."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

from ramify.cli.parser import ExitCode
from ramify.evaluate.evaluation_matrix import EvaluationMatrixStore
from ramify.evaluate.run_evaluation import AttemptOutcome, EvaluationStore
from tests.cli.helpers import Shell

SUITE = """
import random
from ramify.errors import ConfigError
from ramify.tasks.base import Item, DatasetTask, generated
from ramify.tasks.scoring import numeric

FAMILIES = ("teal", "mint")

def suite(*, tokens: int = 1000, families=FAMILIES, seed: int = 0):
    if tokens < 100:
        raise ConfigError(f"suite: tokens={tokens} is less than 100")
    def make(rng: random.Random) -> Item:
        word = rng.choice(list(families))
        words = rng.choices(["teal", "mint", "rust"], k=20)
        filler = "-" * (4 * tokens - sum(map(len, words)) - len(words))
        return Item(f"How often does '{word}' occur?", " ".join([*words, filler]),
                    gold=words.count(word), kind=word)
    splits = generated("suite", make, seed=seed)
    return DatasetTask("suite", splits, numeric, families=families)
"""
PLAIN = "How often does"
"""Begins the prompt of a plain call and of a session, which has no text of the context."""
FAST = ("--sandbox", "process", "--allow-weaker", "--scaffold", "tiny", "-q")
COUNTS = "FINAL(context.count(re.search(\"'(.*)'\", 'QUESTION').group(1)))"


def given(shell: Shell, *arguments: str) -> tuple[str, ...]:
    """A model that answers plain calls wrongly and counts in a session."""
    shell.write("suite.py", SUITE)
    script: list[Any] = [
        {"match": "-----", "reply": ["-1"]},
        {"match": "'teal'", "reply": ["FINAL(context.count('teal'))"]},
        {"match": "'mint'", "reply": ["FINAL(context.count('mint'))"]},
    ]
    model = shell.model(script)
    prices = {model: {"input": 1.0, "output": 2.0, "window": 10000}}
    shell.env["RAMIFY_PRICES"] = str(shell.folder / shell.write("prices.json", json.dumps(prices)))
    return ("eval", "suite.py:suite", "--models", model, *FAST, *arguments)


def rows_of(out: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """(family, length, mode) -> the row."""
    lines = [json.loads(line) for line in out.splitlines()]
    return {(each["family"], each["length"], each["mode"]): each for each in lines}


def test_each_family_length_and_mode_has_a_row(shell: Shell) -> None:
    asked = given(shell, "--lengths", "1k,8k", "--modes", "direct,free", "--items", "2", "--n", "2")
    done = shell.run(*asked, "--json")
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    rows = rows_of(done.out)
    families, lengths, modes = ("all", "teal", "mint"), ("1k", "8k"), ("direct", "free")
    assert [*rows] == [
        (family, length, mode) for length in lengths for family in families for mode in modes
    ]
    free = rows["teal", "1k", "free"]
    assert (free["score"]["value"], free["passes"]["value"], free["k"]) == (1, 1, 2)
    assert round(free["score"]["low"], 6) == round(0.025 ** (1 / 2), 6)
    assert free["difference"]["value"] == 1
    assert (free["items"], free["made"], free["calls"]) == (2, 4, 4)
    assert free["cost"] > 0
    assert free["seconds_p50"] <= free["seconds_p95"]
    direct = rows["all", "1k", "direct"]
    assert (direct["calls"], direct["reasons"], direct["difference"]) == (8, {"wrong": 8}, None)
    # 8,192 tokens and the reply do not fit into 10,000.
    unfit = rows["mint", "8k", "direct"]
    assert (unfit["calls"], unfit["input_tokens"], unfit["cost"]) == (0, 0, 0.0)
    assert (unfit["score"]["value"], unfit["reasons"]) == (0, {"not fitting": 4})


def test_table_names_what_all_rows_share_once(shell: Shell) -> None:
    asked = given(shell, "--lengths", "1k", "--modes", "direct,free", "--items", "2")
    done = shell.run(*asked, "--html", "matrix.html")
    lines = done.out.splitlines()
    assert lines[0] == (
        "suite.py:suite · 1k · scripted:script.json · 2 items per family, 1 attempt each"
    )
    head = ["family", "mode", "score", "minus direct", "cost", "calls", "tokens", "p50", "p95"]
    assert re.split(r"  +", lines[1].strip()) == [*head, "not right"]
    assert [line.split()[:2] for line in lines[2:]] == [
        [family, mode] for family in ("all", "teal", "mint") for mode in ("direct", "free")
    ]
    page = (shell.folder / "matrix.html").read_text()
    assert page.count('"item":"suite/test/1"') == 4


def test_lengths_of_one_seed_ask_the_same_questions_of_each_model_and_mode(shell: Shell) -> None:
    asked = given(shell, "--lengths", "1k", "--modes", "direct,free", "--items", "3")
    shell.run(*asked)
    records = EvaluationStore(Path(shell.env["RAMIFY_HOME"]))
    items = {}
    for path in records.paths():
        evaluation = records.load(str(path))
        place = str(evaluation.plan.options["families"]), evaluation.plan.settings["mode"]
        items[place] = {outcome.item for outcome in evaluation.outcomes}
    assert len(items) == 4
    assert all(len(each) == 3 for each in items.values())
    assert items["['teal']", "direct"] == items["['teal']", "free"]


def test_dry_run_says_how_many_attempts_and_at_most_how_many_dollars(shell: Shell) -> None:
    asked = given(shell, "--lengths", "1k,8k", "--modes", "direct,free", "--items", "10")
    done = shell.run(*asked, "--dry-run", "--max-cost", "0.5")
    assert done.code == ExitCode.ANSWERED
    # 40 attempts with a session at 0.5 each; of the 20 plain calls that fit, each is sent once,
    # with four bytes per token and a reply of 2,500 tokens, a quarter of the window.
    plain = (4 * (1024 + 200) * 1.0 + 2500 * 2.0) / 1e6
    assert done.out == (
        f"80 attempts, of which 20 do not fit and ask nothing; at most ${40 * 0.5 + 20 * plain:.2f}\n"
    )
    assert not list(Path(shell.env["RAMIFY_HOME"]).glob("evaluations/*"))
    free = {"input": 0.0, "output": 0.0}
    shell.write("prices.json", json.dumps({asked[3]: free}))
    assert shell.run(*asked, "--dry-run").out == "80 attempts; at most $0.00\n"
    unlisted = ("--models", "openai:unlisted@http://127.0.0.1:9/v1")
    unknown = shell.run("eval", "suite.py:suite", *unlisted, "--lengths", "1k", *FAST, "--dry-run")
    assert "their cost is unknown, since a model has no known price" in unknown.out


def test_wrong_axes_are_refused_before_anything_is_asked(shell: Shell) -> None:
    for arguments, message in (
        (("--lengths", "8q"), "'8q' is not a length: write tokens, as in 8k (8,192)"),
        (("--lengths", "1k,1k"), "lengths 1024, 1024: a value is repeated: give each only once"),
        (("--lengths", "50"), "suite: tokens=50 is less than 100"),
        (("--modes", "direkt"), "unknown mode 'direkt': did you mean 'direct'"),
        (("--lengths", "1k", "--against", "x"), "remove --against"),
        (("--lengths", "1k", "--html", "no/m.html"), "--html no/m.html: its folder does not exist"),
        (("--lengths", "1k", "--k", "2"), "pass@2 needs at least 2 attempts"),
    ):
        done = shell.run(*given(shell, *arguments))
        assert (done.code, done.out) == (ExitCode.USAGE, ""), arguments
        assert message in done.err
    words = ("--model", shell.model([]), "-q")
    for suite, arguments, message in (
        ("needle,legder", (), "unknown task 'legder': did you mean 'ledger'"),
        ("legder", ("--lengths", "1k"), "unknown task 'legder': did you mean 'ledger'"),
        ("needle", ("--yes",), "--yes: only for a matrix: add --lengths"),
        ("mixture", ("--lengths", "1k"), "mixture has no lengths (an option 'tokens')"),
    ):
        done = shell.run("eval", suite, *arguments, *words)
        assert (done.code, done.out) == (ExitCode.USAGE, ""), suite
        assert message in done.err
    assert not list(Path(shell.env["RAMIFY_HOME"]).glob("evaluations/*"))


def test_killed_matrix_continues_and_pays_nothing_twice(shell: Shell) -> None:
    asked = given(shell, "--modes", "direct,free", "--items", "12", "--concurrency", "2")
    slow = "lambda answer, item: (time.sleep(0.05), numeric(answer, item))[1]"
    shell.write("suite.py", "import time\n" + SUITE.replace(", numeric,", f", {slow},"))
    process = shell.start(*asked)
    records = EvaluationMatrixStore(Path(shell.env["RAMIFY_HOME"]))
    give_up = time.monotonic() + 100
    while len(_outcomes(records)) < 6 and time.monotonic() < give_up:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=100)
    begun = {(record, each.item): each for record, each in _outcomes(records)}
    assert 6 <= len(begun) < 48
    done = shell.run("eval", "--resume", "last", "--json", "-q")
    assert done.code == ExitCode.ANSWERED, done.err
    rows = [json.loads(line) for line in done.out.splitlines()]
    cells = [row for row in rows if row["family"] != "all"]
    assert [(row["made"], row["planned"]) for row in cells] == [(12, 12)] * 4
    assert all(row["calls"] == row["made"] for row in cells)
    again = {(record, each.item): each for record, each in _outcomes(records)}
    assert {place: again[place] for place in begun} == begun
    # A finished matrix shows its results again, and asks nothing.
    for id in (rows[0]["matrix"], rows[0]["records"][0]):
        once_more = shell.run("eval", "--resume", id, "--json", "-q")
        assert once_more.out == done.out


def _outcomes(records: EvaluationMatrixStore) -> list[tuple[str, AttemptOutcome]]:
    return [
        (path.stem, outcome)
        for path in records.evaluations.paths()
        if path.read_bytes().count(b"\n")
        for outcome in records.evaluations.load(str(path)).outcomes
    ]
