"""Publish a trained policy as a Hugging Face folder with a model card.

It can also be uploaded to a repository on the hub and to the run's experiment trackers.

    RUN/policy ─────────┐
    RUN/policy.json     ├─> DEST/ config.json, *.safetensors, tokenizer, README.md, ramify.json
    RUN/checkpoints ────┤        adapter/: LoRA in peft's format, if adapters were trained
    RUN/metrics.jsonl ──┘

The card states facts of the run: the origin of the weights, the data, scores with intervals, the
prompt that the policy was trained on, limits and licence. Paths of this machine and keys never
appear in it. How a tracker sends a folder is defined in ``trackers/``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ramify import __version__
from ramify.clients.function_client import FunctionClient
from ramify.engine import event_loop_thread
from ramify.engine.prompt_scaffold import scaffold_of
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, RamifyError, StoreError
from ramify.logging import ComponentLogger
from ramify.models import folder_file_checksums
from ramify.secret_redaction import redact_likely_secrets
from ramify.tasks.base import Item, RolloutInitialState, items_of, task_of
from ramify.train.checkpoint import FOLDER, CheckpointedProgress, read_state
from ramify.train.config import Run
from ramify.train.config_redaction import redact_config
from ramify.train.lineage import LINEAGE
from ramify.train.metrics import read_metrics
from ramify.train.recipe import load_stored_run
from ramify.train.run_record import FinalPolicyInfo
from ramify.train.trackers.base import send_folder
from ramify.trained_policy_settings import read_policy_settings

HUB = "hf://"
_CARD, _CONFIG, _ADAPTER = "README.md", "ramify.json", "adapter"
_BEGIN = "<!-- written by ramify publish -->"
_STAGES = ("warmup", "sft", "rl")
_log = ComponentLogger("train")


class PublishedPolicyLocations(NamedTuple):
    """The places where a policy was published: a folder, a hub repository and experiment trackers.

    Example:
        train.publish("runs/mine", "hf://me/mine").url
    """

    folder: Path
    """The published folder. After an upload to the hub it no longer exists."""
    url: str
    """Address of the repository on the hub. Empty if only a folder was written."""
    artefacts: tuple[str, ...]
    """Names of the trackers that received the folder."""


def publish(
    run_folder: str | Path,
    dest: str | Path,
    *,
    licence: str = "",
    base: str = "",
    private: bool = False,
    trackers: Sequence[str] = (),
) -> PublishedPolicyLocations:
    """Publish the policy of ``run_folder`` to ``dest``, which is a folder or ``hf://OWNER/NAME``.

    ``licence`` is the licence's identifier on the hub, such as ``apache-2.0``. ``base`` is the hub
    name of the model that training began with; by default the one in the recipe, unless that is a
    local folder. ``trackers`` are names of the run's trackers that should receive the policy too.
    Raises ConfigError if the folder has no trained policy, or if the hub or a tracker refuses it.

    Example:
        train.publish("runs/mine", "hf://me/mine", licence="apache-2.0")
    """
    source = Path(run_folder)
    _check_run(source)
    kept, state, run = _read_trained_policy(source)
    repository = str(dest).removeprefix(HUB) if str(dest).startswith(HUB) else ""
    if repository and repository.strip("/").count("/") != 1:
        raise ConfigError(f"{dest}: give hf://OWNER/NAME")
    folder = source / ".publish" if repository else Path(dest)
    if repository:
        shutil.rmtree(folder, ignore_errors=True)
    _write(folder, source, kept, state, run, licence, base)
    url = ""
    try:
        sent = tuple(
            send_folder(
                source, name, run.name, folder, state.config, run.tracker_options.get(name, {})
            )
            for name in trackers
        )
        if repository:
            url = _push(folder, repository.strip("/"), private, kept)
    finally:
        if repository:
            shutil.rmtree(folder, ignore_errors=True)
    return PublishedPolicyLocations(folder, url, sent)


def _check_run(source: Path) -> None:
    """Raise ConfigError if ``source`` is only a part of a run, such as its policy folder.

    The policy's folder has a file of the same name as the run's folder.
    """
    if (source / FOLDER).is_dir():
        return
    for folder in source.absolute().parents[:3]:
        if (folder / FOLDER).is_dir():
            shown = folder if source.is_absolute() else Path(os.path.relpath(folder))
            raise ConfigError(f"{source} is a part of a run: give the run's folder, {shown}")


def _read_trained_policy(source: Path) -> tuple[FinalPolicyInfo, CheckpointedProgress, Run]:
    """Read the record of the run's final policy, and the run's state and configuration at that
    point.

    Raises ConfigError if the run has not trained a policy.
    """
    try:
        kept = msgspec.json.decode((source / "policy.json").read_bytes(), type=FinalPolicyInfo)
        checkpoint = source / FOLDER / kept.checkpoint
        return kept, read_state(checkpoint), load_stored_run(checkpoint)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{source} has no trained policy: give the folder of a run that has ended "
            "(ramify train --out)"
        ) from None
    except msgspec.MsgspecError as error:
        raise StoreError(f"{source / 'policy.json'} is damaged: {error}") from None


def _write(
    folder: Path,
    source: Path,
    kept: FinalPolicyInfo,
    state: CheckpointedProgress,
    run: Run,
    licence: str,
    base: str,
) -> None:
    """Write the files to publish to ``folder``: weights, configuration and model card.

    Raises ConfigError if the folder contains anything other than an earlier publication.
    """
    card = folder / _CARD
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder, or hf://OWNER/NAME")
    is_ours = card.is_file() and _BEGIN in card.read_text(encoding="utf-8", errors="replace")
    if folder.is_dir() and any(folder.iterdir()) and not is_ours:
        raise ConfigError(f"{folder} is not empty, and not a published policy: give a new folder")
    folder_file_checksums.check(source / "policy")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "policy", folder)
    if run.policy.lora is not None and not (folder / _ADAPTER).is_dir():
        _write_adapter(folder / _ADAPTER, source / FOLDER / kept.checkpoint / "backend", run)
    base = base or ("" if Path(run.policy.path).exists() else run.policy.path)
    if base and (folder / _ADAPTER).is_dir():
        _name_base(folder / _ADAPTER, base)
    config = {"ramify": __version__, "run": redact_config(state.config)}
    text = msgspec.json.format(msgspec.json.encode(config)).decode()
    text = redact_likely_secrets(_without_folders(text))
    (folder / _CONFIG).write_text(f"{text}\n", encoding="utf-8")
    text = redact_likely_secrets(_card(folder, source, kept, run, licence, base))
    card.write_text(text, encoding="utf-8")
    folder_file_checksums.write(folder)


_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s\"'`:/]+/)+(?=[^\s\"'`:/])")


def _without_folders(text: str) -> str:
    """Shorten absolute paths in ``text`` to file names, because the folders mean nothing elsewhere.

    For example, ``/data/mine/rows.jsonl`` becomes ``rows.jsonl``.
    """
    return _FOLDERS.sub("", text)


# --- adapters


def _write_adapter(folder: Path, backend: Path, run: Run) -> None:
    """Write the LoRA adapters of a run that was trained in a single process to ``folder``.

    The matrices are read from the backend's part of the checkpoint.
    """
    import torch

    from ramify.train.backends import sharded_lora
    from ramify.train.initial_policy import lora_adapter_spec

    sharded_lora.need_peft()
    try:
        weights = torch.load(backend / "backend.pt", map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{backend} holds no adapters: its checkpoint was removed") from None
    mark = ".parametrizations.weight.0."
    found = {name: each for name, each in weights["weights"].items() if mark in name}
    names = sorted({name.partition(mark)[0] for name in found})
    tensors = [
        (f"{name.replace(mark, '.lora_')}.default.weight", each) for name, each in found.items()
    ]
    sharded_lora.save(folder, lora_adapter_spec(run), names, tensors)


def _name_base(folder: Path, base: str) -> None:
    """Write the name of the base model into the adapters' configuration file."""
    path = folder / "adapter_config.json"
    config = msgspec.json.decode(path.read_bytes()) | {"base_model_name_or_path": base}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")


