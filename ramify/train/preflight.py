"""Check a run's configuration for mistakes before time or money is spent.

The checks raise ConfigError or log a warning.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.engine import event_loop_thread, observation_messages
from ramify.engine.limits import Limits
from ramify.engine.prompt_scaffold import Scaffold
from ramify.engine.prompt_text import PromptFacts, context_facts
from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.attempt import GRACE_S, check_task_start
from ramify.inference.http.engine_process import check_program_installed
from ramify.logging import ComponentLogger
from ramify.models.model_config_files import (
    check_model_type,
    check_tokenizer_file,
    context_window_from_dict,
    local_model_folder,
    read_config_json,
)
from ramify.sandbox.base import check_provider_exists, open_sandbox
from ramify.tasks.base import ENDLESS, Item, Task, items_of
from ramify.tasks.data import rows_of
from ramify.tasks.mixture import TaskMixture
from ramify.tasks.validation import validate
from ramify.train.advantages.base import needs_of
from ramify.train.advantages.by_task import PerTaskAlgorithm
from ramify.train.advantages.token_loss_weights import ALSO
from ramify.train.backends.base import BACKENDS
from ramify.train.config import EvaluateSpec, Run
from ramify.train.data.sft_data import DEMOS
from ramify.train.losses import SEQUENCE_MEANS
from ramify.train.named_objectives import (
    advantage_estimator_of,
    group_of_one_problem,
    training_impossible_reason,
)
from ramify.train.other_trainer_presets import known_policy_losses
from ramify.train.signals.teacher import needed_scorers
from ramify.train.stages import with_schedule_defaults
from ramify.train.traffic_training import RecordedTrafficTask
from ramify.trained_policy_settings import packaged_policy_folder
from ramify.types.message import Message

if TYPE_CHECKING:
    from ramify.models.load import Policy

_log = ComponentLogger("train")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")
"""The kinds of devices on which a policy can run."""


def check_component_names(run: Run) -> None:
    """Check the recipe's names of components: its backend, sandbox and sources of demonstrations.

    Nothing is imported for this.
    """
    BACKENDS.check_known_name(run.compute.backend)
    check_provider_exists(run.sandbox)
    if run.sft is None:
        return
    if run.sft.shows_conversations:
        rows_of(run.sft.demos)
    elif run.sft.demos:
        if run.sft.demos not in DEMOS and Path(run.sft.demos).expanduser().is_dir():
            raise ConfigError(
                f"sft.demos={run.sft.demos} is a folder, but demos is a file of conversations or "
                "the name of a function: to learn from stored runs, set "
                f"sft.trajectories={_stored_runs_in(run.sft.demos)}"
            )
        DEMOS.check_known_name(run.sft.demos)
    if run.sft.trajectories and _stored_runs_in(run.sft.trajectories) != run.sft.trajectories:
        raise ConfigError(
            f"sft.trajectories={run.sft.trajectories} is the folder of a training run: give its "
            f"rollouts, sft.trajectories={_stored_runs_in(run.sft.trajectories)}"
        )
    if run.sft.trajectories and not Path(run.sft.trajectories).expanduser().exists():
        raise ConfigError(
            f"sft.trajectories={run.sft.trajectories} does not exist: give a JSONL file, a run's "
            "rollouts folder, or the store that `ramify demos --out` made"
        )


def _stored_runs_in(folder: str) -> str:
    """Return the folder in which to look for stored runs, given a store or a training run's folder.

    It is the subfolder ``rollouts`` of ``folder`` if that exists, and otherwise ``folder`` itself.
    A training run saves its rollouts in that subfolder.
    """
    rollouts = Path(folder) / "rollouts"
    return str(rollouts) if rollouts.expanduser().is_dir() else folder


def policy_path(run: Run) -> str | Path:
    """Return the path of the run's initial policy.

    For a policy that ships with the package, this is its folder in the package.
    """
    path = run.policy.path
    packaged = packaged_policy_folder(path)
    return path if packaged is None or Path(path).exists() else packaged


def check_policy_files(run: Run) -> None:
    """Check that the policy's folder, configuration and tokenizer are valid, without reading
    weights.

    The longest reply must also leave room for a prompt in the context window.
    """
    spec = run.policy
    if spec.device.partition(":")[0] not in DEVICES:
        raise ConfigError(
            f"policy.device={spec.device}: give one of {', '.join(DEVICES)}, with an index if "
            "there are several, as in cuda:1"
        )
    if spec.path:
        folder = local_model_folder(policy_path(run))
        config, where = read_config_json(folder), f"{folder}/config.json"
        check_tokenizer_file(folder)
    else:
        config, where = spec.shape, "policy.shape"
        if spec.tokenizer:
            try:
                check_tokenizer_file(Path(spec.tokenizer))
            except ConfigError as error:
                raise ConfigError(f"policy.tokenizer={spec.tokenizer}: {error}") from None
    check_model_type(config, where)
    check_reply_fits(run, context_window_from_dict(config), where)


def check_reply_fits(run: Run, window: int | None, where: str) -> None:
    """Raise ConfigError if the longest reply leaves no room for a prompt in the policy's ``window``
    of tokens.

    ``where`` is where the window is set.
    """
    reply = run.limits.max_reply_tokens
    if window is not None and reply >= window and reply != Limits().max_reply_tokens:
        raise ConfigError(
            f"limits.max_reply_tokens={reply} leaves no room for a prompt: the policy's window has "
            f"{window} tokens ({where}): give less, or leave it out"
        )


def traffic_task(run: Run, task: Task) -> Task:
    """Return the task with its training split replaced by recorded live traffic.

    If ``run`` names no traffic, the task is returned unchanged. Raises ConfigError if the run's
    options need new rollouts.
    """
    if not run.task.traffic:
        return task
    if run.rl is None:
        raise ConfigError(
            f"task.traffic={run.task.traffic} needs reinforcement learning: set rl, or imitate "
            "the store's runs with sft.trajectories"
        )
    needs, rollout = needs_of(run.rl.algorithm), run.rl.rollout
    reasons = {
        "rl.rollout.branch forks sessions": rollout.branch is not None,
        "the algorithm needs a greedy rollout of each prompt": needs.greedy,
        "the algorithm needs rollouts that fork": needs.branches,
        "policies and depths divide the calls of a rollout": bool(run.policies or run.depths),
    }
    reason = next((text for text, holds in reasons.items() if holds), "")
    if reason:
        raise ConfigError(
            f"task.traffic={run.task.traffic}: {reason}, and recorded conversations have none: "
            "choose another option, such as rl.algorithm=reinforce_pp"
        )
    return RecordedTrafficTask(
        task,
        Path(run.task.traffic).expanduser(),
        group=rollout.group,
        temperature=rollout.temperature,
        seed=run.seed,
    )


def check_first_items(run: Run, task: Task) -> None:
    """Set up and tear down one item of the task, or one of each task if the task is a mixture.

    This reports faults of its environment, its servers or its ``begin`` function before a policy is
    loaded. No model is called.
    """
    if isinstance(task, TaskMixture):
        for part in task.tasks.values():
            check_first_items(run, part)
        return
    split, index = ("train", run.rl.sample.first_item) if run.rl is not None else ("validation", 0)
    items = items_of(task, split)
    if not len(items):
        return
    item = items[index % len(items)]
    try:
        event_loop_thread.run(check_task_start(task, item, _grace_s(run)))
    except RamifyError as error:
        where = f"task '{task.name}', item {item.id}"
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error


def _grace_s(run: Run) -> float:
    """Return the time limit in seconds for each call into the task's code."""
    return run.rl.rollout.grace_s if run.rl is not None else GRACE_S


