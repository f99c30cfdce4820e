"""The command ``ramify publish``: write a trained policy and its model card for Hugging Face.

The target is a folder or a repository.

    ramify publish runs/mine mine --license apache-2.0
    ramify publish runs/mine hf://me/mine --base Qwen/Qwen3-8B --track wandb

``train/hub_publication.py`` writes the files.
"""

from __future__ import annotations

from pathlib import Path

from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.terminal_text import write_stderr


def publish(
    words: list[str],
    license: str | None = None,
    base: str | None = None,
    private: bool | None = None,
    track: list[str] | None = None,
) -> int:
    if not words[0].strip() or not Path(words[0]).is_dir():
        raise UsageError(f"{words[0]} is not a folder: give the folder of a run")
    from ramify.train.hub_publication import HUB, publish

    if private and not words[1].startswith(HUB):
        raise UsageError(f"--private has no meaning for the folder {words[1]}: leave it out")
    published = publish(
        words[0],
        words[1],
        licence=license or "",
        base=base or "",
        private=bool(private),
        trackers=track or (),
    )
    if not license:
        write_stderr("no licence is stated in the card: give --license, such as apache-2.0")
    for name in published.artefacts:
        print(f"artefact of {name}")
    where = published.url or str(published.folder)
    model = words[1].removeprefix(HUB) if published.url else published.folder
    print(f"published {where}: ramify ask --model local:{model} …")
    return ExitCode.ANSWERED


COMMAND = SubcommandSpec(
    name="publish",
    about="""\
Publish the policy of RUN, the folder of a training run, to DEST: a folder, or hf://OWNER/NAME, a
repository on the Hugging Face hub. The model card has lineage, data, scores, prompt and limits.""",
    run=publish,
    words="RUN DEST",
    min_words=2,
    max_words=2,
    options=(
        CliOptionSpec("license", str, "the policy's licence, such as apache-2.0", "ID"),
        CliOptionSpec(
            "base",
            str,
            "hub name of the policy that training began with (default: the recipe's policy.path)",
        ),
        CliOptionSpec("private", bool, "create a private repository", has_no=False),
        CliOptionSpec(
            "track", list, "also log the folder as an artefact of the run: wandb or mlflow", "NAME"
        ),
    ),
)