# --- the model card


def _card(
    folder: Path, source: Path, kept: FinalPolicyInfo, run: Run, licence: str, base: str
) -> str:
    from huggingface_hub import ModelCardData

    ways = _answer_ways(run, direct=read_policy_settings(folder).direct)
    data = ModelCardData(
        license=licence or None,
        base_model=base or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[
            "ramify",
            *(["recursive-language-model"] if ways.session else []),
            *(["lora"] if run.policy.lora else []),
        ],
    )
    begun: dict[str, float] = {}
    for row in read_metrics(source):  # one for each split
        if row.stage == "first":
            begun = {**row.values, **begun}
    parts = [
        f"---\n{data.to_yaml()}\n---\n{_BEGIN}\n# {run.name}",
        f"{_describe_policy(ways)} Trained with Ramify.",
        _usage(bool((folder / _ADAPTER).is_dir())),
        f"## Lineage\n{_bullet_list(_lineage(source, kept, run, base))}",
        f"## Data\n{_bullet_list(_data_facts(run))}",
        f"## Scores\n{_scores(kept, begun)}",
        f"## Prompt\n{_prompt(run, direct=ways.plain)}",
        f"## Limits\n{_bullet_list(_limits(run, ways))}",
        f"## Licence\n{_licence(licence, base)}",
    ]
    return "\n\n".join(parts) + "\n"


