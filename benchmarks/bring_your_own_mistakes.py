"""Try wrong configurations of ``ramify train`` and ``ramify eval``. Each must end with one line
that says what to do, within two seconds, and before PyTorch is imported.

    python benchmarks/bring_your_own_mistakes.py              print each answer

Decides which mistakes are made and what their answers have to say (``MISTAKES``). The part of
``bring_your_own.py`` gives each mistake its own process, as a user does; the tests share one
interpreter, which forks for each. Not here: the checks, which are in the package.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from figures import Figure

ROOT = Path(__file__).parents[1]
MAX_S = 2.0
RECIPE = """\
from ramify import Limits, tasks, train


def reward(answer, item):
    return float(answer == item.gold)


def words(answer, item):
    return "very good"


def narrow(answer):
    return 1.0


def leaving(answer, item):
    import os
    os._exit(0)


def task(rows="rows.jsonl", reward=reward):
    return tasks.dataset(rows, reward=reward)


def lake(id="FrozenLake-v1", **options):
    goal = tasks.generated("lake", lambda rng: tasks.Item("Walk from S to G."))
    return tasks.env_task("lake", goal, id)


def run():
    return train.Run(
        policy=train.PolicySpec(path="policy"),
        task=train.TaskSpec(name="rows.jsonl", options={"reward": "mine.py:reward"}),
        rl=train.RlSpec(steps=2, rollout=train.RolloutOptions(direct=True)),
        limits=Limits(max_reply_tokens=64),
    )


class Broken:
    def reset(self, seed=None):
        raise OSError("map file missing")


class Old:
    def reset(self):
        return 0


goals = tasks.generated("lake", lambda rng: tasks.Item("Walk from S to G."))
broken_lake = tasks.env_task("lake", goals, lambda item: Broken())
old_lake = tasks.env_task("lake", goals, lambda item: Old())


def served():
    from ramify.evaluate import TaskWithMcpTools
    return TaskWithMcpTools(task(), "no-such-server --stdio")
