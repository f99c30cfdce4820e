"""Compare quickstarts of TRL, verifiers, SkyRL and tinker-cookbook with the same run in Ramify: the
number of lines of each, and whether ours completes two steps at the first try.

    python benchmarks/bring_your_own_quickstarts.py        print the table

``quickstarts/theirs`` has the text of their packages (``quickstarts/README.md`` says which),
``quickstarts/ours`` the recipe that does the same. Lines are those with code or a command; blank
lines, comments and docstrings do not count, and the command that starts ours does. Ours runs as it
is, in a folder in which tiny models with random weights and a few rows stand under the names that it
uses; options on the command line make it short. Not here: how well either trains.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from figures import Figure

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).with_name("quickstarts")
MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3.5-9B-Base",
    "Qwen/Qwen3-0.6B",
)
SHORT = (
    "rl.steps=2",
    "rl.sample.items=2",
    "rl.sample.max_items=null",
    "rl.rollout.group=2",
    "limits.max_reply_tokens=8",
    "evaluate.num=2",
    "policy.slots=8",
    "threads=1",
)
SHORT_SFT = ("sft.num=4", "sft.batch_tokens=100", "threads=1")


class Quickstart(NamedTuple):
    name: str
    theirs: str
    """File in ``quickstarts/theirs``."""
    ours: str
    """File in ``quickstarts/ours``. Its docstring is the command that runs it."""
    command: tuple[str, ...]
    """Arguments of ``ramify``, which runs in a folder that ``prepare`` has filled."""


QUICKSTARTS = (
    Quickstart("TRL, SFT", "trl_sft.py.txt", "trl_sft.py", ("train", "trl_sft.py", *SHORT_SFT)),
    Quickstart("TRL, GRPO", "trl_grpo.py.txt", "trl_grpo.py", ("train", "trl_grpo.py", *SHORT)),
    Quickstart(
        "verifiers, an environment",
        "verifiers_env.py.txt",
        "verifiers_env.py",
        ("train", f"{ROOT}/recipes/rlvr.py", "task.name=verifiers_env.py:task", *SHORT),
    ),
    Quickstart(
        "SkyRL, GRPO on GSM8K",
        "skyrl_gsm8k.sh.txt",
        "skyrl_gsm8k.py",
        ("train", "skyrl_gsm8k.py", *SHORT, "trackers=[]"),
    ),
    Quickstart(
        "tinker-cookbook, RL",
        "tinker_rl_basic.py.txt",
        "tinker_rl_basic.py",
        ("train", "tinker_rl_basic.py", *SHORT),
    ),
    Quickstart(
        "tinker-cookbook, SL",
        "tinker_sl_basic.py.txt",
        "tinker_sl_basic.py",
        ("train", "tinker_sl_basic.py", *SHORT_SFT),
    ),
)


def num_lines(path: Path) -> int:
    """Number of lines with code, without blank lines, comments and docstrings. The docstring of
    each of our files is the command that starts it, and its first line counts."""
    text = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    num = 0
    if path.name.removesuffix(".txt").endswith(".py"):
        module = ast.parse(text)
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                first = node.body[0]
                if ast.get_docstring(node) is not None:
                    skipped |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
        num = int(path.parent.name == "ours")
    lines = enumerate(text.splitlines(), 1)
    return num + sum(
        number not in skipped and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in lines
    )


def prepare(folder: Path) -> None:
    """Write our quickstart, with tiny models and data sets under the names that it uses."""
    sys.path.insert(0, str(ROOT))
    from tests.train.checkpoints import chat_checkpoint

    checkpoint = chat_checkpoint(folder / "checkpoint")
    for name in MODELS:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(checkpoint)
    for each in QUICKSTARTS:
        (folder / each.ours).write_text((FOLDER / "ours" / each.ours).read_text())
    sums = [(f"What is {number} + 1?", str(number + 1)) for number in range(40)]
    talk = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in sums
    ]
    _data_set(folder / "trl-lib/Capybara", "default", {"train": talk, "test": talk})
    _data_set(folder / "HuggingFaceH4/no_robots", "default", {"train": talk, "test": talk})
    maths = [{"prompt": [{"role": "user", "content": q}], "solution": f"${a}$"} for q, a in sums]
    _data_set(folder / "trl-lib/DeepMath-103K", "default", {"train": maths})
    school = [{"question": q, "answer": f"It is {a}.\n#### {a}"} for q, a in sums]
    _data_set(folder / "openai/gsm8k", "main", {"train": school[:30], "test": school[30:]})


def _data_set(folder: Path, config: str, splits: dict[str, Sequence[object]]) -> None:
    """A folder that ``datasets.load_dataset`` reads as a data set of the hub."""
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in splits)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    )
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def measure(quick: bool) -> list[Figure]:
    """Measure the number of lines of each quickstart, and how many of ours fail at the first
    try."""
    figures = []
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for each in QUICKSTARTS:
            ours = num_lines(FOLDER / "ours" / each.ours)
            theirs = num_lines(FOLDER / "theirs" / each.theirs)
            package = each.name.partition(",")[0]
            figures.append(
                Figure(f"lines of {each.name}", ours, "lines", {package: theirs}, theirs)
            )
            done = start(each, folder)
            if done.returncode:
                failures.append(each.name)
                print(each.name, done.stderr[-2000:], sep="\n", file=sys.stderr)
    return [*figures, Figure("… of ours that do not run two steps", len(failures), "", {}, 0)]


def start(quickstart: Quickstart, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run our quickstart offline, in a folder that ``prepare`` has filled."""
    out = Path("out") / quickstart.ours.removesuffix(".py")
    offline = {"HOME": str(folder), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "ramify", *quickstart.command, "--out", str(out)],
        cwd=folder,
        env={**os.environ, **offline, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )


if __name__ == "__main__":
    from figures import show

    started = time.monotonic()
    show(measure(True))
    print(f"{time.monotonic() - started:.0f} s")