def _usage(has_adapter: bool) -> str:
    adapter = (
        "\n\nThe folder `adapter` has the trained LoRA matrices alone, in peft's format; the "
        "weights beside it have them added."
        if has_adapter
        else ""
    )
    return (
        "## Use\n```bash\nramify ask --model local:FOLDER QUESTION PATH\n```\n`transformers` loads "
        f"the folder with `AutoModelForCausalLM` and `AutoTokenizer`.{adapter}"
    )


def _bullet_list(facts: Iterator[str]) -> str:
    return "\n".join(f"- {fact}" for fact in facts)


def _lineage(source: Path, kept: FinalPolicyInfo, run: Run, base: str) -> Iterator[str]:
    begun = base or Path(run.policy.path).name
    yield f"Weights from: {begun or 'random values (trained from scratch)'}."
    stages = [name for name in _STAGES if getattr(run, name) is not None]
    yield f"Stages: {', '.join(stages)}."
    if run.rl is not None:
        algorithm = msgspec.to_builtins(run.rl.algorithm)
        name = algorithm.get("name") or type(run.rl.algorithm).__name__
        steps, items = run.rl.steps, run.rl.sample.items
        yield f"Reinforcement learning: {name}; {items} items in each of {steps or 'its'} steps."
    which = "the best on validation" if kept.is_best else "chosen"
    yield f"Checkpoint: step {kept.step} of {kept.last_step}, {which}."
    yield f"Seed {run.seed}; Ramify {__version__}. All options are in `{_CONFIG}`."
    for entry in LINEAGE.read(source):
        yield f"Continued {entry}."


def _data_facts(run: Run) -> Iterator[str]:
    yield f"Task: `{_without_folders(run.task.name)}`."
    for name, value in redact_config(run.task.options).items():
        yield f"{name}: `{_without_folders(str(value))}`"
    if run.sft is not None and run.sft.task is not None:
        yield f"Demonstrations of the task `{_without_folders(run.sft.task.name)}`."
    yield "Training, validation and test items are disjoint."


def _scores(kept: FinalPolicyInfo, begun: Mapping[str, float]) -> str:
    """Return a Markdown table of the rewards before and after training, with their 95 %
    intervals."""
    if not kept.scores:
        return "The run evaluated nothing."
    rows = ["| items | reward | 95 % interval | before training |", "|---|---|---|---|"]
    for split, score in kept.scores.items():
        before = begun.get(f"{split}/reward")
        shown = "" if before is None else f"{before:.3f}"
        rows.append(
            f"| {split} | {score.reward:.3f} | {score.low:.3f} to {score.high:.3f} | {shown} |"
        )
    return "\n".join([*rows, "", "The checkpoint was chosen by its validation reward."])


class UsedAnswerModes(NamedTuple):
    """The ways in which a policy answered questions in training: plain calls, sandboxed sessions or
    both."""

    plain: bool
    """True if short inputs were answered by one plain call."""
    session: bool
    """True if any input had a Python session."""


_LOOKED_AT = 20
"""Maximum number of validation items that are looked at."""


