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
from ramify.engine.run import NATIVE_TOOLS
from ramify.engine.scaffold import Scaffold, scaffold_of
from ramify.errors import ConfigError
from ramify.evaluate.report import RIGHT
from ramify.progress import doing
from ramify.store.cache import CallCache
from ramify.store.store import Store
from ramify.tasks.base import Item, Task, items_of, task_of, total
from ramify.tasks.validate import validate
from ramify.train.algorithms import ALGORITHMS
from ramify.train.algorithms.base import needs_of
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
from ramify.train.signals.compose import Hybrid
from ramify.train.signals.reading import Signals
from ramify.train.signals.scorer import Teachers
from ramify.train.signals.teacher import needed
from ramify.train.stages import Imitate, Reinforce, Stage, WarmUp, scheduled
from ramify.train.trackers.base import Trackers
from ramify.types.message import Message
from ramify.types.sequence import Sequence as Row
from ramify.types.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.http.client import HttpEngines
    from ramify.inference.local.client import LocalClient
    from ramify.policy.load import Policy
    from ramify.train.backends.base import Backend, Trained

NUM_TOKENIZER_TEXTS = 3000
"""Demonstrations that a tokenizer is trained on; more change little."""
FREE = ("cadence.", "compute.shard.", "evaluate.", "guard.", "inference", "name", "tracker")
"""Fields of a run that a resumed one may have otherwise: they change no weight, but for how long it is trained."""
_SWITCH_S = 5e-4
"""How long one thread may keep the interpreter from another: the loop's, which speaks to sessions, waits for the engine's
after each system call. At Python's 5 ms a step of rollouts takes a fifth longer."""
_TOLERANCE = {"torch.float32": 1e-5}
_FOREIGN_TOLERANCE = {"torch.float32": 1e-3}
"""Where another engine's kernels computed them."""
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

    trackers = Trackers(run.trackers, run.tracker_options, say)
    resumed_at = read_state(checkpoint).step if checkpoint is not None else None

    def measured(each: Measured) -> None:
        trackers(each)
        if listener is not None:
            listener(each)

    async def carry_out() -> State:
        async with building(run, out, listener=measured, say=say) as loop:
            with trackers.opened(run.name, out, plain(run), resumed_at):
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
        await made.start(out)
        async with made.rlm:
            yield made.loop(out, listener)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
        if made.teachers is not None:
            made.teachers.close()
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
        if run.rl is not None and needs_of(run.rl.algorithm).values and not self._kind.is_here:
            raise ConfigError(
                f"an algorithm with a critic needs compute.backend=single, and not {run.compute.backend}: leave the critic "
                "out (grpo, rloo, …), or train in one process"
            )
        self._kind.check(run.compute, _device_of(run))
        self.trained: Trained | None = None
        self.teachers: Teachers | None = None
        self.task: Task = task_of(run.task.name, **run.task.options)
        self.scaffold = scaffold_of(run.scaffold)
        self._check_task()
        self._check_inference()
        demonstrations = list(self._demonstrations()) if run.sft is not None else []
        self.policy = self._policy(demonstrations)
        self.serving = self._serving()
        self._check_prompts()
        self.rows = self._rows(run.sft, demonstrations) if run.sft is not None else []
        self.client = self._client()
        self.seen = Seen(self.client, run.rl.sample.max_staleness if run.rl is not None else 0)
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
        if run.rl is not None and run.rl.loss.kl_beta and run.rl.loss.kl == "k1":
            warnings.warn(
                "rl.loss.kl=k1: the gradient of k1 does not know the reference, so that it holds the policy nowhere; use k2 or "
                "k3+, or rl.algorithm.kl_reward, which is by k1",
                stacklevel=2,
            )

    def _check_inference(self) -> None:
        """Another engine does not say what top-p and top-k left, so nobody could compute the same probabilities."""
        spec, rl = self.run.inference, self.run.rl
        if spec is None or spec.engine == "ramify" or rl is None:
            return
        if (rl.rollout.top_p or 1) < 1 or rl.rollout.top_k:
            raise ConfigError(
                f"rl.rollout.top_p={rl.rollout.top_p} and top_k={rl.rollout.top_k} cannot be trained on with "
                f"inference.engine={spec.engine}, which does not say what they left to draw from: leave them out"
            )

    def _check_prompts(self) -> None:
        """A first message that leaves no room for a reply would fail in every rollout."""
        room, tools = self.policy.window - 1, self.scaffold.tools(NATIVE_TOOLS)
        for item in islice(items_of(self.task, "train"), 32):
            tokens = len(self.policy.renderer.prompt(first_prompt(self.scaffold, self.run, item), tools))
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
            with doing("demonstrations", spec.num, "items") as work:
                for conversations in found:
                    yield trajectory_of(conversations)
                    work.more()
        if spec.trajectories:
            yield from read(Path(spec.trajectories))

    def _policy(self, demonstrations: Sequence[Trajectory]) -> Policy:
        import torch
        from transformers import AutoConfig

        from ramify.policy.load import from_config, load, load_tokenizer
        from ramify.policy.tokenizer import train_tokenizer, word_tokenizer

        spec = self.run.policy
        device = None if spec.device == "auto" else spec.device
        if spec.path:
            return load(spec.path, None if spec.dtype == "auto" else getattr(torch, spec.dtype), device)
        if spec.tokenizer:
            tokenizer = load_tokenizer(Path(spec.tokenizer))
        elif spec.words:
            tokenizer = word_tokenizer(spec.words)
        elif demonstrations:
            with doing("tokenizer", note="trained on the demonstrations"):
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
        """The policy that the engine holds: the trained one itself, or where that is kept in another precision, with
        adapters, or is trained while rollouts go on, a copy that each publication renews."""
        from ramify.train.lora import attach

        lora, policy = self.run.policy.lora, self.policy
        if not self._kind.is_here:
            return policy
        waits = self.run.rl is None or not self.run.rl.sample.max_staleness
        if lora is None and str(policy.dtype) == "torch.float32" and waits:
            return policy
        serving = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
        if lora is not None:
            num = attach(policy.model, lora.rank, lora.alpha, lora.targets, self.run.seed)
            self._say(f"adapters of rank {lora.rank}: {num:,} of {policy.num_parameters:,} parameters are trained")
        return serving

    def _rows(self, spec: SftSpec, demonstrations: Sequence[Trajectory]) -> list[Row]:
        tokeniser = Tokeniser(self.policy.renderer, self.scaffold.tools(NATIVE_TOOLS))
        groups = []
        with doing("tokenising", len(demonstrations), "trajectories") as work:
            for each in demonstrations:
                groups.append(Group(each.task, [tokeniser.tokenised(each)]))
                work.more()
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

    def _client(self) -> LocalClient | HttpEngines:
        if self.run.inference is not None:
            from ramify.inference.http.client import HttpEngines

            engine = self.run.inference.engine
            return HttpEngines(self.serving, self.run.inference, name=f"{engine}:{self.run.name}", say=self._say)
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

    async def start(self, out: Path) -> None:
        """Bring up the engines that are not in this process."""
        from ramify.inference.local.client import LocalClient
        from ramify.policy.load import save

        if not isinstance(self.client, LocalClient):
            await self.client.start(out / "inference", lambda folder: save(self.serving, folder))

    def _tolerance(self) -> float:
        """Most that log-probabilities of engine and trainer may differ by."""
        spec, dtype = self.run.inference, str(self.serving.dtype)
        if spec is not None and spec.tolerance:
            return spec.tolerance
        same = spec is None or spec.engine == "ramify"
        return (_TOLERANCE if same else _FOREIGN_TOLERANCE).get(dtype, _COARSE)

    def _backend_of(self, trained: Trained, out: Path) -> Callable[[Stage], Backend]:
        from ramify.train.backends.own_critic import OwnCritic
        from ramify.train.backends.single import Single

        compute = self.run.compute

        def backend(stage: Stage) -> Backend:
            if not stage.critic:
                return trained.backend(stage.optim)
            assert self.run.rl is not None
            spec = self.run.rl.critic
            if spec.model == "shared":
                return Single(self.policy, stage.optim, compute, dumps=out, critic=True)
            own = dataclasses.replace(self.policy, model=copy.deepcopy(self.policy.model))
            optim = scheduled(spec.optim, stage.optim.num_steps) if spec.optim is not None else stage.optim
            critic = Single(own, optim, compute, dumps=out, critic=True)
            return OwnCritic(trained.backend(stage.optim), critic)

        return backend

    def _signals(self, out: Path) -> Signals | None:
        """What is read off rollouts besides their reward; None for nothing."""
        from ramify.inference.local.client import LocalClient
        from ramify.train.backends.single import Single

        rl = self.run.rl
        if rl is None or not isinstance(rl.algorithm, Hybrid):
            return None
        published = Published(self.policy, self.serving, self.client)
        sources = needed(rl.signals)
        if "live" in sources and rl.sample.max_staleness:
            raise ConfigError(
                "a signal scores with the policy as it is (teacher source=live, student=recomputed, choose=overlap or "
                "support=student), which is being trained meanwhile where rl.sample.max_staleness is above 0: set it to 0"
            )
        in_engine = self.client.run if isinstance(self.client, LocalClient) and self.serving is self.policy else None
        teachers = self.teachers = Teachers(
            sources, self.policy, lambda policy: Single(policy, None, self.run.compute, dumps=out), out, published.save,
            self._engine_of, self.run.seed, in_engine,
        ) if sources else None  # fmt: skip
        return Signals(
            rl.signals, rl.algorithm, pool=self.rlm.pool, budget=rl.judges, policy=self.seen, teachers=teachers,
            cache=CallCache(Store(rl.judge_cache)) if rl.judge_cache else None, writing=self.policy.renderer,
            weights=self.task.weights, temperature=rl.rollout.temperature, say=self._say,
        )  # fmt: skip

    def _engine_of(self, name: str) -> object:
        """An engine that scores, by its name."""
        from ramify.inference.base import connect

        return connect(name)

    def _stages(self, out: Path) -> list[Stage]:
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
                    rollouts=Rollouts(
                        self.rlm, self.task, rl.rollout, seed=run.seed, on_stall=self._say,
                        greedy=needs_of(rl.algorithm).greedy,
                    ),
                    algorithm=rl.algorithm, sample=rl.sample, temperature=rl.rollout.temperature,
                    signals=self._signals(out),
                )
            )  # fmt: skip
        return stages

    def loop(self, out: Path, listener: Callable[[Measured], None] | None) -> Loop:
        from ramify.policy.fingerprint import fingerprint_of

        run = self.run
        prompt = first_prompt(self.scaffold, run, items_of(self.task, "validation")[0])
        trained = self.trained = self._trained(out)
        published = Published(self.policy, self.serving, self.client, trained)
        starts_at_base = run.warmup is None and run.sft is None
        check = SelfCheck(
            self.seen, lambda: fingerprint_of(published.weights()), prompt, self._tolerance()
        )  # fmt: skip
        loop = Loop(
            out, self._stages(out), self._backend_of(trained, out), published, self.evaluate,
            first=run.evaluate.first, final=run.evaluate.final, cadence=run.cadence, guard=run.guard,
            config=plain(run), check=check, reference_of=lambda folder: trained.reference(folder, starts_at_base),
            listener=listener, say=self._say,
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
        return report(split, items, await rollouts.groups(items, -1, f"evaluating {split}"), self.task.weights)


class Published:
    """The policy as the loop sees it: to be given to the engine, saved, and gone back to."""

    def __init__(
        self, trained: Policy, serving: Policy, client: LocalClient | HttpEngines, model: Trained | None = None
    ) -> None:
        """``model``: what is trained; None for ``trained`` itself."""
        self._trained, self._serving, self._client = trained, serving, client
        self._model = model if model is not None and not model.is_here else None
        self._is_loaded = False
        """Whether the engine was set to a saved policy, which the trained one no longer is."""

    @property
    def _shares(self) -> bool:
        return self._is_loaded or (self._model is None and self._trained is self._serving)

    @property
    def version(self) -> int:
        return self._trained.version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights as the engine should have them."""
        from ramify.train.lora import merged

        dtype = self._serving.dtype
        if self._is_loaded:
            return ((name, weight.detach()) for name, weight in self._serving.model.named_parameters())
        found = merged(self._trained.model) if self._model is None else self._model.weights()
        return ((name, weight.to(dtype)) for name, weight in found)

    async def publish(self) -> None:
        from ramify.inference.local.client import LocalClient
        from ramify.inference.weights.layout import source

        self._trained.version += 1
        if not isinstance(self._client, LocalClient):
            tensors = [source(n, t, self._serving.dtype, make) for n, t, make in self._unmerged()]
            return await self._client.update(tensors, self._trained.version)
        given = self._serving.model if self._shares else await asyncio.to_thread(lambda: dict(self.weights()))
        return await self._client.update(given, self._trained.version)

    def _unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """As ``lora.unmerged``, wherever the weights are."""
        from ramify.train.lora import unmerged

        if self._model is not None and not self._is_loaded:
            return self._model.unmerged()
        return unmerged(self._serving.model if self._is_loaded else self._trained.model)

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
    """Mean reward of all rollouts and of those by kind of item; a failed one counts 0. With n > 1 at each item also the
    share of items of which at least one is right (``pass@n``), and in any case the metrics of the task's score."""
    worth = [
        (item.kind, total(trajectory.rewards, weights))
        for item, group in zip(items, groups, strict=True)
        for trajectory in group.trajectories
    ]
    found = {f"{split}/reward": fmean(value for _, value in worth)}
    for kind in sorted({kind for kind, _ in worth if kind}):
        found[f"{split}/{kind}"] = fmean(value for each, value in worth if each == kind)
    most = max(len(group.trajectories) for group in groups)
    if most > 1:
        found[f"{split}/pass@{most}"] = fmean(
            any(total(each.rewards, weights) >= RIGHT for each in group.trajectories) for group in groups
        )
    found |= _metrics(split, [each for group in groups for each in group.trajectories])
    failed = sum(not trajectory.rewards for group in groups for trajectory in group.trajectories)
    return {**found, f"{split}/failed": float(failed)}


def _metrics(split: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each metric over the rollouts that have it."""
    names = dict.fromkeys(name for each in trajectories for name in each.metrics)
    values = {name: [each.metrics[name] for each in trajectories if name in each.metrics] for name in names}
    return {f"{split}/metric {name}": fmean(each) for name, each in values.items()}


def _texts(demonstrations: Sequence[Trajectory]) -> Iterator[str]:
    for trajectory in demonstrations[:NUM_TOKENIZER_TEXTS]:
        for call in trajectory.calls:
            yield from (message.content for message in trajectory.conversation(call))
