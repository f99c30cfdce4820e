"""The command ``ramify init task NAME``: create a runnable task with a recipe and a test.

The files include a demonstrator.

    ramify init task errors         errors.py: task, expert, demos and run(); test_errors.py
    ramify train errors.py --out runs/errors

docs/tasks.md and docs/demonstrations.md explain the files.
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from ramify.cli.parser import ExitCode, SubcommandSpec, UsageError

_TASK = '''"""The task NAME: its items, its score, an expert that shows it, and a recipe.

    ramify train NAME.py --out runs/NAME
    ramify eval NAME.py:NAME --model local:runs/NAME/policy
"""

import random
import re

from ramify import Limits, tasks, train

HOSTS = ("api", "mail", "auth")


def make(rng):
    """One item: a log, and how often one host failed in it."""
    num = rng.randint(20, 60)
    rows = [f"{rng.choice(HOSTS)} {rng.choice(['ok', 'error'])}" for _ in range(num)]
    host = rng.choice(HOSTS)
    gold = rows.count(f"{host} error")
    return tasks.Item(f"How many errors has {host}?", "\\n".join(rows), gold=gold)


def NAME():
    return tasks.DatasetTask("NAME", tasks.generated("NAME", make), tasks.numeric)


def expert(messages):
    """The next reply of a call: look, count, answer. Half of the time it counts every line."""
    host = re.search(r"errors has (\\S+)\\?", messages[0].content)[1]
    which = random.Random(messages[0].content).choice(("l=='{} error'", "'{}' in l")).format(host)
    count = f"L=context.splitlines()\\nr=sum({which} for l in L)\\nprint(r)"
    replies = ("print(context[:40])", count, "FINAL(r)")
    return replies[sum(message.role == "assistant" for message in messages)]


def demos(task, num, seed, scaffold):
    return train.demonstrate(task, expert, num, scaffold)  # or a model: "openai:gpt-5-mini"


def run():
    return train.Run(
        name="NAME",
        policy=train.PolicySpec(path="tiny"),
        task=train.TaskSpec(name=f"{__file__}:NAME"),
        sft=train.SftSpec(
            demos=f"{__file__}:demos",
            num=200,
            epochs=2,
            optim=train.OptimizerSpec(kind="muon", lr=6e-3, schedule="linear"),
        ),
        rl=train.RlSpec(
            steps=10,
            sample=train.RolloutBatchSpec(items=12, minibatches=2),
            rollout=train.RolloutOptions(group=8),
            optim=train.OptimizerSpec(lr=5e-4, warmup_steps=2),
        ),
        scaffold="tiny",
        limits=Limits(max_turns=4, max_depth=0, max_reply_tokens=100),
        evaluate=train.EvaluateSpec(num=32, validation=16, final=("test",)),
        threads=1,
    )
'''
_TEST = '''"""The task NAME proves itself, and its expert solves a part of it."""

from ramify import tasks
from ramify.engine.prompt_scaffold import scaffold_of

from NAME import NAME, demos


def test_gold_answers_score_1_and_wrong_ones_do_not():
    assert tasks.validate(NAME()) == ""


def test_the_expert_shows_what_is_right_and_what_is_not():
    shown = demos(NAME(), 12, 0, scaffold_of("tiny"))
    assert {run.rewards["correct"] for run in shown} == {0.0, 1.0}
'''


def init(words: list[str]) -> int:
    kind, name = words
    if kind != "task":
        raise UsageError(f"ramify init {kind}: only 'task' can be written: ramify init task NAME")
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise UsageError(
            f"'{name}' is not a valid module name: use lowercase letters, digits and _, as in "
            "my_task"
        )
    files = {Path(f"{name}.py"): _TASK, Path(f"test_{name}.py"): _TEST}
    for path in files:
        if path.exists():
            raise UsageError(f"{path} exists already: remove it, or give another name")
    if owner := _module_owner(name):
        raise UsageError(
            f"'{name}' is a module of {owner}, which {name}.py would hide from every program in "
            f"this folder: give another name, such as {name}_task"
        )
    for path, text in files.items():
        path.write_text(text.replace("NAME", name))
    print(f"wrote {', '.join(map(str, files))}; next: ramify train {name}.py --out runs/{name}")
    return ExitCode.ANSWERED


def _module_owner(name: str) -> str:
    """Return what has a top-level module called ``name``, or an empty string if nothing has."""
    if name in sys.stdlib_module_names:
        return "Python"
    found = importlib.util.find_spec(name)
    return "an installed package" if found is not None and found.origin is not None else ""


COMMAND = SubcommandSpec(
    "init",
    "Write a new task to start from: NAME.py with its items, score, expert and recipe, and\n"
    "test_NAME.py.",
    init,
    "task NAME",
    2,
    2,
)