def check_system_message(run: Run, scaffold: Scaffold) -> None:
    """Raise ConfigError if the scaffold begins with a system message but the policy's prompt format
    has none."""
    spec = run.policy
    if not spec.path and not spec.tokenizer and scaffold.system:
        raise ConfigError(
            f"scaffold={run.scaffold} needs a system message, which a tokenizer made by the run "
            "(policy.words, or from demonstrations) does not support: set scaffold=tiny, or give "
            "policy.path or policy.tokenizer"
        )


def check_splits_and_gold_scores(run: Run, task: Task) -> None:
    """Check that the task has the splits the run uses and that its reference answers score 1.

    Logs a warning if the options make learning from the task impossible, or if the scores were not
    checked.
    """
    splits = dict.fromkeys(("train", "validation", *run.evaluate.first, *run.evaluate.final))
    for split in splits:
        items_of(task, split)
    skipped = validate(task, splits, gold=run.task.validate, score_s=_grace_s(run))
    if skipped:
        text = skipped if run.task.validate else f"{skipped} (task.validate=false)"
        _log.warning("task_not_checked", text, shown=True, task=run.task.name)
    if run.rl is not None and isinstance(run.rl.algorithm, PerTaskAlgorithm):
        if not isinstance(task, TaskMixture):
            raise ConfigError(
                f"rl.algorithm=by_task has an algorithm for each task of a mixture, but "
                f"'{run.task.name}' is one task: set task.name=mixture, or choose one algorithm"
            )
        run.rl.algorithm.check(task.tasks, task.trained)
    check_objective(run)
    _check_sizes(run, task)
    if (
        run.rl is not None
        and run.rl.sample.settled_share is not None
        and len(items_of(task, "train")) >= ENDLESS
        and not isinstance(task, TaskMixture)
    ):
        _log.issue_python_warning(
            f"rl.sample.settled_share={run.rl.sample.settled_share:g} has no effect: "
            f"'{run.task.name}' generates new items without end, so none is asked twice; leave it "
            "out, or train on a mixture, whose parts it compares",
            stacklevel=2,
        )
    if run.rl is not None and run.rl.loss.kl_beta and run.rl.loss.kl == "k1":
        _log.issue_python_warning(
            "rl.loss.kl=k1: the gradient of k1 does not depend on the reference, so it does not "
            "keep the policy near it; use k2 or k3+, or rl.algorithm.kl_reward, which uses k1",
            stacklevel=2,
        )


