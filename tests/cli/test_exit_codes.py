"""Wrong command lines of every command: exit code 2, one line on stderr, nothing on stdout, and
no run or evaluation is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ramify.cli.main import COMMANDS, load_subcommand, run, split
from ramify.cli.parser import ExitCode

M = ["-m", "scripted:script.json"]
R = str(Path(__file__).parents[2] / "recipes" / "tiny.py")
FILES = {
    "script.json": '[{"match": "", "reply": "x"}]',
    "log.txt": "abc",
    "broken.py": "def run(:",
    "raises.py": "1/0",
    "task.py": "def task(size=1):\n    return [][size]",
    "runless.py": "x = 1",
    "rows.csv": "text\nlate\nearly\n",
}
WRONG = {
    "ask": (
        ([], "no question: ramify ask"),
        ([*M, "q", "nowhere.txt"], "nowhere.txt does not exist"),
        ([*M, "q", "--temperature", "-1"], "temperature=-1 is out of range"),
        ([*M, "q", "--temperature", "nan"], "temperature=nan is out of range"),
        ([*M, "q", "--max-seconds", "-1"], "limit --max-seconds=-1.0 allows nothing"),
        ([*M, "q", "--branches", "0"], "branches is 0"),
        ([*M, "q", "--progress", "loud"], "--progress loud: known: "),
        (
            ["-m", "openai:x@localhost:8000", "q"],
            "'localhost:8000' in 'x@localhost:8000' is not a base URL",
        ),
        (["-m", "vllm:x@ftp://host/v1", "q"], "'ftp://host/v1' in "),
        (
            ["-m", "openai:x@notaurl", "q"],
            "'notaurl' is not a base URL: the full form is openai:x@http://host",
        ),
        (["-m", "azure:x@notaurl", "q"], "use azure:x@https://"),
        ([*M, "--sub-model", "opnai:x", "q"], "unknown provider 'opnai'"),
        (["--resume", "nothing"], "has no runs"),
        (["--from", "2", "q"], "--from needs a run: give --resume RUN too"),
        (["--resume", "last", "--code", "x.py"], "--code needs --from TURN: add it"),
        (["--resume", "last", "--max-depth", "2"], "remove --max-depth"),
    ),
    "map": (
        ([], "no rows"),
        ([*M, "q", "nowhere.csv", "--out", "out.csv"], "nowhere.csv"),
    ),
    "prompt": (
        ([], "give QUESTION"),
        ([*M, "q", "--examples", "nowhere.json"], "the examples nowhere.json cannot be read"),
        ([*M, "q", "--depth", "-1"], "depth -1 has no calls"),
        ([*M, "q", "--tokenizer", "nowhere"], "nowhere"),
        ([*M, "q", "--tokens"], "--tokens"),
    ),
    "plan": (
        ([], "no question: ramify plan"),
        ([*M, "q", "nowhere.txt"], "nowhere.txt does not exist"),
        ([*M, "q", "log.txt", "--plan", "x"], "unknown plan 'x': known: aggregate"),
        ([*M, "q", "log.txt", "--part-tokens", "0"], "tokens=0: give 1 or more"),
    ),
    "calibrate": (
        ([], "no model: ramify calibrate"),
        ([*M[1:], "--items", "0"], "--items 0: give at least 1"),
        ([*M[1:], "--tolerance", "1"], "--tolerance 1: give a number from 0"),
        ([*M[1:], "--sizes", "x"], "--sizes"),
        ([*M[1:], "--svg", "nowhere/x.svg"], "--svg nowhere/x.svg: its folder does not exist"),
        ([*M[1:], "--resume", "last"], "remove the model"),
    ),
    "eval": (
        ([], "no task: ramify eval"),
        ([*M, "nedle"], "unknown task 'nedle'"),
        ([*M, "needle", "--items", "0"], "evaluate 0 items"),
        ([*M, "needle", "--n", "-1"], "with -1 attempts"),
        ([*M, "needle", "--k", "0"], "pass@0: k must be at least 1"),
        ([*M, "needle", "--k", "2"], "pass@2 needs at least 2 attempts"),
        ([*M, "needle", "--concurrency", "0"], "--concurrency 0: give at least 1"),
        ([*M, "needle", "--split", "x"], "no split 'x'"),
        ([*M, "needle", "--track", "x"], "unknown tracker 'x'"),
        ([*M, "needle", "--against", "x"], "found no evaluation 'x'"),
        ([*M, "needle", "--against", "x.jsonl"], "the evaluation x.jsonl does not exist"),
        ([*M, "needle", "chars=lots"], "task 'needle' with {'chars': 'lots'}: "),
        ([*M, "broken.py:task"], "task 'broken.py:task' cannot be loaded: invalid syntax"),
        ([*M, "raises.py:task"], "cannot be loaded in line 1: ZeroDivisionError("),
        ([*M, "task.py:task"], "task 'task.py:task' with {}: IndexError("),
        ([*M, "nowhere.jsonl"], "file nowhere.jsonl does not exist"),
        (["--resume", "x"], "found no evaluation 'x'"),
        ([*M, "needle", "--lengths", "x"], "'x' is not a length"),
        ([*M, "needle", "--modes", "x"], "unknown mode 'x': known: auto, direct, free"),
        ([*M, "needle", "--with", "rlm"], "--with 'rlm' is not a system"),
        ([*M, "needle", "--with", "cat {context_file}"], "{question}"),
    ),
    "demos": (
        ([*M, "--out", "o"], "a task is missing"),
        ([*M, "needle"], "--out is missing"),
        (["needle", "--out", "o"], "--model is missing"),
        ([*M, "needle", "--out", "o", "--num", "0"], "cannot evaluate 0 items"),
        ([*M, "nedle", "--out", "o"], "unknown task 'nedle': did you mean 'needle'"),
        (["needle", "-m", "tiny", "--out", "o", "--max-cost", "-1"], "a budget of $-1"),
        (["needle", "-m", "groq:m", "--out", "o", "--max-cost", "1"], "has no known price"),
        ([*M, "needle", "--out", "o", "--max-run-cost", "1"], "--max-run-cost needs --max-cost"),
        (["needle", "-m", "anthropic:m", "--out", "o"], "anthropic:m: no API key: set ANTHROPIC"),
        ([*M, "needle", "--out", "o", "--min-reward", "nan"], "--min-reward nan"),
    ),
    "train": (
        ([], "give one recipe"),
        (["nowhere.py"], "nowhere.py is not a recipe"),
        (
            ["broken.py"],
            "the recipe broken.py cannot be executed in line 1: SyntaxError: invalid syntax",
        ),
        (["raises.py"], "the recipe raises.py cannot be executed in line 1: ZeroDivisionError("),
        (["runless.py"], "no `def run() -> Run`"),
        ([R, "rl.optim.lr=fast"], "Expected `float | null`, got `str`"),
        ([R, "evaluate.max_failed=2"], "evaluate.max_failed=2.0 is a share"),
        ([R, "--placement", "moon"], "--placement moon: known"),
        ([R, "--restarts", "0", "--out", "x"], "--restarts 0"),
        ([R, "--out", "log.txt"], "--out log.txt is a file"),
        (["--resume", "nowhere"], "nothing to resume in nowhere"),
    ),
    "cluster plan": (
        ([], "give RECIPE"),
        (["broken.py"], "the recipe broken.py cannot be executed"),
        ([R, "--nodes", "0"], "--nodes 0"),
        ([R, "--mfu", "7"], "--mfu 7: give a fraction"),
    ),
    "publish": (
        ([], "give RUN DEST"),
        (["nowhere", "x"], "nowhere is not a folder"),
        ([".", "x"], ". has no trained policy"),
        ([".", "x", "--private"], "--private has no meaning"),
    ),
    "launch": (
        ([R], "--on is missing: give one of slurm, k8s, skypilot, ray"),
        ([R, "--on", "slrum"], "--on slrum: did you mean 'slurm'?"),
        (["--on", "slurm"], "give RECIPE"),
        (["nowhere.py", "--on", "slurm"], "nowhere.py is not a recipe"),
        ([R, "--on", "slurm", "--nodes", "0"], "--nodes 0: give more than 0"),
        ([R, "--on", "slurm", "--nodes", "2"], "--nodes 2: without placement.pools"),
        ([R, "--on", "slurm", "--restarts", "-1"], "--restarts -1: give 0 or more"),
        ([R, "--on", "slurm", "--image", "x"], "--image has no meaning for --on slurm"),
        ([R, "--on", "slurm", "--secret", "sk-12"], "--secret sk-12: give the name of a variable"),
        ([R, "--on", "slurm", "--option", "=x"], "--option =x: give NAME=VALUE"),
        ([R, "--on", "slurm", "--device", "h10"], "unknown device 'h10': did you mean 'h100'?"),
        ([R, "--on", "k8s"], "--on k8s needs --image IMAGE"),
        ([R, "--on", "skypilot"], "--on skypilot needs --shared BUCKET"),
        ([R, "--on", "ray", "--secret", "KEY"], "KEY cannot be given to it"),
    ),
    "cluster simulate": (
        (["nowhere"], "nowhere is not a run's folder"),
        (["nowhere", "--engines", "x"], "--engines x"),
    ),
    "serve": (
        ([*M, "--max-runs", "0"], "--max-runs 0: give at least 1"),
        ([*M, "--max-body", "0"], "--max-body 0: give at least 1"),
        ([*M, "--grace", "-1"], "--grace -1.0: give at least 0"),
        ([*M, "--keys", "nowhere"], "nowhere cannot be read"),
        ([*M, "--host", "0.0.0.0", "--open-to-this-machine"], "reachable from other machines"),
        ([*M, "--port", "99999"], "--port 99999: a port must be from"),
        ([*M, "--meter", "openai:x"], "--meter names the model: remove --model"),
        (["--meter", "opnai:x"], "unknown provider 'opnai'"),
    ),
    "mcp": (([*M, "--max-calls", "many"], "--max-calls 'many' is not a whole number"),),
    "serve-policy": (
        ([], "give FOLDER"),
        (["tiny", "--slots", "0"], "--slots 0"),
        (["tiny", "--weights-root", "nowhere"], "--weights-root nowhere: no such folder"),
    ),
    "view": (
        (["nowhere"], "nowhere is neither a file nor a folder"),
        (["--port", "-1"], "--port -1: a port must be from"),
        (["--export", "x.html"], "--export writes one run"),
    ),
    "runs": ((["--limit", "-1"], "--limit -1"),),
    "runs check": (
        ([], "give a RUN to check, or --all"),
        (["x"], "has no runs"),
    ),
    "runs repair": (([], "give RUN"), (["x"], "has no runs")),
    "runs rm": (([], "give RUN"), (["x"], "has no runs")),
    "runs review": (([], "give RUN"), (["x"], "has no runs")),
    "runs score": (
        ([], "give STORE"),
        (["nowhere"], "score by one of --correction PATTERN, --judge MODEL and --by FILE:NAME"),
        (["nowhere", "--correction", "no"], "nowhere is not a store of recorded traffic"),
    ),
    "runs prune": (
        ([], "nothing to prune by: give --older-than AGE, --keep N or --max-size SIZE"),
        (["--keep", "-1"], "--keep -1"),
        (["--older-than", "soon"], "--older-than 'soon' is not understood"),
        (["--max-size", "x"], "--max-size 'x' is not understood"),
    ),
    "show": ((["x"], "has no runs"), (["x.jsonl"], "the journal x.jsonl does not exist")),
    "replay": ((["x"], "has no runs"),),
    "init": (
        ([], "give"),
        (["tsak", "mine"], "tsak"),
    ),
    "plugins": (
        (["taks"], "unknown kind 'taks': did you mean 'task'? known: algorithm, "),
        (["task", "x"], "unexpected argument 'x'"),
    ),
    "doctor": ((["x"], "unexpected argument 'x'"),),
}


def test_table_of_wrong_command_lines_covers_every_command() -> None:
    assert WRONG.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_command_line_exits_with_usage_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in [
        each for each in os.environ if each.startswith(("RAMIFY_", "OPENAI_", "AZURE_"))
    ]:
        monkeypatch.delenv(variable)
    for variable, folder in (
        ("HOME", "."),
        ("XDG_CONFIG_HOME", "config"),
        ("RAMIFY_HOME", "store"),
    ):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    for arguments, says in WRONG[name]:
        code = run([*name.split(), *arguments])
        out, err = capfd.readouterr()
        said = [line for line in err.splitlines() if "warning" not in line]
        assert (code, out, len(said)) == (ExitCode.USAGE, "", 1), (arguments, err)
        assert says in said[0], (arguments, err)
        assert "internal error" not in err
        assert split([*name.split(), *arguments])[0] == name
    assert not list(tmp_path.glob("store/runs/*.jsonl")) + list(
        tmp_path.glob("store/evaluations/*.jsonl")
    )


VALID_ARGUMENTS = {
    "ask": [*M, "q"],
    "eval": [*M, "needle"],
    "map": [*M, "q", "rows.csv", "--out", "out.csv"],
    "plan": [*M, "q", "log.txt"],
    "calibrate": M[1:],
    "prompt": [*M, "q"],
    "demos": ["-m", "tiny", "needle", "--out", "demos", "--max-cost", "1"],
    "train": [R],
    "cluster plan": [R],
    "launch": [R, "--on", "slurm"],
    "publish": ["nowhere", "x"],
    "cluster simulate": ["nowhere"],
    "serve": M,
    "mcp": M,
    "serve-policy": ["tiny"],
    "show": ["x"],
}
"""Command -> arguments to which one option with a wrong value is added."""
WRONG_VALUES = {
    "from": "2",
    "code": "x.py",
    "prompt": "x.txt",
    "score": "correct",
    **dict.fromkeys(("max_cost", "max_calls", "max_depth", "patience", "temperature"), "-1"),
    **dict.fromkeys(("max_sub_reply_tokens", "max_reasoning_tokens"), "-1"),
    **dict.fromkeys(("max_seconds", "max_turns", "max_tokens", "max_reply_tokens"), "0"),
    **dict.fromkeys(("max_concurrency", "branches", "items", "n", "k", "concurrency"), "0"),
    **dict.fromkeys(("num", "attempts"), "0"),
    **dict.fromkeys(("examples", "tokenizer"), "nowhere.json"),
    "depth": "-1",
    "max_run_cost": "-1",
    "min_reward": "nan",
    **dict.fromkeys(("restarts", "nodes", "devices", "engine_devices", "engines", "slots"), "0"),
    **dict.fromkeys(("ranks", "group", "last", "steps", "max_runs"), "0"),
    **dict.fromkeys(("staleness", "grace_steps", "straggler_factor", "scaling", "mfu"), "-1"),
    **dict.fromkeys(("grace", "limit", "keep"), "-1"),
    **dict.fromkeys(("memory", "max_body", "max_bytes", "max_size", "older_than"), "lots"),
    **dict.fromkeys(("split", "track"), "lots"),
    **dict.fromkeys(("column", "table", "placement"), "nowhere"),
    **dict.fromkeys(("workers", "batch_rows"), "0"),
    **dict.fromkeys(("try", "row_max_calls", "row_max_tokens", "row_max_seconds"), "0"),
    "row_max_cost": "-1",
    **dict.fromkeys(("measured", "calibrate", "keys", "weights_root", "against"), "nowhere"),
    **dict.fromkeys(("key_file", "token_file"), "nowhere"),
    "log": "nowhere/serve.log",
    **dict.fromkeys(("record", "record_max_gib", "record_keep"), "log.txt"),
    **dict.fromkeys(("redact", "correction"), "("),
    "judge": "opnai:x",
    "by": "nowhere.py:x",
    **dict.fromkeys(("answer_schema", "resume", "mount"), "nowhere.json"),
    **dict.fromkeys(("model", "sub_model"), "opnai:x"),
    "scaffold": "minimum",
    "preset": "tlr",
    "turn": "0",
    "sandbox": "jial",
    "tier": "Z",
    "package": "no_such_package",
    "mcp": "no_such_command",
    "progress": "loud",
    "out": "log.txt",
    "placement": "moon",
    "device": "abacus",
    "host": "no.such.host.invalid",
    "port": "99999",
    "dtype": "float7",
    "weight_sync": "nowhere:Sync",
    "call": "9.9",
    "on": "moon",
    "hours": "0",
    "files": "log.txt",
    "secret": "sk-12",
    "option": "=x",
    **dict.fromkeys(("mode", "modes", "lengths", "plan", "with"), "lots"),
    **dict.fromkeys(("models", "meter"), "opnai:x"),
    "part_tokens": "0",
    "sizes": "lots",
    "tolerance": "1",
    "svg": "nowhere/x.svg",
    "top": "-1",
    "html": "nowhere/x.html",
    "meter_record": "log.txt",
    "labels": ",",
    "verdict": "perhaps",
    "person": "ana",  # without a verdict
    **dict.fromkeys(("image", "shared"), "of no use to Slurm"),
}
ANY_VALUE = {
    ("calibrate", "seed"),
    ("eval", "seed"),
    ("demos", "seed"),
    ("cluster simulate", "seed"),
    ("view", "export"),
}
ANY_VALUE |= {(each, "name") for each in ("serve", "serve-policy")}
ANY_VALUE |= {("runs review", "label"), ("runs review", "note")}
ANY_VALUE |= {  # any text is an instruction
    (each, "instructions") for each in ("ask", "map", "prompt", "eval", "demos", "serve", "mcp")
}
ANY_VALUE |= {("map", "prefix")}
ANY_VALUE |= {("prompt", "progress"), ("prompt", "concurrency")}  # nothing is run
ANY_VALUE |= {("publish", "license"), ("publish", "base")}
ANY_VALUE |= {("launch", "restarts"), ("launch", "workdir")}  # 0 of them; a folder elsewhere
ANY_VALUE |= {("train", "resume")}  # covered in WRONG: it replaces the recipe


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_option_value_exits_with_usage_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in [each for each in os.environ if each.startswith("RAMIFY_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    for option in load_subcommand(name).options:
        if option.kind is bool:
            continue
        values = [] if (name, option.name) in ANY_VALUE else [WRONG_VALUES[option.name]]
        values += ["x"] * (option.kind in (int, float)) + ["nan"] * (option.kind is float)
        for value in values:
            others = VALID_ARGUMENTS.get(name, [])
            others = others[2:] if option.name == "model" else others
            code = run([*name.split(), *others, option.long, value])
            out, err = capfd.readouterr()
            assert (code, err.count("\n"), out) == (ExitCode.USAGE, 1, ""), (option, value, err)