def _answer_ways(run: Run, *, direct: bool) -> UsedAnswerModes:
    """Return the ways in which the policy answered training questions: plain calls, sessions or
    both.

    ``direct`` is true if it was trained with plain calls; then the validation items tell whether
    some of them need a session.
    """
    if not direct:
        return UsedAnswerModes(plain=False, session=True)
    try:
        items = items_of(task_of(run.task.name, **run.task.options), "validation")
        num = min(len(items), _LOOKED_AT)
        with _asking_nobody(run) as rlm:
            plain = [
                event_loop_thread.run(
                    rlm.is_direct(_task_start(items[index]), items[index].question)
                )
                for index in range(num)
            ]
    except (RamifyError, LookupError):
        plain = []  # _prompt reports it
    return UsedAnswerModes(plain=True, session=not all(plain))


def _asking_nobody(run: Run) -> RLM:
    """Return an ``RLM`` configured like the run's rollouts, but with a dummy model client.

    It is used only for looking at prompts.
    """
    nobody = FunctionClient(lambda messages: "", "nobody:asked")
    return RLM(nobody, limits=run.limits, scaffold=scaffold_of(run.scaffold))


def _task_start(item: Item) -> RolloutInitialState:
    return RolloutInitialState(context=item.context, messages=item.messages)


def _describe_policy(ways: UsedAnswerModes) -> str:
    if not ways.plain:
        return (
            "A policy for recursive language models: it gets its input as a variable in a Python "
            "session, and writes code to read it."
        )
    if not ways.session:
        return "A policy that answers by one plain call: its reply to the prompt is the answer."
    return (
        "A policy that answers about a short input by one plain call. It gets a longer one as a "
        "variable in a Python session, and writes code to read it."
    )


def _prompt(run: Run, *, direct: bool) -> str:
    """Return the section of the model card that describes the policy's prompt.

    It shows the messages that precede the first reply to a validation item. ``direct``: whether a
    plain call answers a short input.
    """
    name = run.scaffold if isinstance(run.scaffold, str) else type(run.scaffold).__name__
    begin = f"Trained with the scaffold `{name}`; other prompts were not seen."
    try:
        item = items_of(task_of(run.task.name, **run.task.options), "validation")[0]
        with _asking_nobody(run) as rlm:
            preview = rlm.prompt(_task_start(item), item.question, direct=direct)
    except (RamifyError, LookupError) as error:
        _log.warning("prompt_unknown", f"the card has no prompt: {error}", shown=True)
        return begin
    shown = [f"{each.role}: {_shorten_text(each.content)}" for each in preview.messages]
    return "\n".join(
        [f"{begin} The first request of a validation item:", "", "~~~text", *shown, "~~~"]
    )


def _shorten_text(text: str, chars: int = 6000) -> str:
    text = text.replace("~~~", "~ ~ ~")
    return text if len(text) <= chars else f"{text[:chars]}… ({len(text):,} characters)"


def _limits(run: Run, ways: UsedAnswerModes) -> Iterator[str]:
    yield "It was trained on the task above, and was not tested on others."
    limits = run.limits
    if not ways.session:
        yield f"Trained with at most {limits.max_reply_tokens} tokens per reply."
        return
    yield "It writes Python code that is run: use a sandbox, which `ramify` does by default."
    yield (
        f"Trained with at most {limits.max_turns} turns per call, depth {limits.max_depth} and "
        f"{limits.max_reply_tokens} tokens per reply."
    )


def _licence(licence: str, base: str) -> str:
    if licence:
        return f"`{licence}`" + (f"; see also the licence of {base}." if base else ".")
    return "Not stated." + (f" That of {base} applies to what is derived from it." if base else "")


# --- the hub


def _push(folder: Path, repository: str, private: bool, kept: FinalPolicyInfo) -> str:
    """Upload ``folder`` to the hub and return the address of the repository.

    Raises ConfigError with the hub's own reason if the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="ramify", library_version=__version__)
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"Step {kept.step} of {kept.last_step}",
        )
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else ""
        advice = " (log in: hf auth login, or set HF_TOKEN)" if code in (401, 403) else ""
        reason = redact_likely_secrets(" ".join(str(error).split()))[:300]
        raise ConfigError(f"the hub refused {repository}{advice}: {reason}") from None
    except (OSError, ValueError) as error:
        reason = redact_likely_secrets(" ".join(str(error).split()))[:300]
        raise ConfigError(f"{repository} could not be published: {reason}") from None
    return str(made)