def _check_sizes(run: Run, task: Task) -> None:
    """Raise ConfigError if a step is divided into more minibatches than it has rollouts.

    Logs a warning if a step or an evaluation asks for more items than the task has.
    """
    if run.rl is not None:
        sample, group = run.rl.sample, run.rl.rollout.group
        most = (sample.max_items or sample.items) * group
        if sample.minibatches > most:
            raise ConfigError(
                f"rl.sample.minibatches={sample.minibatches} divide the rollouts of a step, which "
                f"has at most {most}: give at most that many, or raise rl.sample.items or "
                "rl.rollout.group"
            )
        num = len(items_of(task, "train"))
        if sample.items > num:
            _log.issue_python_warning(
                f"rl.sample.items={sample.items}: the split train has {num} items, so each step "
                f"asks some of them {-(-sample.items // num)} times",
                stacklevel=3,
            )
    for name, splits in (
        ("num", dict.fromkeys((*run.evaluate.first, *run.evaluate.final))),
        ("validation", ("validation",)),
    ):
        given = getattr(run.evaluate, name)
        sizes = {split: len(items_of(task, split)) for split in splits}
        sizes = {split: num for split, num in sizes.items() if given and num < given}
        if sizes and given != getattr(EvaluateSpec(), name):
            shown = ", ".join(f"{split} {num}" for split, num in sizes.items())
            _log.issue_python_warning(
                f"evaluate.{name}={given}: there are fewer items ({shown}), and all are used",
                stacklevel=3,
            )


