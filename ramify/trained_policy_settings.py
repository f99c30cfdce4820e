"""Read and write ``policy.json``, which records how the policy in a folder was trained.

This module also finds the policies that ship with the package.

    ramify/models/NAME/policy.json     a packaged policy, used as --model NAME
    runs/mine/policy/policy.json       a trained one, used as --model local:runs/mine/policy

    {"scaffold": "bare", "max_turns": 5, "max_depth": 1, "max_reply_tokens": 100,
     "is_from_scratch": true, "task": "ledger"}

Training writes the file. A folder without the file is either a checkpoint from elsewhere, which
works with any scaffold and limits, or a policy trained from scratch before the file existed. The
chat template tells which.

A file with an unknown field or an impossible limit is an error, since it would otherwise be ignored
silently. ``models`` reads weights and tokenizers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import explain_conversion_error

FILE = "policy.json"
_PACKAGED = Path(__file__).parent / "models"
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
_SCRATCH_MARK = "<|u|>"
"""Marks the start of a question in the conversation format of policies trained from scratch."""


class PolicyRolloutSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The settings that a policy was trained with, such as its prompts, limits and task."""

    scaffold: str | None = None
    """Name of the scaffold. None if any scaffold is suitable."""
    max_turns: AtLeastOne | None = None
    """Maximum turns per call. This and the other limits are None if the policy has no such
    limit."""
    max_depth: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Maximum levels of calls below the root."""
    max_reply_tokens: AtLeastOne | None = None
    """Maximum tokens per reply."""
    direct: bool = False
    """True if one plain call answered each short input in training. False if each call had a Python
    session, or if the folder predates this field."""
    is_from_scratch: bool = False
    """True if training began with random weights and Ramify's own conversation format."""
    task: str = ""
    """The only task that a policy from scratch was trained on. Empty if the policy is not from
    scratch, or if its folder predates this field."""

    @property
    def limits(self) -> dict[str, Any]:
        """The limits that the policy was trained with, by their names in ``engine.limits``."""
        named = {
            "max_turns": self.max_turns,
            "max_depth": self.max_depth,
            "max_reply_tokens": self.max_reply_tokens,
        }
        return {name: limit for name, limit in named.items() if limit is not None}


@functools.cache  # each run asks whether its model is one of them
def packaged_policy_names() -> tuple[str, ...]:
    """Return the names of the policies that ship with the package."""
    return tuple(sorted(path.parent.name for path in _PACKAGED.glob(f"*/{FILE}")))


def packaged_policy_folder(name: str) -> Path | None:
    """Return the folder of the policy ``name`` that ships with Ramify.

    Returns None if there is no such policy.
    """
    return _PACKAGED / name if name in packaged_policy_names() else None


def local_model_folder(model: str) -> Path | None:
    """Return the folder of a model that is loaded into this process.

    Returns None for any other model name.
    """
    if model.startswith("local:"):
        return Path(model.removeprefix("local:")).expanduser()
    return packaged_policy_folder(model)


def read_policy_settings(folder: Path) -> PolicyRolloutSettings:
    """Read the training settings that ``folder`` stores for its policy.

    Returns defaults if the file is missing. Raises ConfigError for an invalid file. In the folder
    of a training run, a file of this name has another purpose and is ignored.
    """
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=PolicyRolloutSettings)
    except (FileNotFoundError, NotADirectoryError):
        return PolicyRolloutSettings(
            is_from_scratch=_has_own_format(folder / "chat_template.jinja")
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if policy_folder_of_run(folder) is not None:
            return PolicyRolloutSettings()
        raise ConfigError(
            f"{path}: {explain_conversion_error(error, PolicyRolloutSettings)}: correct the file, "
            "or remove it to allow any scaffold"
        ) from None


def policy_folder_of_run(run: Path) -> Path | None:
    """Return the folder of the policy that the training run in the folder ``run`` has trained.

    Returns None if ``run`` does not belong to a training run.
    """
    folder = run / "policy"
    is_run = (folder / "config.json").is_file() and not (run / "config.json").is_file()
    return folder if is_run else None


def write_policy_settings(folder: Path, card: PolicyRolloutSettings) -> None:
    """Write a policy's training settings, given as ``card``, to the policy's folder.

    If all settings have their defaults, no file is written and an old one is removed.
    """
    if card == PolicyRolloutSettings():
        (folder / FILE).unlink(missing_ok=True)
        return
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(card)) + b"\n")


def _has_own_format(template: Path) -> bool:
    return template.is_file() and _SCRATCH_MARK.encode() in template.read_bytes()
