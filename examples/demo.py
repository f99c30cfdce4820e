"""Train a recursive language model from nothing, then ask it about ten million characters: no key, no network, no GPU.

    python examples/demo.py                   trains into runs/demo, which takes minutes; goes on there after Ctrl-C
    python examples/demo.py rl.steps=20       the same, with fields of the recipe overridden
    python examples/demo.py --model tiny      trains nothing: asks the policy that comes with the package

The ledger is several documents in one file, each in a format of its own, far longer than the policy's window of 512 tokens:
it looks, splits them, and hands each to a child. What is right is known from the rows that the ledger was made of.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from ramify.tasks.base import Item
from ramify.tasks.ledger.task import ledger

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/tiny_recursive.py"
OUT = Path("runs", "demo")
CHARS = 10_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description="Train from nothing, ask over ten million characters, show the tree.")
    parser.add_argument("overrides", nargs="*", metavar="FIELD=VALUE", help=f"of {RECIPE}")
    parser.add_argument("--model", help="ask this one, and train nothing")
    options = parser.parse_args()
    try:
        model = options.model or trained(options.overrides)
        return asked(model)
    except subprocess.CalledProcessError as error:  # it has said what is wrong
        return error.returncode


def trained(overrides: list[str]) -> str:
    """The policy that the recipe leaves; one that is there already is taken, one that was cut off is gone on with."""
    os.chdir(ROOT)
    policy = OUT / "policy"
    if (policy / "config.json").is_file():
        print(f"{policy} was trained before; remove {OUT} to train anew\n", flush=True)
    elif any(OUT.glob("checkpoints/step-*")):
        ramify("train", "--resume", str(OUT))
    else:
        print(
            "A transformer of half a million parameters, its weights random: it imitates demonstrations of which few are"
        )
        print("right, then finds out by itself, in sessions of its own and of its children, what works.\n", flush=True)
        ramify("train", RECIPE, *overrides, "--out", str(OUT))
    return f"local:{policy.resolve()}"


def asked(model: str) -> int:
    """Ask ``model`` over a ledger, show the tree, say what would have been right."""
    with tempfile.TemporaryDirectory() as folder:
        item = written(Path(folder, "ledger.txt"))
        place = {"cwd": folder, "env": environment(folder)}
        ramify("ask", item.question, "ledger.txt", "--model", model, **place)
        print(flush=True)
        ramify("show", "last", **place)
    print(f"\nThe rows that the ledger was made of say: {item.gold}")
    print("Everything above was real: the weights, the sessions and what they computed. A model that you know better:")
    print(
        '  export OPENAI_API_KEY=…\n  .venv/bin/ramify ask "Which host failed first, and why?" logs/ --model openai:gpt-5-mini'
    )
    return 0


def written(path: Path) -> Item:
    """A question; its ledger is in the file ``path``."""
    item = ledger(multi=1.0, docs=(3, 3), chars=CHARS).splits["test"][0]
    path.write_text(item.context, encoding="utf-8")
    return item


def ramify(*words: str, **place: object) -> None:
    """Run the command as a user would, after showing it. Raises CalledProcessError where it fails."""
    print(f"$ ramify {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "ramify", *words], check=True, **place)  # type: ignore[call-overload]


def environment(folder: str) -> dict[str, str]:
    """This process's, but for a user's settings and runs: a demonstration neither depends on them nor adds any."""
    settings = Path(folder, "config.toml")
    settings.touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAMIFY_")}
    return {**kept, "RAMIFY_HOME": f"{folder}/runs", "RAMIFY_CONFIG": str(settings)}


if __name__ == "__main__":
    sys.exit(main())