def check_objective(run: Run) -> None:
    """Raise ConfigError if the policy or the group size does not suit the run's objective.

    It is raised if the policy cannot be trained with the objective, or if the algorithm compares
    the rollouts of a group and a group has only one. Logs a warning if the policy loss is unusual
    for the objective, or if it overrides ``rl.algorithm.reduction``.
    """
    if run.rl is None:
        return
    rl, name = run.rl, run.rl.objective
    loss = _tag(rl.loss.policy)
    if name:
        wants_critic = needs_of(rl.algorithm).values  # asking a backend loads PyTorch
        has_critic = wants_critic and hasattr(BACKENDS.resolve(run.compute.backend), "with_critic")
        why = training_impossible_reason(
            name, rl.algorithm, rl.rollout.group, has_critic=has_critic
        )
        if why:
            raise ConfigError(why)
        usual = known_policy_losses(name)
        if loss not in usual:
            _log.issue_python_warning(
                f"rl.objective={name} has the loss {' or '.join(usual)}, but "
                f"rl.loss.policy={loss}: to apply the objective, give it as an override, or with "
                "with_objective",
                stacklevel=3,
            )
    elif rl.rollout.group == 1 and rl.algorithm.has_group_baseline and rl.rollout.branch is None:
        raise ConfigError(group_of_one_problem(f"rl.algorithm={_tag(rl.algorithm)}"))
    reduction = getattr(advantage_estimator_of(rl.algorithm), "reduction", None)
    reduction = ALSO.get(str(reduction), reduction)
    if rl.loss.reduction is not None and reduction not in ("constant", "call", "rollout"):
        _log.issue_python_warning(
            f"rl.algorithm.reduction={reduction} has no effect: rl.loss.policy={loss} averages "
            f"over each {rl.loss.reduction}, as in its paper; to use it, set "
            "rl.loss.policy.sequence_mean=false",
            stacklevel=3,
        )
    is_changed = getattr(rl.loss.policy, "sequence_mean", True) is False
    if is_changed and loss in SEQUENCE_MEANS and reduction not in ("call", "rollout"):
        _log.issue_python_warning(
            f"rl.loss.policy.sequence_mean=false differs from the paper of {loss}, which averages "
            f"over sequences: rl.algorithm.reduction={reduction} gives long ones more weight",
            stacklevel=3,
        )


def _tag(part: Any) -> str:
    config = getattr(part, "__struct_config__", None)
    return str(getattr(config, "tag", None) or type(part).__name__)


def check_branches(run: Run) -> None:
    """Raise ConfigError if the options for forking rollouts conflict with the rest of the recipe.

    Rollouts must fork if and only if the advantage estimator compares continuations, and the
    sandbox and the limits must allow it.
    """
    if run.rl is None:
        return
    branch, needed = run.rl.rollout.branch, needs_of(run.rl.algorithm).branches
    name = _tag(run.rl.algorithm)
    if branch is None:
        if needed:
            raise ConfigError(
                f"rl.algorithm={name} compares continuations of forked rollouts, and none forks: "
                "set rl.rollout.branch, as rl.rollout.branch.where=[1]"
            )
        return
    if not needed:
        raise ConfigError(
            f"rl.algorithm={name} does not compare the continuations of forked rollouts "
            "(rl.rollout.branch): choose branch, vine or entropy_branch, or set "
            "rl.rollout.branch=null"
        )
    root = run.depths[0].max_turns if run.depths else None
    branch.check(run.limits, root or run.limits.max_turns)
    if not open_sandbox(run.sandbox).caps.fork:
        raise ConfigError(
            f"rl.rollout.branch forks sessions, and sandbox.provider={run.sandbox.provider} cannot "
            "do that: use jail or process, or set rl.rollout.branch=null"
        )


