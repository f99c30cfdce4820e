"""From a run's configuration to a run: what is checked before anything is spent, what is made, and in what order.

    train(run, out)                  checks ─ demonstrations ─ tokenizer ─ policy ─ engine ─ stages ─ the loop
    train(run, out, resume=path)     the same, and on from the checkpoint
    recipe("recipes/tiny.py")        the Run that its ``run()`` returns

Composes the rooms below and decides nothing that one of them could. Heavy imports happen when something is built.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import importlib.util
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.engine import observe
from ramify.engine.rlm import RLM
from ramify.engine.scaffold import Scaffold, scaffold_of
from ramify.errors import ConfigError
from ramify.tasks.base import Item, Task, items_of, task_of, total
from ramify.tasks.validate import validate
from ramify.train.algorithms import ALGORITHMS
from ramify.train.backends import launch
from ramify.train.backends.base import BACKENDS
from ramify.train.checkpoint import State, check_config, find, read_state
from ramify.train.compile import sequences
from ramify.train.config import CHOICES, Run, SftSpec, plain
from ramify.train.loop import Loop
from ramify.train.metrics import Measured
from ramify.train.override import of_name, override
from ramify.train.rollout import RolloutOptions, Rollouts
from ramify.train.selfcheck import Seen, SelfCheck
from ramify.train.sft import DEMOS, Tokeniser, read, trajectory_of
from ramify.train.stages import Imitate, Reinforce, Stage, WarmUp
from ramify.types.message import Message
from ramify.types.sequence import Sequence as Row
from ramify.types.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.local.client import LocalClient
    from ramify.policy.load import Policy
    from ramify.train.backends.base import Trained

NUM_TOKENIZER_TEXTS = 3000
"""Demonstrations that a tokenizer is trained on; more change little."""
FREE = ("cadence.", "evaluate.", "name", "compute.shard.")
"""Fields of a run that a resumed one may have otherwise: they change no weight."""
_SWITCH_S = 5e-4
"""How long one thread may keep the interpreter from another: the loop's, which speaks to sessions, waits for the engine's
after each system call. At Python's 5 ms a step of rollouts takes a fifth longer."""
_TOLERANCE = {"torch.float32": 1e-5}
_COARSE = 0.1
"""Most that two log-probabilities may differ by in half precision."""


