"""Ask a recursive language model about ten million characters: no key, no network, no GPU.

    python examples/demo.py                       ask the policy of the package, within seconds
    python examples/demo.py --train               first train a policy from scratch into runs/demo,
                                                  in about ten minutes on one core; Ctrl-C and
                                                  repeat the command to continue
    python examples/demo.py --train rl.steps=20   the same, with fields of the recipe overridden
    python examples/demo.py --model local:DIR     ask another policy
    python examples/demo.py --keep FOLDER         keep the ledger and the run in FOLDER, and print
                                                  the command that draws the run

The ledger is several documents in one file, each in its own format, and far longer than the
policy's window of 512 tokens. The policy looks at it, splits it, and gives each document to a
child. The right answer follows from the generated rows. The exit code is 0 only if the answer is
right and, with --train, the policy answers at least nine in ten held-out questions.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # scripts/demo checks the arguments before it installs the package
    from ramify import tasks

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/tiny_recursive.py"
OUT = Path("runs", "demo")
CHARS = 10_000_000
FLOOR = 0.9
"""Share of the held-out questions that a trained policy must answer right."""
ENDED = (0, 3, 4)
"""Exit codes of ``ramify ask`` that leave a run to show: answered, cut short, no answer."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Ask a small policy over ten million characters, and show the tree."
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="FIELD=VALUE", help=f"of {RECIPE}, with --train"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--train", action="store_true", help="train the policy from scratch first: minutes"
    )
    which.add_argument(
        "--model", default="tiny", help="ask this model (default: tiny, the policy of the package)"
    )
    parser.add_argument(
        "--out", type=Path, help=f"folder of the training run (default: {OUT}); needs --train"
    )
    parser.add_argument(
        "--questions", type=int, default=256, help="held-out questions to measure, with --train"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the ledger and the run that asks about it"
    )
    parser.add_argument("--check-arguments", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep = options.keep and options.keep.resolve()
    if not options.train and (options.overrides or options.out):
        parser.error("fields of the recipe and --out need --train")
    if options.check_arguments:
        return 0
    out = OUT if options.out is None else options.out.resolve()
    try:
        if not options.train:
            return asked(options.model, keep)
        os.chdir(ROOT)
        policy = trained(out, options.questions, options.overrides)
        return asked(f"local:{policy}", keep) if measured(out, policy, options.questions) else 1
    except subprocess.CalledProcessError as error:  # the command has printed the reason
        return error.returncode


def trained(out: Path, num: int, overrides: list[str]) -> Path:
    """Train the recipe and return the folder of its policy. A finished policy is reused, and
    interrupted training continues."""
    policy = out / "policy"
    if (policy / "config.json").is_file():
        print(f"{policy} was trained before; remove {out} to train again\n", flush=True)
        return policy.resolve()
    words = ["--resume", str(out)]
    if not any(out.glob("checkpoints/step-*")):
        print(
            "A transformer of half a million parameters with random weights: it imitates "
            "demonstrations, few of which"
        )
        print(
            "are right, then finds out in its own sessions and those of its children what works.\n",
            flush=True,
        )
        words = [
            RECIPE,
            'evaluate.first=["test"]',
            f"evaluate.num={num}",
            *overrides,
            "--out",
            str(out),
        ]
    with tempfile.TemporaryDirectory() as folder:
        ramify("train", *words, env=environment(folder))
    return policy.resolve()


def measured(out: Path, policy: Path, num: int) -> bool:
    """Print the share of held-out questions answered right before and after reinforcement learning.
    Returns True if it is large enough."""
    from ramify import train

    rows = [row for row in train.read_metrics(out) if "test/reward" in row.values]
    with tempfile.TemporaryDirectory() as folder:
        place: dict[str, Any] = {
            "cwd": folder,
            "env": environment(folder),
            "stdout": subprocess.PIPE,
            "text": True,
        }
        question = ("eval", "ledger", "multi=1.0", "--items", str(num))
        done = ramify(*question, "--model", f"local:{policy}", "--json", **place)
    report = json.loads(done.stdout)
    right = report["rows"][0]["average"]["value"]
    print("\nQuestions about documents that training never saw, answered right:")
    for name, stage in (
        ("before reinforcement learning", "first"),
        ("after it, the last step", "last"),
    ):
        for row in rows:
            if row.stage == stage:
                print(
                    f"  {name + ', sampled at temperature 1':<60}{row.values['test/reward']:>7.1%}"
                )
    print(f"  {'the policy that is asked below, at temperature 0':<60}{right:>7.1%}\n", flush=True)
    if right < FLOOR:
        print(
            f"demo: {right:.1%} right is below {FLOOR:.0%}: training did not succeed",
            file=sys.stderr,
        )
    return bool(right >= FLOOR)


def asked(model: str, keep: Path | None) -> int:
    """Ask ``model`` about a ledger, show the tree, and compare with the right answer. The
    ledger and the run stay in the folder ``keep``, if there is one. Returns the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(keep or temporary)
        if keep:
            shutil.rmtree(keep / "runs", ignore_errors=True)  # those of an earlier demo
            keep.mkdir(parents=True, exist_ok=True)
        item = written(Path(folder, "ledger.txt"))
        place: dict[str, Any] = {"cwd": folder, "env": environment(folder)}
        words = ("ask", item.question, "ledger.txt", "--model", model)
        done = ramify(*words, **place, check=False, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode not in ENDED:
            return int(done.returncode)
        ramify("show", "last", **place)
    print(f"\nThe rows that the ledger was made of say: {item.gold}", flush=True)
    answer = done.stdout.strip()
    if answer != str(item.gold):
        print(f"demo: {model} answered {answer or 'nothing'!r}, which is wrong", file=sys.stderr)
        return int(done.returncode) or 1
    print(
        "Everything above was real: the weights, the sessions and what they computed. A model that "
        "you know better:"
    )
    print(
        "  export OPENAI_API_KEY=…\n"
        '  .venv/bin/ramify ask "What is this project for?" README.md --model openai:gpt-5-mini'
    )
    if keep:
        print(
            f"The ledger and this run are in {keep}. To see the run as a page:\n"
            f"  RAMIFY_HOME={shlex.quote(f'{keep}/runs')} .venv/bin/ramify view last"
        )
    return int(done.returncode)


def written(path: Path) -> tasks.Item:
    """Write a ledger to the file ``path`` and return the question about it."""
    from ramify import tasks

    item = tasks.task_of("ledger", multi=1.0, docs=(3, 3), chars=CHARS).splits["test"][0]
    path.write_text(item.context, encoding="utf-8")
    return item


def ramify(*words: str, check: bool = True, **place: Any) -> subprocess.CompletedProcess[str]:
    """Print the command and run it as a user would. Raises CalledProcessError if it fails and
    ``check`` is set."""
    print(f"$ ramify {shlex.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", "ramify", *words], check=check, **place)


def environment(folder: str) -> dict[str, str]:
    """Return this process's environment without the user's settings and runs, so that the demo does
    not read or add any."""
    settings = Path(folder, "config.toml")
    settings.touch()
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAMIFY_")
    }
    return {**inherited, "RAMIFY_HOME": f"{folder}/runs", "RAMIFY_CONFIG": str(settings)}


if __name__ == "__main__":
    sys.exit(main())