def check_engine_memory(config: Any, dtype: str, device: str) -> None:
    """Raise ConfigError if the policy's weights do not fit into the memory of the engine's device.

    This applies to an engine in this process, which holds the whole model. ``dtype`` is the
    policy's data type.
    """
    import torch

    from ramify.models.load import default_dtype
    from ramify.train.backends.meta_model import build_meta_model

    kind = default_dtype(config, device) if dtype == "auto" else getattr(torch, dtype)
    parameters = sum(each.numel() for each in build_meta_model(config).parameters())
    needed = parameters * kind.itemsize
    is_cuda = device == "cuda"
    room = (
        torch.cuda.get_device_properties(0).total_memory
        if is_cuda
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    if room and needed > room:
        raise ConfigError(
            f"the engine of this process holds the whole policy: {parameters:,} parameters x "
            f"{kind.itemsize} bytes = {needed / 1e9:.4g} GB, but its device ({device}) has "
            f"{room / 1e9:.4g} GB: use engines over HTTP, which spread it over several devices: "
            "inference.engine=vllm, or inference.urls=[…]"
        )


def check_device(run: Run) -> None:
    """Raise ConfigError if the recipe names a GPU that this machine does not have."""
    import torch

    kind, _, index = run.policy.device.partition(":")
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= num:
        available = f"{num} GPUs" if num else "no GPU, or torch was built without CUDA"
        raise ConfigError(
            f"policy.device={run.policy.device}: this machine has {available}: set "
            "policy.device=cpu, or remove it"
        )


def check_inference_options(run: Run) -> None:
    """Raise ConfigError if the run's inference options cannot work.

    Raises ConfigError for truncated sampling (top-p or top-k) with an engine other than Ramify's.
    Such engines do not report the kept tokens, which are needed to recompute the probabilities. If
    engines run on this machine, the program that starts them must exist.
    """
    spec, rl = run.inference, run.rl
    if spec is None:
        return
    if (
        rl is not None
        and spec.engine != "ramify"
        and ((rl.rollout.top_p or 1) < 1 or rl.rollout.top_k)
    ):
        raise ConfigError(
            f"rl.rollout.top_p={rl.rollout.top_p} and top_k={rl.rollout.top_k} cannot be used in "
            f"training with inference.engine={spec.engine}, which does not report the token ids "
            "that they keep: remove them"
        )
    if run.placement is None or run.placement.kind == "local":
        check_program_installed(spec)


def check_teacher_top_p(run: Run) -> None:
    """Raise ConfigError for a teacher combined with truncated sampling (top-p or top-k).

    The log-probability of a truncated sample is relative to the kept tokens, but a teacher's is
    relative to the whole vocabulary. Each difference would be off by the logarithm of the kept
    probability.
    """
    rl = run.rl
    if rl is None or not ((rl.rollout.top_p or 1) < 1 or rl.rollout.top_k):
        return
    for name, signal in rl.signals.items():
        if needed_scorers({name: signal}):
            raise ConfigError(
                f"rl.rollout.top_p={rl.rollout.top_p} and top_k={rl.rollout.top_k} cannot be "
                f"combined with the teacher rl.signals.{name}: it scores over the whole "
                "vocabulary what was sampled from a part of it; remove them"
            )


def check_schedules(run: Run) -> None:
    """Raise ConfigError if a stage has too few steps for its learning-rate schedule.

    Only stages with a fixed number of steps are checked.
    """
    if run.warmup is not None:
        with_schedule_defaults("warmup", run.warmup.optim, run.warmup.steps)
    if run.rl is None:
        return
    steps = run.rl.steps * run.rl.sample.minibatches
    with_schedule_defaults("rl", run.rl.optim, steps)
    if run.rl.critic.optim is not None and run.rl.critic.model == "own":
        with_schedule_defaults("rl.critic", run.rl.critic.optim, steps)


def check_determinism_options(run: Run) -> None:
    """Raise ConfigError if a deterministic run has options that make its results irreproducible."""
    if not run.deterministic:
        return
    sample = None if run.rl is None else run.rl.sample
    wrong = {
        "inference": run.inference is not None,
        "placement": run.placement is not None,
        f"compute.backend={run.compute.backend}": run.compute.backend != "single",
        "compute.recompute=true": run.compute.recompute,
        "compute.compile=true": run.compute.compile,
        "rl.sample.max_staleness": sample is not None and sample.max_staleness > 0,
        "rl.sample.straggler_factor": sample is not None and sample.straggler_factor is not None,
    }
    for option, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"deterministic=true cannot be combined with {option}: remove it, or set "
                "deterministic=false"
            )


def check_policies(run: Run) -> None:
    """Raise ConfigError if the run's policies cannot be trained with the given options.

    Raise it if every learning rate of a stage is zero. Also raise it if a run with several policies
    uses options that support only one.
    """
    stages = {name: getattr(run, name) for name in ("warmup", "sft", "rl")}
    others = [spec.optim.peak_lr for spec in run.policies.values()]
    for name, stage in stages.items():
        if stage is not None and not stage.optim.peak_lr and (name != "rl" or not any(others)):
            raise ConfigError(
                f"{name}.optim.lr=0 must be a positive number: nothing would be learned"
                + (", since no other policy has a learning rate either" if others else "")
            )
    if not run.policies:
        return
    for name, spec in run.policies.items():
        if not name.isidentifier() or name == "policy":
            raise ConfigError(
                f"policies: '{name}' cannot name another policy: use letters, digits and _, and "
                "not 'policy'"
            )
        if spec.policy is not None and not spec.policy.path:
            raise ConfigError(
                f"policies.{name}.policy has no path: give a checkpoint, or leave policy out for a "
                "copy of the run's policy"
            )
        if spec.policy is None and run.policy.lora is not None:
            raise ConfigError(
                f"policies.{name} would be a copy of a policy with adapters (policy.lora): give "
                f"policies.{name}.policy a path and its own lora"
            )
    wrong = {
        "a run without rl, since other policies learn from rollouts only": run.rl is None,
        f"compute.backend={run.compute.backend}, whose ranks hold one policy: set it to single": (
            run.compute.backend != "single"
        ),
        "placement, whose roles have the processes of one policy: remove it": (
            run.placement is not None
        ),
        "rl.signals, which score the replies of one policy: remove them": (
            run.rl is not None and bool(run.rl.signals)
        ),
    }
    for option, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"policies cannot be combined with {option}")