def recipe(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run of a recipe file, with overrides. Raises ConfigError for a file without ``def run() -> Run``."""
    path = Path(path)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no recipe: give a Python file with `def run() -> Run`")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # a recipe may begin with another that lies beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    make = getattr(module, "run", None)
    run = make() if callable(make) else None
    if not isinstance(run, Run):
        raise ConfigError(f"{path} has no `def run() -> Run` (ramify.train.config.Run)")
    return override(run, overrides, CHOICES)


def stored(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a checkpoint, or the latest of a run's folder, was made by. Raises ConfigError."""
    config = dict(read_state(find(Path(path))).config)
    try:
        run = msgspec.convert(config, Run)
        if run.rl is not None:
            algorithm = of_name(run.rl.algorithm.pop("name"), ALGORITHMS, "algorithm")
            rl = msgspec.structs.replace(run.rl, algorithm=msgspec.convert(run.rl.algorithm, algorithm))
            run = msgspec.structs.replace(run, rl=rl)
    except (msgspec.ValidationError, KeyError) as error:
        raise ConfigError(
            f"{path} does not say all of its run ({error}): give the recipe that it was made by"
        ) from error
    return override(run, overrides, CHOICES)


def train(
    run: Run, out: str | Path, *, resume: str | Path | None = None,
    listener: Callable[[Measured], None] | None = None, say: Callable[[str], None] = print,
) -> State:  # fmt: skip
    """Carry ``run`` out in the folder ``out``, from the beginning or from a checkpoint; where it stands at the end.

    ``resume`` is a run's folder or one of its checkpoints. Raises ConfigError for what is wrong with the run before
    anything is trained, TrainError where training cannot go on."""
    launch.follow_if_told()
    out = Path(out)
    checkpoint = find(Path(resume)) if resume is not None else None
    if checkpoint is not None:
        check_config(read_state(checkpoint), plain(run), FREE)
    elif any(out.glob("checkpoints/step-*")):
        raise ConfigError(f"{out} holds a run already: resume it, or give another folder")

    async def carry_out() -> State:
        async with building(run, out, listener=listener, say=say) as loop:
            return await loop.run(checkpoint)

    return asyncio.run(carry_out())


@contextlib.asynccontextmanager
async def building(
    run: Run, out: Path, *, listener: Callable[[Measured], None] | None = None, say: Callable[[str], None] = print
) -> AsyncIterator[Loop]:
    """The loop of ``run``, with all that it needs open as long as the block lasts. All checks are done here."""
    made = Made(run, say)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # demonstrations and their rows stay: to look through them again and again would cost a tenth of a step
    try:
        async with made.rlm:
            yield made.loop(out, listener)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
        await made.client.close()
        if made.trained is not None:
            made.trained.close()


class Made:
    """The parts of one run, checked."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        import torch

        if run.threads:
            torch.set_num_threads(run.threads)
        self.run, self._say = run, say
        self._kind: Any = of_name(run.compute.backend, BACKENDS, "backend")
        self._kind.check(run.compute, _device_of(run))
        self.trained: Trained | None = None
        self.task: Task = task_of(run.task.name, **run.task.options)
        self.scaffold = scaffold_of(run.scaffold)
        self._check_task()
        demonstrations = list(self._demonstrations()) if run.sft is not None else []
        self.policy = self._policy(demonstrations)
        self.serving = self._serving()
        self._check_prompts()
        self.rows = self._rows(run.sft, demonstrations) if run.sft is not None else []
        self.client = self._client()
        self.seen = Seen(self.client)
        self.rlm = RLM(self.seen, limits=run.limits, scaffold=self.scaffold, sandbox=run.sandbox)

    # --- checks --------------------------------------------------------------------------------------------------

    def _check_task(self) -> None:
        run = self.run
        splits = dict.fromkeys(("train", "validation", *run.evaluate.first, *run.evaluate.final))
        for split in splits:
            items_of(self.task, split)
        validate(self.task, splits)
        if run.rl is not None and run.rl.rollout.group == 1 and run.rl.algorithm.has_group_baseline:
            warnings.warn(
                "a group of one has nothing to be compared with: every advantage is 0, and nothing will be learnt; set "
                "rl.rollout.group to 2 or more",
                stacklevel=2,
            )

    def _check_prompts(self) -> None:
        """A first message that leaves no room for a reply would fail in every rollout."""
        room = self.policy.window - 1
        for item in islice(items_of(self.task, "train"), 32):
            tokens = len(self.policy.renderer.prompt(first_prompt(self.scaffold, self.run, item)))
            if tokens > room:
                raise ConfigError(
                    f"item {item.id} does not fit the policy: its prompt has {tokens} tokens and the window {room + 1}; "
                    "use a scaffold that shows less of the context, or a policy with a larger window"
                )

    # --- parts ---------------------------------------------------------------------------------------------------

    def _demonstrations(self) -> Iterator[Trajectory]:
        spec = self.run.sft
        assert spec is not None
        if spec.demos:
            make = of_name(spec.demos, DEMOS, "demos")
            task = task_of(spec.task.name, **spec.task.options) if spec.task is not None else self.task
            found = make(task, spec.num, self.run.seed, self.scaffold, **spec.options)
            yield from map(trajectory_of, found)
        if spec.trajectories:
            yield from read(Path(spec.trajectories))

    def _policy(self, demonstrations: Sequence[Trajectory]) -> Policy:
        import torch
        from transformers import AutoConfig

        from ramify.policy.load import from_config, load, load_tokenizer
        from ramify.policy.tokenizer import train_tokenizer

        spec = self.run.policy
        device = None if spec.device == "auto" else spec.device
        if spec.path:
            return load(spec.path, None if spec.dtype == "auto" else getattr(torch, spec.dtype), device)
        if spec.tokenizer:
            tokenizer = load_tokenizer(Path(spec.tokenizer))
        elif demonstrations:
            tokenizer = train_tokenizer(_texts(demonstrations), spec.vocab_size)
        else:
            raise ConfigError("policy: a model made from nothing needs a tokenizer, or demonstrations to train one on")
        config = AutoConfig.for_model(
            **{
                "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id, **spec.shape,
            }
        )  # fmt: skip
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return from_config(config, tokenizer, self.run.seed, device=device)

    def _serving(self) -> Policy:
        """The policy that the engine holds: the trained one itself, or where that is kept in another precision or with
        adapters, a copy that each publication renews."""
        from ramify.train.lora import attach

        lora, policy = self.run.policy.lora, self.policy
        if not self._kind.is_here:
            return policy
        if lora is None and str(policy.dtype) == "torch.float32":
            return policy
        serving = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
        if lora is not None:
            num = attach(policy.model, lora.rank, lora.alpha, lora.targets, self.run.seed)
            self._say(f"adapters of rank {lora.rank}: {num:,} of {policy.num_parameters:,} parameters are trained")
        return serving

    def _rows(self, spec: SftSpec, demonstrations: Sequence[Trajectory]) -> list[Row]:
        tokeniser = Tokeniser(self.policy.renderer)
        groups = [Group(each.task, [tokeniser.tokenised(each)]) for each in demonstrations]
        stamping = spec.algorithm.stamp(groups, self.task.weights)
        if stamping.silence:
            raise ConfigError(f"sft has nothing to learn from: {stamping.silence}")
        rows = sequences(stamping.rollouts)
        fitting = [row for row in rows if len(row) <= self.policy.window]
        if len(fitting) < len(rows):
            longest = max(map(len, rows))
            self._say(
                f"{len(rows) - len(fitting)} of {len(rows)} sequences to be imitated are left out: the longest has {longest} "
                f"tokens, the policy's window {self.policy.window}"
            )
        return fitting

    def _client(self) -> LocalClient:
        from ramify.inference.local.client import LocalClient

        spec = self.run.policy
        return LocalClient(self.serving, name=f"local:{self.run.name}", slots=spec.slots, cache_bytes=spec.cache_bytes)

    def _trained(self, out: Path) -> Trained:
        """What is trained: the policy of this process, or a copy of it over ranks."""
        run = self.run
        if self._kind.is_here:
            here: Trained = self._kind(self.policy, run.compute, out)
            return here
        from ramify.train.backends.adapters import Lora

        spec, lora = run.policy, run.policy.lora
        adapters = None if lora is None else Lora(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=run.seed)
        is_folder = bool(spec.path) and type(self.policy.model).__name__ == "Dense" and Path(spec.path).is_dir()
        source = Path(spec.path) if is_folder else self.policy.model.state_dict()
        spread: Trained = self._kind(self.policy, run.compute, out, lora=adapters, source=source)
        return spread

    def _stages(self) -> list[Stage]:
        run = self.run
        stages: list[Stage] = []
        if run.warmup is not None:
            special = set(self.policy.tokenizer.all_special_ids)
            ids = [index for index in range(len(self.policy.tokenizer)) if index not in special]
            stages.append(WarmUp(run.warmup.steps, run.warmup.optim, ids, run.warmup.batch_tokens, run.seed))
        if run.sft is not None:
            stages.append(Imitate(self.rows, run.sft.optim, run.sft.batch_tokens, run.sft.epochs, run.seed))
        if run.rl is not None:
            rl = run.rl
            stages.append(
                Reinforce(
                    rl.steps, rl.optim, rl.loss, task=self.task, items=items_of(self.task, "train"),
                    rollouts=Rollouts(self.rlm, self.task, rl.rollout, seed=run.seed, on_stall=self._say),
                    algorithm=rl.algorithm, sample=rl.sample, temperature=rl.rollout.temperature,
                )
            )  # fmt: skip
        return stages

    def loop(self, out: Path, listener: Callable[[Measured], None] | None) -> Loop:
        from ramify.policy.fingerprint import fingerprint_of

        run = self.run
        prompt = first_prompt(self.scaffold, run, items_of(self.task, "validation")[0])
        trained = self.trained = self._trained(out)
        weights = None if trained.is_here else trained.weights
        published = Published(self.policy, self.serving, self.client, weights)
        starts_at_base = run.warmup is None and run.sft is None
        check = SelfCheck(
            self.seen, lambda: fingerprint_of(published.weights()), prompt,
            _TOLERANCE.get(str(self.serving.dtype), _COARSE),
        )  # fmt: skip
        loop = Loop(
            out, self._stages(), trained.backend, published, self.evaluate,
            first=run.evaluate.first, final=run.evaluate.final, cadence=run.cadence, config=plain(run), check=check,
            reference_of=lambda folder: trained.reference(folder, starts_at_base), listener=listener, say=self._say,
        )  # fmt: skip
        first = run.rl.sample.first_item if run.rl is not None else 0
        loop.state.next_item = max(first, run.sft.num if run.sft is not None and run.sft.demos else 0)
        return loop

    async def evaluate(self, split: str) -> dict[str, float]:
        """The mean reward on the first items of ``split``, of all and by kind."""
        spec = self.run.evaluate
        options = msgspec.structs.replace(
            self.run.rl.rollout if self.run.rl is not None else RolloutOptions(),
            group=spec.attempts, temperature=spec.temperature,
        )  # fmt: skip
        rollouts = Rollouts(self.rlm, self.task, options, seed=self.run.seed, on_stall=self._say)
        found = items_of(self.task, split)
        num = spec.num if split != "validation" or spec.validation is None else spec.validation
        items = [found[index] for index in range(min(num, len(found)))]
        return report(split, items, await rollouts.groups(items, -1), self.task.weights)


class Published:
    """The policy as the loop sees it: to be given to the engine, saved, and gone back to."""

    def __init__(
        self, trained: Policy, serving: Policy, client: LocalClient,
        weights: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
    ) -> None:  # fmt: skip
        """``weights``: of what is trained, where that is not ``trained`` itself."""
        self._trained, self._serving, self._client, self._elsewhere = trained, serving, client, weights
        self._is_loaded = False
        """Whether the engine was set to a saved policy, which the trained one no longer is."""

    @property
    def _shares(self) -> bool:
        return self._is_loaded or (self._elsewhere is None and self._trained is self._serving)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights as the engine should have them."""
        from ramify.train.lora import merged

        dtype = self._serving.dtype
        if self._is_loaded:
            return ((name, weight.detach()) for name, weight in self._serving.model.named_parameters())
        found = merged(self._trained.model) if self._elsewhere is None else self._elsewhere()
        return ((name, weight.to(dtype)) for name, weight in found)

    async def publish(self) -> None:
        self._trained.version += 1
        given = self._serving.model if self._shares else await asyncio.to_thread(lambda: dict(self.weights()))
        await self._client.update(given, self._trained.version)

    def save(self, folder: Path) -> None:
        """What the engine answers with, in its precision; the trainer's is in the checkpoint."""
        from ramify.policy.load import save
        from ramify.policy.weights import load_weights

        if not self._shares:
            load_weights(self._serving.model, dict(self.weights()))
        save(self._serving, folder)

    def load(self, folder: Path) -> None:
        from ramify.policy.load import load_into

        load_into(self._serving, folder)
        self._is_loaded = True


def _device_of(run: Run) -> str:
    import torch

    kind = run.policy.device.partition(":")[0]
    return kind if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def first_prompt(scaffold: Scaffold, run: Run, item: Item) -> list[Message]:
    """What a root is told first."""
    description = "" if scaffold.first else observe.describe(item.context)
    system = scaffold.system_prompt(depth=0, children=run.limits.max_depth > 0, tools="", limits="")
    first = Message("user", scaffold.first_message(item.question, item.context, description))
    return [Message("system", system), first] if system else [first]


def report(
    split: str, items: Sequence[Item], groups: Sequence[Group], weights: Mapping[str, float]
) -> dict[str, float]:
    """Mean reward of all rollouts and of those by kind of item; a failed one counts 0."""
    worth = [
        (item.kind, total(trajectory.rewards, weights))
        for item, group in zip(items, groups, strict=True)
        for trajectory in group.trajectories
    ]
    found = {f"{split}/reward": fmean(value for _, value in worth)}
    for kind in sorted({kind for kind, _ in worth if kind}):
        found[f"{split}/{kind}"] = fmean(value for each, value in worth if each == kind)
    failed = sum(not trajectory.rewards for group in groups for trajectory in group.trajectories)
    return {**found, f"{split}/failed": float(failed)}


def _texts(demonstrations: Sequence[Trajectory]) -> Iterator[str]:
    for trajectory in demonstrations[:NUM_TOKENIZER_TEXTS]:
        for call in trajectory.calls:
            yield from (message.content for message in trajectory.conversation(call))
