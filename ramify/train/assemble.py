"""The parts of one run, built and checked in the order that finds mistakes before anything is
spent."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.actors.launcher import Launcher, LocalLauncher
from ramify.engine.rlm import RLM
from ramify.engine.scaffold import scaffold_of
from ramify.errors import ConfigError
from ramify.store.call_cache import CallCache
from ramify.store.store import Store
from ramify.tasks.base import Task, items_of, task_of
from ramify.train.advantages.base import needs_of
from ramify.train.audited_client import AuditedClient
from ramify.train.backends.base import BACKENDS, ROUNDING, decided
from ramify.train.config import Run, plain
from ramify.train.cpu_seconds import CpuMeter
from ramify.train.demonstrations import demonstrations_of, rows_of
from ramify.train.evaluation_metrics import report
from ramify.train.metrics import StepMetrics
from ramify.train.model import policy_of, serving_of
from ramify.train.placement.rollout_worker import RolloutWorkerSpec
from ramify.train.placement.rollout_workers import RolloutWorkers
from ramify.train.placement.services import RunServices
from ramify.train.preflight import (
    check_device,
    check_inference,
    check_prompts,
    check_schedules,
    check_signals,
    check_task,
    first_prompt,
)
from ramify.train.publisher import PolicyPublisher
from ramify.train.resource_counts import attached, check_reach, settled, sleeping
from ramify.train.rollouts.rollouter import Rollouter, RolloutOptions
from ramify.train.selfcheck import CanaryLimits, SelfCheck
from ramify.train.signals.compose import Hybrid
from ramify.train.signals.scorer import RunTeachers
from ramify.train.signals.signal_reader import RunSignals
from ramify.train.signals.teacher import needed
from ramify.train.stages import RlStage, SftStage, TrainingStage, WarmUpStage, scheduled, streams_of
from ramify.train.training_loop import TrainingLoop
from ramify.train.watchdog import RunWatchdog

if TYPE_CHECKING:
    from ramify.inference.http.http_engines import HttpEngines
    from ramify.inference.local.local_client import LocalClient
    from ramify.train.backends.base import Backend, TrainedModel

_TOLERANCE = 1e-4
"""Largest difference of two log-probabilities if engine and trainer compute in fp32."""
_FOREIGN_TOLERANCE = 1e-3
"""The same if the kernels of another engine computed them."""
_COARSE = 0.3
"""The same if either computes in half precision; more on paths of unlikely tokens
(``ROUNDING``)."""


class RunParts:
    """The parts of one run, checked and ready to start."""

    def __init__(self, run: Run) -> None:
        import torch

        if run.threads is not None:
            torch.set_num_threads(run.threads)
        run, self._placement_slots = settled(run)
        self.run = run
        self.hosts: Launcher | None = None
        """Starts processes on other machines; open after ``start``."""
        self.services: RunServices | None = None
        """Servers that the run uses in addition to engines."""
        self.rollout_workers: RolloutWorkers | None = None
        """Processes that run rollouts, if that is not this process."""
        check_device(run)
        self._kind: Any = BACKENDS.of(run.compute.backend)
        placed_options = {"elsewhere": True} if self._is_placed and not self._kind.is_here else {}
        self._kind.check(run.compute, _device_of(run), **placed_options)
        self.trained: TrainedModel | None = None
        self.teachers: RunTeachers | None = None
        self.task: Task = task_of(run.task.name, **run.task.options)
        self.scaffold = scaffold_of(run.scaffold)
        check_task(run, self.task)
        check_inference(run)
        check_signals(run)
        check_schedules(run)
        self._engines = sleeping(run, _device_of(run))
        demonstrations = list(demonstrations_of(run, self.task, self.scaffold))
        self.policy = policy_of(run, demonstrations)
        dtype, device = self.policy.dtype, self.policy.device.type
        self.compute = decided(run.compute, dtype, device)
        self.serving = serving_of(run, self.policy, self._kind.is_here)
        check_prompts(run, self.task, self.scaffold, self.policy)
        weights = self.task.weights
        self.rows = (
            rows_of(run.sft, demonstrations, self.policy, self.scaffold, weights)
            if run.sft is not None
            else []
        )
        self._fixed = self._fixed_stages()
        self.client = self._client()
        self.audited = AuditedClient(
            self.client, run.rl.sample.max_token_staleness if run.rl is not None else 0
        )
        self.rlm = RLM(self.audited, limits=run.limits, scaffold=self.scaffold, sandbox=run.sandbox)

    # --- parts

    def _client(self) -> LocalClient | HttpEngines:
        if self._engines is not None:
            from ramify.inference.http.http_engines import HttpEngines

            if not self._engines.urls:  # started engines only answer requests with this key
                os.environ.setdefault(self._engines.key_variable, secrets.token_urlsafe(24))
            name = f"{self._engines.engine}:{self.run.name}"
            return HttpEngines(self.serving, self._engines, name=name)
        from ramify.inference.local.local_client import LocalClient

        spec = self.run.policy
        return LocalClient(
            self.serving,
            name=f"local:{self.run.name}",
            slots=spec.slots,
            cache_bytes=spec.cache_bytes,
        )

    def _trained(self, out: Path) -> TrainedModel:
        """The model to train: the policy of this process, or a copy of it sharded over ranks."""
        run = self.run
        if self._kind.is_here:
            local: TrainedModel = self._kind(self.policy, self.compute, out)
            return local
        from ramify.train.backends.adapters import AdapterSpec

        spec, lora = run.policy, run.policy.lora
        adapters = (
            None
            if lora is None
            else AdapterSpec(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=run.seed)
        )
        is_folder = (
            bool(spec.path)
            and type(self.policy.model).__name__ == "DenseModel"
            and Path(spec.path).is_dir()
        )
        source = Path(spec.path) if is_folder else self.policy.model.state_dict()
        critic = (
            run.rl is not None
            and needs_of(run.rl.algorithm).values
            and run.rl.critic.model == "shared"
        )
        hosts = {} if self.hosts is None else {"hosts": self.hosts}
        sharded: TrainedModel = self._kind(
            self.policy, self.compute, out, lora=adapters, source=source, critic=critic, **hosts
        )
        return sharded

    def check_fits(self, checkpoint: Path) -> None:
        """Raise ConfigError with the first tensor in which a checkpoint's policy differs from this
        one."""
        from ramify.models.weights import check_weights, read_weights

        folder = checkpoint / "policy"
        check_weights(self.serving.model, read_weights(folder), str(folder))

    async def start(self, out: Path) -> None:
        """Acquire the placement slots, and start the engines that are not in this process."""
        from ramify.inference.local.local_client import LocalClient
        from ramify.models.load import save_policy

        self.hosts = self._placed()
        if self.run.placement is not None and self.run.placement.services:
            placement = self.run.placement
            self.services = RunServices(
                self.hosts or LocalLauncher(),
                placement.services,
                out,
                restarts=placement.restarts,
            )
            await self.services.start()
        if not isinstance(self.client, LocalClient):
            await self.client.start(
                out / "inference", lambda folder: save_policy(self.serving, folder), self.hosts
            )
            await self._start_workers(out)

    async def _start_workers(self, out: Path) -> None:
        """Start the rollout workers, if the placement has any."""
        from ramify.inference.local.local_client import LocalClient
        from ramify.models.load import save_policy

        num, run = (
            sum(
                member.role == "rollouts"
                for placement_slot in self._placement_slots
                for member in placement_slot.members
            ),
            self.run,
        )
        if not num or run.rl is None:
            return
        assert run.inference is not None
        assert not isinstance(self.client, LocalClient)
        client = self.client
        checkpoint = out / "inference" / "checkpoint"
        if run.inference.urls:
            save_policy(self.serving, checkpoint)
        spec = self._worker_spec(checkpoint, client.answering)
        self.rollout_workers = RolloutWorkers(
            self.hosts or LocalLauncher(),
            num,
            spec,
            out,
            client,
            seen=self.audited.note,
            restarts=run.placement.restarts if run.placement is not None else 0,
        )
        await self.rollout_workers.start()

    def _worker_spec(self, checkpoint: Path, urls: tuple[str, ...]) -> RolloutWorkerSpec:
        """The part of the run's configuration that rollout workers need."""
        run = self.run
        assert run.inference is not None
        assert run.rl is not None
        return RolloutWorkerSpec(
            name=self.client.name,
            task=run.task.name,
            options=run.task.options,
            scaffold=run.scaffold,
            limits=run.limits,
            sandbox=run.sandbox,
            inference=attached(run.inference, urls),
            checkpoint=str(checkpoint.resolve()),
            dtype=str(self.serving.dtype).removeprefix("torch."),
            grace_s=run.rl.rollout.grace_s,
            direct=run.rl.rollout.direct,
            variables=tuple(each.variable for each in run.placement.services.values())
            if run.placement
            else (),
        )

    @property
    def _is_placed(self) -> bool:
        return self.run.placement is not None and self.run.placement.kind == "ray"

    def _placed(self) -> Launcher | None:
        """The launcher of processes on other machines; None if there are none. Raises ConfigError
        if the placement slots are not available."""
        import torch

        from ramify.actors.ray_launcher import RayLauncher

        if not self._is_placed:
            return None
        spec = self.run.placement
        assert spec is not None
        hosts = RayLauncher(
            self._placement_slots,
            gpus={name: spec.role(name).gpus for name in spec.roles},
            spread=[name for name, pool in spec.pools.items() if pool.order == "spread"],
            address=spec.address,
            start_s=spec.start_s,
            num_gpus=torch.cuda.device_count(),
        )
        try:
            num = sum(
                member.role == "inference"
                for placement_slot in self._placement_slots
                for member in placement_slot.members
            )
            check_reach(self.run, hosts, num)
        except BaseException:
            hosts.close()
            raise
        return hosts

    def _canary_limits(self) -> CanaryLimits:
        """How much log-probabilities of engine and trainer may differ, according to the coarser
        precision."""
        spec, dtype = self.run.inference, str(self.serving.dtype).removeprefix("torch.")
        is_exact = dtype == "float32" and self.compute.precision == "fp32"
        hint = f"the engine computes in {dtype} and the trainer in {self.compute.precision}"
        if not is_exact:
            hint += "; set policy.dtype=float32 and compute.precision=fp32 to rule out rounding"
        if spec is not None and spec.tolerance is not None:
            return CanaryLimits(spec.tolerance, 0.0, hint)
        if not is_exact:
            return CanaryLimits(_COARSE, ROUNDING, hint)
        is_ours = spec is None or spec.engine == "ramify"
        return CanaryLimits(_TOLERANCE if is_ours else _FOREIGN_TOLERANCE, 0.0, hint)

    def _backend_of(self, trained: TrainedModel) -> Callable[[TrainingStage], Backend]:
        def backend(stage: TrainingStage) -> Backend:
            if not stage.critic:
                return trained.backend(stage.optim)
            assert self.run.rl is not None
            spec = self.run.rl.critic
            if spec.model == "shared":
                return trained.with_critic(stage.optim, None)
            critic_optim = (
                stage.optim
                if spec.optim is None or stage.optim.num_steps is None
                else scheduled("rl.critic", spec.optim, stage.optim.num_steps)
            )
            return trained.with_critic(stage.optim, critic_optim)

        return backend

    def _signals(
        self, out: Path, trained: TrainedModel, publisher: PolicyPublisher
    ) -> RunSignals | None:
        """The signals that are read from rollouts in addition to their reward; None if there are
        none."""
        from ramify.inference.local.local_client import LocalClient
        from ramify.train.backends.single import SingleBackend

        rl = self.run.rl
        if rl is None or not isinstance(rl.algorithm, Hybrid):
            return None
        sources = needed(rl.signals)
        if "live" in sources and rl.sample.max_staleness:
            raise ConfigError(
                "a signal scores with the current policy (teacher source=live, "
                "student=recomputed, choose=overlap or support=student), which is trained at the "
                "same time if rl.sample.max_staleness is above 0: set it to 0"
            )
        in_engine = None
        if isinstance(self.client, LocalClient) and self.serving is self.policy and trained.is_here:
            in_engine = self.client.run
        teachers = self.teachers = (
            RunTeachers(
                sources,
                self.policy,
                lambda policy: SingleBackend(policy, None, self.compute, dumps=out),
                out,
                publisher.save,
                trained.weights,
                self._engine_of,
                self.run.seed,
                in_engine,
                is_copy=not trained.is_here,
            )
            if sources
            else None
        )
        return RunSignals(
            rl.signals,
            rl.algorithm,
            pool=self.rlm.pool,
            budget=rl.judges,
            policy=self.audited,
            teachers=teachers,
            cache=CallCache(Store(rl.judge_cache)) if rl.judge_cache else None,
            writing=self.policy.renderer,
            weights=self.task.weights,
            temperature=rl.rollout.temperature,
            wants_reference="ref_logprobs" in streams_of(rl.loss) | needs_of(rl.algorithm).streams,
        )

    def _engine_of(self, name: str) -> object:
        """An engine that scores, by its name."""
        from ramify.inference.connect_local import connect

        return connect(name)

    def _fixed_stages(self) -> list[TrainingStage]:
        """The stages that sample nothing. They are built early, since only they know the number of
        steps for their schedules."""
        run = self.run
        stages: list[TrainingStage] = []
        if run.warmup is not None:
            special = set(self.policy.tokenizer.all_special_ids)
            ids = [index for index in range(len(self.policy.tokenizer)) if index not in special]
            stages.append(
                WarmUpStage(
                    run.warmup.steps, run.warmup.optim, ids, run.warmup.batch_tokens, run.seed
                )
            )
        if run.sft is not None:
            stages.append(
                SftStage(self.rows, run.sft.optim, run.sft.batch_tokens, run.sft.epochs, run.seed)
            )
        return stages

    def _stages(
        self, out: Path, trained: TrainedModel, publisher: PolicyPublisher
    ) -> list[TrainingStage]:
        run = self.run
        stages = list(self._fixed)
        if run.rl is not None:
            rl = run.rl
            stages.append(
                RlStage(
                    rl.steps,
                    rl.optim,
                    rl.loss,
                    task=self.task,
                    items=items_of(self.task, "train"),
                    rollouts=Rollouter(
                        self.rlm,
                        self.task,
                        rl.rollout,
                        seed=run.seed,
                        greedy=needs_of(rl.algorithm).greedy,
                        gauge=getattr(self.client, "pressure", None),
                        rollout_worker=self.rollout_workers,
                    ),
                    algorithm=rl.algorithm,
                    sample=rl.sample,
                    temperature=rl.rollout.temperature,
                    signals=self._signals(out, trained, publisher),
                )
            )
        return stages

    def loop(
        self,
        out: Path,
        listener: Callable[[StepMetrics], None] | None,
        on_stall: Callable[[str], None] | None = None,
    ) -> TrainingLoop:
        """The training loop, with everything that it uses."""
        from ramify.inference.local.local_client import LocalClient

        run = self.run
        prompt = first_prompt(self.scaffold, run, items_of(self.task, "validation")[0])
        trained = self.trained = self._trained(out)
        publisher = PolicyPublisher(self.policy, self.serving, self.client, trained)
        starts_at_base = run.warmup is None and run.sft is None
        check = SelfCheck(self.audited, publisher.weights, prompt, *self._canary_limits())
        loop = TrainingLoop(
            out,
            self._stages(out, trained, publisher),
            self._backend_of(trained),
            publisher,
            self.evaluate,
            first=run.evaluate.first,
            final=run.evaluate.final,
            schedule=run.schedule,
            guard=run.guard,
            config=plain(run),
            check=check,
            reference_of=lambda folder: trained.reference(folder, starts_at_base),
            listener=listener,
            watch=RunWatchdog(
                out, run.stall_s, others=getattr(trained, "stacks", None), on_stall=on_stall
            ),
        )
        self.audited.on_reply = loop.watch.moved
        if not isinstance(self.client, LocalClient):
            self.client.membership.on_return = lambda: loop.rejoin(publisher.rejoin)
            loop.measures = self.client.metrics
        # With other backends, child processes of this one do more than run sessions.
        elif self._kind.is_here and self.rollout_workers is None:
            loop.meter = CpuMeter(self.client.engine.paces.taken)
        first = run.rl.sample.first_item if run.rl is not None else 0
        loop.state.next_item = max(
            first, run.sft.num if run.sft is not None and run.sft.demos else 0
        )
        return loop

    async def evaluate(self, split: str) -> dict[str, float]:
        """Mean reward on the first items of ``split``, overall and by kind, if enough attempts
        could be judged."""
        spec = self.run.evaluate
        options = msgspec.structs.replace(
            self.run.rl.rollout if self.run.rl is not None else RolloutOptions(),
            group=spec.attempts,
            temperature=spec.temperature,
        )
        rollouts = Rollouter(
            self.rlm,
            self.task,
            options,
            seed=self.run.seed,
            rollout_worker=self.rollout_workers,
        )
        split_items = items_of(self.task, split)
        num = spec.num if split != "validation" or spec.validation is None else spec.validation
        items = [split_items[index] for index in range(min(num, len(split_items)))]
        groups = await rollouts.groups(items, -1, f"evaluating {split}")
        return report(split, items, groups, self.task.weights, max_failed=spec.max_failed)


def _device_of(run: Run) -> str:
    import torch

    kind = run.policy.device.partition(":")[0]
    return kind if kind != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