def check_folder(out: Path) -> None:
    """Raise ConfigError if the run's folder is not writable or cannot be created.

    The check leaves no files behind.
    """
    missing: list[Path] = []
    try:
        missing += [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(b"\0")
    except OSError as error:
        raise ConfigError(
            f"the run's folder {out} is not writable ({error.strerror}): give another with --out "
            "DIR"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            for folder in missing:
                folder.rmdir()


def check_prompts(run: Run, task: Task, scaffold: Scaffold, policy: Policy) -> None:
    """Raise ConfigError if a task item's first prompt leaves no room for a reply in the context
    window.

    Every rollout of such an item would fail. Prompts that an agent writes are not checked, because
    they are not known yet.
    """
    if getattr(task, "writes_prompts", False):
        return
    room, tools = policy.window - 1, scaffold.tools()
    for item in islice(items_of(task, "train"), 32):
        tokens = len(policy.renderer.prompt(first_prompt(scaffold, run, task, item), tools))
        if tokens > room:
            raise ConfigError(
                f"item {item.id} does not fit the policy: its prompt has {tokens} tokens and the "
                f"window {room + 1}; "
                "use a scaffold that shows less of the context, or a policy with a larger window"
            )


def warn_history_rewritten(run: Run, policy: Policy) -> None:
    """Log a warning if the chat template rewrites earlier turns, because that makes training
    expensive."""
    if run.rl is None or not policy.renderer.unstable:
        return
    text = (
        f"the chat template rewrites earlier turns ({policy.renderer.unstable}): each turn is a "
        "separate path, and what follows the first change is computed again"
    )
    if run.rl.loss.is_over_sequences:
        limit = run.compute.max_tokens
        text += (
            "; rl.loss takes all paths of a call as one sequence, in one batch"
            + ("" if limit is None else f", also beyond compute.max_tokens={limit}")
            + f": at most limits.max_turns={run.limits.max_turns} paths of {policy.window} tokens; "
            "if they do not fit into memory, lower limits.max_turns, or use a loss over tokens, "
            "such as rl.loss.policy=ppo_clip"
        )
    _log.warning("history_rewritten", text, shown=True)


def warn_missing_chat_template(policy: Policy) -> None:
    """Log a warning if the tokenizer has no chat template.

    Other programs could then not render prompts as they were in training.
    """
    if policy.tokenizer.chat_template:
        return
    _log.warning(
        "no_chat_template",
        "the tokenizer has no chat template: prompts are written in the format "
        f"{policy.renderer.name}, whose tokens it has; set its chat_template, or programs that "
        "load the trained policy will not know the format",
        shown=True,
    )


def first_prompt(scaffold: Scaffold, run: Run, task: Task, item: Item) -> list[Message]:
    """Return the messages at the start of the root call for a task item.

    If an agent writes the prompt itself, the beginning of the question is used instead.
    """
    if getattr(task, "writes_prompts", False):
        return [Message("user", item.question[:100])]
    chars = observation_messages.count_context_chars(item.context)
    context = context_facts(item.context, chars)
    facts = PromptFacts(context=context, children=run.limits.max_depth > 0)
    system = scaffold.system_prompt(facts)
    first = Message("user", scaffold.first_message(item.question, item.context, context))
    return [Message("system", system), first] if system else [first]
