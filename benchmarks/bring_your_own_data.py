"""Data sets in the formats of other libraries, and demonstrations of a resumed run.

Each data set is one line here (``tasks.dataset(PATH)``). The number of rows is compared with that of
the loader that the library itself uses: ``datasets`` for TRL, verifiers and prime-rl, and ``datasets``
with Parquet for SkyRL. The packages themselves need a GPU stack to import, so their filters by length
are not run.

A run that imitates the demonstrations of a model is ended after its first steps and resumed: a real
HTTP server counts the requests to the demonstrator.

Not here: how rows become items (``tests/tasks/test_messages.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figure

ROOT = Path(__file__).parents[1]
NUM_ROWS = 500


def _talk(number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Reply with a number."},
        {"role": "user", "content": f"{number} + 2?"},
    ]


FORMATS: dict[str, tuple[str, Any]] = {
    "TRL": ("jsonl", lambda n: {"prompt": _talk(n), "solution": str(n + 2)}),
    "verifiers": (
        "jsonl",
        lambda n: {"prompt": _talk(n), "answer": str(n + 2), "info": {"level": 1}, "task": "sums"},
    ),
    "prime-rl": ("jsonl", lambda n: {"question": f"{n} + 2?", "answer": str(n + 2), "task": "s"}),
    "SkyRL": (
        "parquet",
        lambda n: {
            "data_source": "sums",
            "prompt": _talk(n)[1:],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": str(n + 2)},
            "extra_info": {"index": n},
        },
    ),
}


def measure(quick: bool) -> list[Figure]:
    return [*(_rows(name) for name in FORMATS), _requests_of_a_resumed_run()]


def _rows(library: str) -> Figure:
    """Compare the rows that one line of Ramify loads with those of the library's own loader."""
    from ramify import tasks

    suffix, make = FORMATS[library]
    rows = [make(number) for number in range(NUM_ROWS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{suffix}"
        if suffix == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        task = tasks.dataset(path)
        ours = [item for split in task.splits.values() for item in split]
        assert sorted(item.gold for item in ours) == sorted(str(n + 2) for n in range(NUM_ROWS))
        theirs = _theirs(path, folder)
    name = f"rows of a data set in the format of {library}"
    if theirs is None:
        return Figure(
            name, len(ours), "rows", {"datasets": "not installed"}, NUM_ROWS, least=NUM_ROWS
        )
    return Figure(name, len(ours), "rows", {"datasets": theirs}, theirs, least=theirs)


def _theirs(path: Path, cache: str) -> int | None:
    """Rows that ``datasets`` loads; None if it is not installed."""
    try:
        from datasets import load_dataset
    except ImportError:
        return None
    kind = "json" if path.suffix == ".jsonl" else "parquet"
    return len(load_dataset(kind, data_files=str(path), split="train", cache_dir=cache))


def _requests_of_a_resumed_run() -> Figure:
    """Count the requests that a resumed run sends to the model that makes demonstrations."""
    sys.path.insert(0, str(ROOT))
    from tests.docs.world import scripted

    num = 0

    def reply(messages: Any) -> str:
        nonlocal num
        num += 1
        return "FINAL(0)"

    with tempfile.TemporaryDirectory() as name, scripted(reply) as url:
        folder = Path(name)
        (folder / "mine.py").write_text(
            "from ramify import train\n"
            "from tests.train.small import small\n"
            "import msgspec\n\n\n"
            "def shown(task, num, seed, scaffold, **options):\n"
            "    return train.demonstrate(task, 'openai:gpt-5-mini', num, scaffold,\n"
            "                                store='shown')\n\n\n"
            "def run():\n"
            "    run = small()\n"
            "    sft = msgspec.structs.replace(run.sft, demos='mine.py:shown', num=4)\n"
            "    return msgspec.structs.replace(run, sft=sft, warmup=None)\n"
        )
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OPENAI_API_KEY": "sk-test",
            "OPENAI_BASE_URL": url,
            "RAMIFY_HOME": str(folder / "store"),
        }
        begin = [sys.executable, "-m", "ramify", "train", "mine.py", "--out", "out", "--plain"]
        running = subprocess.Popen(
            [*begin, "rl.steps=100000", "schedule.evaluate_every=1"],
            cwd=folder,
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert running.stderr is not None
        # Read to the end, so that the pipe never fills; stop it after its first step of rollouts.
        said, until = "", time.monotonic() + 120
        for line in running.stderr:
            said = line
            if " s  rl " in line or time.monotonic() > until:
                running.terminate()
        running.wait(120)
        before = num
        resume = ["rl.steps=2", "--resume", "out"]
        done = subprocess.run(
            [*begin, *resume], cwd=folder, env=env, capture_output=True, text=True
        )
        has_asked = before >= 4 and done.returncode == 0
        if not has_asked:
            print(said, done.stderr[-500:], file=sys.stderr)
    return Figure(
        "requests to a demonstrator after resuming", num - before, "", {}, 0, valid=has_asked
    )


if __name__ == "__main__":
    from figures import show

    started = time.monotonic()
    show(measure(True))
    print(f"{time.monotonic() - started:.0f} s")