"""
PICTURE = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
POLICY = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}


class Mistake(NamedTuple):
    name: str
    command: tuple[str, ...]
    """Arguments of ``ramify``."""
    says: tuple[str, ...]
    """Texts that the error must contain: the received value, and what to do."""


class Answer(NamedTuple):
    """How one command ended."""

    code: int
    text: str
    """Everything that was printed."""
    has_torch: bool
    """Whether PyTorch was imported."""
    cpu_s: float
    """CPU time of the command, without the start of Python."""


def _train(name: str, *words: str, says: Sequence[str]) -> Mistake:
    return Mistake(f"train: {name}", ("train", "mine.py", "--out", "out", *words), tuple(says))


def _eval(
    name: str, *words: str, says: Sequence[str], model: str = "scripted:replies.json"
) -> Mistake:
    return Mistake(f"eval: {name}", ("eval", *words, "--model", model, "--no-store"), tuple(says))


MISTAKES: tuple[Mistake, ...] = (
    # fields and their types
    _train("unknown field", "rl.setps=3", says=("setps", "did you mean 'steps'?")),
    _train("text for a number", "rl.steps=many", says=("rl.steps=many", "int")),
    _train("text for a rate", "rl.optim.lr=fast", says=("rl.optim.lr=fast", "float")),
    _train("negative rate", "rl.optim.lr=-1e-4", says=("lr=-0.0001",)),
    _train("shape without a field", "policy.shape={}", "policy.path=", says=("path", "shape")),
    Mistake(
        "train: a recipe's rate is a text",
        ("train", "text_rate.py", "--out", "out"),
        ("text_rate.py", "line 34", "lr='1e-6'", "float"),
    ),
    Mistake(
        "train: a recipe's unknown argument",
        ("train", "unknown_argument.py", "--out", "out"),
        ("stepz", "unknown_argument.py", "line 34", "did you mean 'steps'?"),
    ),
    # names
    _train("estimator", "rl.algorithm=grop", says=("'grop'", "did you mean 'grpo'?")),
    _train("loss", "rl.loss.policy=ppo_clp", says=("'ppo_clp'", "did you mean 'ppo_clip'?")),
    _train("preset", "--preset", "tlr", says=("tlr", "did you mean 'trl'?")),
    _train("scaffold", "scaffold=defualt", says=("'defualt'", "did you mean 'default'?")),
    _train("backend", "compute.backend=fspd", says=("'fspd'", "did you mean 'fsdp'?")),
    _train("sandbox", "sandbox.provider=dokcer", says=("'dokcer'", "did you mean 'docker'?")),
    _train("tracker", "--track", "wandbb", says=("'wandbb'", "did you mean 'wandb'?")),
    _train("demonstrator", 'sft={"demos": "ledgr"}', says=("'ledgr'", "did you mean 'ledger'?")),
    _train("engine", 'inference={"engine": "vlm"}', says=("'vlm'", "did you mean 'vllm'?")),
    _train("device", "policy.device=gpu", says=("policy.device=gpu", "cuda")),
    # paths
    Mistake("train: no recipe", ("train", "mien.py"), ("mien.py", "does not exist")),
    Mistake("train: no function", ("train", "empty.py"), ("empty.py", "def run()")),
    Mistake("train: syntax", ("train", "broken.py"), ("broken.py", "line 2")),
    Mistake("train: nothing to resume", ("train", "--resume", "nowhere"), ("nowhere",)),
    _train(
        "folder of a policy", "policy.path=./polciy", says=("found no folder './polciy'", "give")
    ),
    _train("folder without a model", "policy.path=nothing", says=("nothing", "config.json")),
    _train(
        "tokenizer",
        f"policy.shape={json.dumps(POLICY)}",
        "policy.path=",
        "policy.tokenizer=tokenzier",
        says=("policy.tokenizer=tokenzier", "does not exist"),
    ),
    _train("trajectories", 'sft={"trajectories": "gone"}', says=("gone", "does not exist")),
    Mistake("train: --out is a file", ("train", "mine.py", "--out", "rows.jsonl"), ("rows.jsonl",)),
    # models
    _train(
        "type of a model",
        'policy.shape={"model_type": "qwne3"}',
        "policy.path=",
        'policy.words=["a"]',
        says=("'qwne3'", "did you mean 'qwen3'?"),
    ),
    _train("name of a model", "policy.path=no/such/model", says=("no/such/model",)),
    # budgets
    _train(
        "reply above the window",
        "limits.max_reply_tokens=100000",
        says=("limits.max_reply_tokens=100000", "512"),
    ),
    _train("no turns", "limits.max_turns=0", says=("max_turns=0",)),
    _train("no items", "rl.sample.items=0", says=("items=0",)),
    _train("negative cost", "limits.max_cost=-1", says=("max_cost=-1",)),
    # tasks, rows, rewards, environments
    _train("task", "task.name=ledgr", says=("'ledgr'", "did you mean 'ledger'?")),
    _train("file of rows", "task.name=row.jsonl", says=("row.jsonl", "does not exist")),
    _train(
        "attribute of a task", "task.name=mine.py:taks", says=("mine.py", "did you mean 'task'?")
    ),
    _train(
        "option of a task",
        "task.name=mine.py:task",
        'task.options={"row": "rows.jsonl"}',
        says=("'row'", "did you mean 'rows'?"),
    ),
    _train(
        "column",
        'task.options={"question": "qeustion"}',
        says=("'qeustion'", "line 1", "question, answer"),
    ),
    _train(
        "a row without a field", "task.name=gap.jsonl", says=("gap.jsonl", "line 3", "question")
    ),
    _train("a row that is not JSON", "task.name=torn.jsonl", says=("torn.jsonl, line 2",)),
    _train("reward", 'task.options={"reward": "boxed_mth"}', says=("'boxed_mth'", "'boxed_math'")),
    _train(
        "attribute of a reward",
        'task.options={"reward": "mine.py:rewrd"}',
        says=("mine.py", "did you mean 'reward'?"),
    ),
    _train(
        "import of a reward",
        'task.options={"reward": "imports.py:reward"}',
        says=("imports.py", "line 1", "no_such_package"),
    ),
    _train(
        "reward that returns a text",
        'task.options={"reward": "mine.py:words"}',
        says=("'very good'", "must be a finite number"),
    ),
    _train(
        "signature of a reward",
        'task.options={"reward": "mine.py:narrow"}',
        says=("narrow(answer)", "(answer, item)", "completions"),
    ),
    _train(
        "reward that leaves",
        'task.options={"reward": "mine.py:leaving"}',
        says=("mine.py", "os._exit"),
    ),
    _train(
        "environment",
        "task.name=mine.py:lake",
        'task.options={"id": "FrozenLke-v1"}',
        says=("FrozenLke", "FrozenLake"),
    ),
    _train(
        "environment that raises",
        "task.name=mine.py:broken_lake",
        "task.options={}",
        says=("item lake/train/0", "map file missing", "mine.py:"),
    ),
    _train(
        "environment that raises, as a later part of a mixture",
        "task.name=mixture",
        'task.options={"parts": {"sums": {"task": "ledger"}, '
        '"lake": {"task": "mine.py:broken_lake"}}}',
        says=("item lake/train/0", "map file missing", "mine.py:"),
    ),
    _train(
        "environment in the form of gym 0.21",
        "task.name=mine.py:old_lake",
        "task.options={}",
        says=("reset returned a int", "(observation, info)"),
    ),
    _train(
        "program of an MCP server",
        "task.name=mine.py:served",
        "task.options={}",
        says=("no-such-server --stdio", "no program 'no-such-server' was found"),
    ),
    _train(
        "picture in a row",
        "task.name=picture.jsonl",
        says=("picture.jsonl, line 1", "'image_url'", "only text is read"),
    ),
    _train(
        "scaffold of a policy of words",
        "policy.path=",
        f"policy.shape={json.dumps(POLICY)}",
        'policy.words=["a"]',
        says=("scaffold=default", "system message", "scaffold=tiny"),
    ),
    _train("estimator as an objective", "rl.objective=branch", says=("set rl.algorithm=branch",)),
    _train(
        "forks without options", "rl.rollout.branch=vine", says=("rl.rollout.branch=vine", "where")
    ),
    _train("split", 'evaluate.final=["tets"]', says=("'tets'", "did you mean 'test'?")),
    # evaluations
    _eval("task", "ledgr", says=("'ledgr'", "did you mean 'ledger'?")),
    _eval("provider", "ledger", model="opnai:gpt-5", says=("opnai", "did you mean")),
    _eval(
        "slash for a colon",
        "ledger",
        model="opnai/m@http://127.0.0.1:9/v1",
        says=("openai:m@http",),
    ),
    _eval("folder of a model", "ledger", model="local:polciy", says=("found no folder 'polciy'",)),
    _eval("file of rows", "row.jsonl", says=("row.jsonl", "does not exist")),
    _eval("column", "rows.jsonl", "question=qeustion", says=("'qeustion'", "line 1")),
    _eval("a row without a field", "gap.jsonl", says=("gap.jsonl", "line 3")),
    _eval("reward", "rows.jsonl", "reward=boxed_mth", says=("'boxed_mth'", "'boxed_math'")),
    _eval("option of a task", "ledger", "rws=30", says=("'rws'", "did you mean 'rows'?")),
    _eval("split", "ledger", "--split", "tets", says=("'tets'", "did you mean 'test'?")),
    _eval("number of items", "ledger", "--items", "0", says=("items", "0")),
    _eval("k above n", "ledger", "--n", "2", "--k", "3", says=("k", "3", "2")),
    _eval("scaffold", "ledger", "--scaffold", "defualt", says=("'defualt'", "did you mean")),
    _eval("sandbox", "ledger", "--sandbox", "dokcer", says=("'dokcer'", "did you mean")),
    _eval(
        "no price",
        "ledger",
        "--max-cost",
        "1",
        model="openai:m@http://127.0.0.1:9/v1",
        says=("price",),
    ),
)


def prepare(folder: Path) -> None:
    """Write the files that a user of these commands has: a recipe, rows, and a policy without
    weights."""
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(8)]
    gap = [*rows[:2], {"qeustion": "3 + 1?", "answer": "4"}, *rows[3:]]
    lines = [json.dumps(row) for row in rows]
    files = {
        "mine.py": RECIPE,
        "text_rate.py": RECIPE.replace(
            "steps=2,", 'steps=2, optim=train.OptimizerSpec(lr="1e-6"),'
        ),
        "unknown_argument.py": RECIPE.replace("steps=2,", "stepz=2,"),
        "empty.py": "x = 1\n",
        "broken.py": "def run():\n    return train.Run(\n",
        "imports.py": "import no_such_package\n",
        "rows.jsonl": "\n".join(lines),
        "gap.jsonl": "\n".join(map(json.dumps, gap)),
        "torn.jsonl": "\n".join([lines[0], lines[1][:-9], *lines[2:]]),
        "replies.json": '["FINAL(1)"]',
        "picture.jsonl": json.dumps(
            {"prompt": [{"role": "user", "content": PICTURE}], "answer": "a"}
        ),
        "policy/config.json": json.dumps(POLICY),
        "policy/tokenizer.json": "{}",
        "nothing/readme.txt": "",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def answers(folder: Path, mistakes: Sequence[Mistake]) -> list[Answer]:
    """Run the mistakes in ``folder`` one after the other, in forks of one new interpreter."""
    home = str(folder)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    env = {
        **kept,
        "HOME": home,
        "XDG_CONFIG_HOME": f"{home}/config",
        "RAMIFY_HOME": f"{home}/store",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--child"],
        input=json.dumps([mistake.command for mistake in mistakes]),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [Answer(**json.loads(line)) for line in done.stdout.splitlines()]


def answer_commands() -> None:
    """Read commands from stdin, run each in a fork, and print an ``Answer`` for each."""
    from ramify.cli.main import run

    commands = json.load(sys.stdin)
    if len(commands) > 1:  # what most of them import is imported once
        importlib.import_module("ramify.cli.eval")
        importlib.import_module("ramify.train.execute")
    for command in commands:
        with tempfile.TemporaryFile("w+") as printed:
            child = os.fork()
            if not child:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                os.close(0)
                code = 70
                with contextlib.suppress(BaseException):
                    code = run(command)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code | (128 if "torch" in sys.modules else 0))
            _, status, used = os.wait4(child, 0)
            code = os.waitstatus_to_exitcode(status)
            printed.seek(0)
            answer = Answer(
                code & 127 if code >= 0 else code,
                printed.read(),
                code >= 128,
                used.ru_utime + used.ru_stime,
            )
        print(json.dumps(answer._asdict()), flush=True)


def fault(mistake: Mistake, answer: Answer) -> str:
    """Return the fault of an answer, or an empty text."""
    lines = [line for line in answer.text.splitlines() if line.strip()]
    problems = {
        f"exit code {answer.code}": answer.code not in (1, 2),
        "PyTorch was imported": answer.has_torch,
        f"{len(lines)} lines": len(lines) != 1,
        "internal error": "internal error" in answer.text,
        **{f"does not say {part}": part not in answer.text for part in mistake.says},
    }
    return ", ".join(problem for problem, is_there in problems.items() if is_there)


def measure(quick: bool) -> list[Figure]:
    """Run each mistake in its own process, and return the figures."""
    faults, times, helps = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for mistake in MISTAKES:
            start = time.monotonic()
            (answer,) = answers(folder, [mistake])
            times.append(time.monotonic() - start)
            if problem := fault(mistake, answer):
                faults.append(f"{mistake.name}: {problem}")
            if len(helps) < 5:
                start = time.monotonic()
                answers(folder, [Mistake("", ("--help",), ())])
                helps.append(time.monotonic() - start)
    print(*faults, sep="\n", file=sys.stderr)
    num = len(MISTAKES)
    return [
        Figure("wrong configurations", num, "commands", {}, least=25),
        Figure("… not answered by one line with its cure, before torch", len(faults), "", {}, 0),
        Figure("… slowest answer", max(times), "s", {}, MAX_S),
        Figure(
            "… median answer, in starts of ramify --help", median(times) / median(helps), "×", {}
        ),
    ]


if __name__ == "__main__":
    if "--child" in sys.argv:
        answer_commands()
    else:
        with tempfile.TemporaryDirectory() as name:
            prepare(Path(name))
            for mistake, answer in zip(MISTAKES, answers(Path(name), MISTAKES), strict=True):
                print(f"{mistake.name}: {answer.cpu_s:.2f} s, {fault(mistake, answer) or 'right'}")
                print("    " + answer.text.strip().replace("\n", "\n    "))
