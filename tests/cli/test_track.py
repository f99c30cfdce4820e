"""``--track``: scores of an evaluation reach a tracker; an unknown tracker is refused before
anything runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.cli.helpers import Shell
from tests.cli.test_progress import evaluating

NOTING = """
import json
class RecordingTracker:
    modules = ()
    extra = ""
    def __init__(self, about):
        self.id = about.id or "1"
        self._file = open("tracker_records.jsonl", "a")
        self._write("opened", about.name, about.id, about.config)
    def _write(self, *tracker_records):
        self._file.write(json.dumps(tracker_records) + "\\n")
        self._file.flush()
    def log(self, step, values):
        self._write("logged", step, values)
    def close(self, failed):
        self._write("closed", failed)
"""


def tracker_records(shell: Shell) -> list[list[object]]:
    return [
        msgspec.json.decode(line)
        for line in (Path(shell.folder) / "tracker_records.jsonl").read_bytes().splitlines()
    ]


def test_scores_of_an_evaluation_reach_the_tracker(shell: Shell) -> None:
    shell.write("noting.py", NOTING)
    shell.env["PYTHONPATH"] += f":{shell.folder}"
    done = shell.run(
        *evaluating(shell, "--items", "3", "--n", "2", "--track", "noting:RecordingTracker", "-q")
    )
    assert (done.code, done.err) == (0, "")
    opened, logged, closed = tracker_records(shell)
    assert opened[:3] == ["opened", "eval my_task.py:teal/test scripted:script.json", ""]
    assert opened[3]["items"] == 3  # type: ignore[index]
    assert logged[:2] == ["logged", 0]
    values = logged[2]
    assert isinstance(values, dict)
    assert (values["eval/all/average"], values["eval/all/pass@2"], values["eval/attempts"]) == (
        1.0,
        1.0,
        6.0,
    )
    assert closed == ["closed", False]


@pytest.mark.parametrize("command", ["train", "eval"])
def test_unknown_tracker_gets_one_line_error(shell: Shell, command: str) -> None:
    shell.write("small.py", "from tests.train.small import small as run\n")
    words = ("train", "small.py") if command == "train" else evaluating(shell, "--items", "1")
    done = shell.run(*words, "--track", "tensorbord")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ramify: unknown tracker 'tensorbord': did you mean 'tensorboard'?")
    assert done.err.count("\n") == 1
    assert not list(Path(shell.env["RAMIFY_HOME"]).glob("evaluations/*"))
