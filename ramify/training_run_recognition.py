"""Recognize the files of a training run, and name the command that reads each of them.

runs/tiny                               the folder of a training run
runs/tiny/checkpoints/step-000004       a checkpoint of a training run
runs/tiny/rollouts                      the saved rollouts of a training run
runs/tiny/rollouts/step-000004.jsonl    saved rollouts of a training run
runs/tiny/policy                        the trained policy of a training run
"""

from __future__ import annotations

from pathlib import Path

_FIRST = 4096
"""Number of bytes at the beginning of a file that are read to recognize saved rollouts."""
_IS_ROLLOUT = (b'"question":', b'"schema_version":')


def training_run_hint(path: Path) -> str:
    """Describe a file of a training run, and name the command that reads it.

    If a training run wrote ``path``, return a hint such as ``it is a checkpoint of a training run:
    …``. Otherwise return an empty string.
    """
    path = path.expanduser()
    if _is_run(path):
        policy = path / "policy"
        model = f", and its policy answers as --model local:{policy}" if _is_policy(policy) else ""
        return (
            f"it is the folder of a training run: ramify view {path} shows it, ramify train "
            f"--resume {path} continues it{model}"
        )
    if (path / "state.json").is_file() and path.parent.name == "checkpoints":
        return (
            f"it is a checkpoint of a training run: ramify train --resume {path} continues from "
            f"it, and its policy answers as --model local:{path / 'policy'}"
        )
    if path.name == "checkpoints" and _is_run(path.parent):
        return (
            f"it holds the checkpoints of a training run: ramify train --resume {path.parent} "
            f"continues from the last one, and --resume {path}/step-… from another"
        )
    if path.is_dir() and _is_run(path.parent) and path.name == "rollouts":
        return (
            f"it holds the saved rollouts of a training run: ramify view {path.parent} shows them, "
            f"and the field sft.trajectories={path} of a run learns from them"
        )
    if _has_rollouts(path):
        return (
            f"it is a file of rollouts: ramify view {path} shows them, and the field "
            f"sft.trajectories={path} of a run learns from them"
        )
    if _is_policy(path) and (_is_run(path.parent) or (path.parent / "state.json").is_file()):
        return f"it is the policy of a training run, and answers as --model local:{path}"
    return ""


def is_viewable_folder(folder: Path) -> bool:
    """Return True unless ``folder`` is a policy or checkpoint folder of a training run.

    There is nothing to view in those folders.
    """
    hint = training_run_hint(folder)
    return not hint or _is_run(folder.expanduser()) or folder.name == "rollouts"


def append_training_run_hint(message: str, path: Path) -> str:
    """Append to ``message`` the hint on the training-run file at ``path``, if there is one."""
    hint = training_run_hint(path)
    return f"{message}; {hint}" if hint else message


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or any(folder.glob("checkpoints/step-*"))


def _is_policy(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _has_rollouts(path: Path) -> bool:
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_FIRST)
    return start.startswith(b'{"id":') and all(mark in start for mark in _IS_ROLLOUT)
