"""Registries that map names to plug-ins.

There is one registry for each kind of thing that users choose by name, such as tasks or sandboxes.

    rl.algorithm=grpo                     built in: ``ALGORITHMS`` maps the name to "module:class"
    task.name=oolong                      built in, but outside the core: listed in
                                          ``ramify.extras``
    rl.algorithm=median                   from an installed package, by its entry points (below)
    rl.algorithm=my_package.rl:Median     from a module that can be imported
    rl.algorithm=my_rl.py:Median          from a file
    @ALGORITHMS.register("median")        registered by a recipe

    [project.entry-points."ramify.algorithms"]      in the pyproject.toml of the package
    median = "my_package.rl:Median"

This module decides what a name stands for, and what an error says about an unknown name. Nothing is
imported before its name is used. Installed packages are searched only for names that are not built
in, so they cannot replace a built-in entry.

The names of each kind are listed in the modules that ``REGISTRIES`` names; what an entry must be
able to do is documented there, too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from ramify.errors import ConfigError, RamifyError, did_you_mean
from ramify.extras import ENTRY_POINTS
from ramify.nearest_name import nearest_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

REGISTRIES = (
    "ramify.clients.providers:CLIENTS",
    "ramify.sandbox.base:SANDBOXES",
    "ramify.store.store_opening:STORES",
    "ramify.engine.prompt_scaffold:SCAFFOLDS",
    "ramify.engine.answer_strategies:STRATEGIES",
    "ramify.tasks.base:TASKS",
    "ramify.tasks.scoring:SCORERS",
    "ramify.train.data.sft_data:DEMOS",
    "ramify.train.advantages:ALGORITHMS",
    "ramify.train.advantages.credit_assignment:CREDITS",
    "ramify.train.losses:POLICY_LOSSES",
    "ramify.train.losses.corrections:CORRECTIONS",
    "ramify.train.signals.signal_runner:SIGNALS",
    "ramify.train.signals.judge:JUDGES",
    "ramify.train.signals.hint_sources:HINTS",
    "ramify.train.other_trainer_presets:PRESETS",
    "ramify.train.backends.base:BACKENDS",
    "ramify.inference.http.inference_spec:ENGINES",
    "ramify.inference.weight_sync:WEIGHT_SYNCS",
    "ramify.train.trackers.base:TRACKERS",
    "ramify.testing.offline_model:OFFLINE_SUITES",
)
"""Location of each registry, in the order in which ``ramify plugins`` lists them."""
_GROUP_ESTIMATORS = (
    "dr_grpo",
    "grpo",
    "hierarchical",
    "maxrl",
    "opo",
    "pass_at_k",
    "reinforce_pp_baseline",
    "rloo",
)
MOVED_MODULES = {
    **{
        f"ramify.train.algorithms.{name}": "ramify.train.advantages.group_estimators"
        for name in _GROUP_ESTIMATORS
    },
    "ramify.train.algorithms.": "ramify.train.advantages.",
    "ramify.train.policy_losses.": "ramify.train.losses.",
    "ramify.train.corrections": "ramify.train.losses.corrections",
    "ramify.train.signals.credit": "ramify.train.advantages.credit_assignment",
    "ramify.train.signals.format": "ramify.train.signals.outcome",
    "ramify.train.signals.process_reward": "ramify.train.signals.judge",
    "ramify.train.signals.tool_use": "ramify.train.signals.outcome",
    "ramify.sandbox.cloud.": "ramify.extras.sandboxes.",
    "ramify.sandbox.docker": "ramify.sandbox.providers.docker",
    "ramify.sandbox.inprocess": "ramify.sandbox.providers.inprocess",
    "ramify.sandbox.ipython": "ramify.extras.sandboxes.ipython",
    "ramify.sandbox.jail.provider": "ramify.sandbox.providers.jail",
    "ramify.sandbox.monty": "ramify.extras.sandboxes.monty",
    "ramify.sandbox.process": "ramify.sandbox.providers.process",
    "ramify.tasks.scoring.interval": "ramify.tasks.scoring.answer_text",
    "ramify.tasks.scoring.numeric": "ramify.tasks.scoring.answer_text",
    "ramify.clients.script": "ramify.testing.reply_script",
    "ramify.clients.scripted": "ramify.testing.scripted_client",
    "ramify.clients.scripted_server": "ramify.testing.scripted_server",
    "ramify.sandbox.conformance": "ramify.testing.conformance",
    "ramify.cluster": "ramify.extras.cluster",
    "ramify.tasks.evidence": "ramify.extras.studies.paper_evidence_task",
    "ramify.tasks.needle": "ramify.extras.suites.niah",
    "ramify.tasks.oolong": "ramify.extras.suites.oolong",
    "ramify.extras.studies.oolong": "ramify.extras.suites.oolong",
    "ramify.tasks.programs": "ramify.extras.studies.programs",
    "ramify.tasks.toolmath": "ramify.extras.studies.toolmath",
    "ramify.train.data.sft_data:program_demos": (
        "ramify.extras.studies.programs.scripted_demonstrator:program_demos"
    ),
    "ramify.train.data.sft_data:retool_demos": (
        "ramify.extras.studies.toolmath.retool_sft_conversion:retool_demos"
    ),
    "ramify.train.signals.hindsight": "ramify.extras.studies.hindsight_hints",
    "ramify.train.signals.programs": "ramify.extras.studies.programs.judges",
    "ramify.actors.ray_nodes": "ramify.actors.wait_for_ray_nodes",
    "ramify.cli.init_command": "ramify.cli.init_task_command",
    "ramify.clients.pool": "ramify.clients.rate_limited_requests",
    "ramify.evaluate.model_endpoint": "ramify.evaluate.agent_model_server",
    "ramify.extras.cluster.plan_commands": "ramify.extras.cluster.plan_and_simulate_commands",
    "ramify.extras.studies.evidence": "ramify.extras.studies.paper_evidence_task",
    "ramify.extras.studies.programs.demos": "ramify.extras.studies.programs.scripted_demonstrator",
    "ramify.extras.studies.programs.evaluator": (
        "ramify.extras.studies.programs.program_interpreter"
    ),
    "ramify.extras.studies.programs.program_library": (
        "ramify.extras.studies.programs.toy_program_language"
    ),
    "ramify.extras.studies.toolmath.demos": "ramify.extras.studies.toolmath.retool_sft_conversion",
    "ramify.extras.studies.trainer_presets": "ramify.extras.studies.other_trainer_presets",
    "ramify.extras.suites.offline_code_qa": "ramify.extras.suites.code_qa_offline_model",
    "ramify.extras.suites.offline_mrcr": "ramify.extras.suites.mrcr_offline_model",
    "ramify.extras.suites.offline_multihop": "ramify.extras.suites.multihop_offline_model",
    "ramify.extras.suites.offline_niah": "ramify.extras.suites.niah_offline_model",
    "ramify.extras.suites.offline_oolong": "ramify.extras.suites.oolong_offline_model",
    "ramify.extras.suites.offline_oolong_pairs": "ramify.extras.suites.oolong_pairs_offline_model",
    "ramify.extras.suites.offline_planted": "ramify.extras.suites.planted_offline_model",
    "ramify.extras.suites.wording": "ramify.extras.suites.filler_text",
    "ramify.http_server.completions": "ramify.http_server.chat_completions_api",
    "ramify.http_server.model_routes": "ramify.http_server.model_api_routes",
    "ramify.http_server.shell": "ramify.http_server.base_server",
    "ramify.maps.ray_asker": "ramify.maps.ray_data_stage",
    "ramify.sources.library_values": "ramify.sources.convert_to_context",
    "ramify.tasks.ledger.demos": "ramify.tasks.ledger.scripted_demonstrator",
    "ramify.tasks.messages": "ramify.tasks.dataset_messages",
    "ramify.tasks.run_score": "ramify.tasks.score_with_timeout",
    "ramify.tasks.step_scoring": "ramify.tasks.batch_scoring",
    "ramify.train.advantages.group": "ramify.train.advantages.advantage_pipeline",
    "ramify.train.advantages.weight": "ramify.train.advantages.token_loss_weights",
    "ramify.train.assemble": "ramify.train.load_run_parts",
    "ramify.train.backends.shards": "ramify.train.backends.sharded_checkpoint",
    "ramify.train.losses.loss": "ramify.train.losses.total_loss",
    "ramify.train.placement.services": "ramify.train.placement.reward_services",
    "ramify.train.presets": "ramify.train.other_trainer_presets",
    "ramify.train.signals.signal_reader": "ramify.train.signals.signal_runner",
    "ramify.viewer.picture": "ramify.viewer.run_overview",
    "ramify.viewer.run_library": "ramify.viewer.run_catalog",
    "ramify.evaluate.verifiers_harness": "ramify.evaluate.verifiers_chat_harness",
    "ramify.tasks.reward_loop": "ramify.tasks.async_reward_loop",
    "ramify.extras.studies.hindsight": "ramify.extras.studies.hindsight_hints",
    "ramify.sandbox.providers.jail_fork": "ramify.sandbox.providers.jail_fork_connections",
    "ramify.train.losses.rollout_is": "ramify.train.losses.masked_importance_sampling",
    "ramify.train.signals.hints": "ramify.train.signals.hint_sources",
    "ramify.extras.cluster.shape": "ramify.extras.cluster.model_and_device_specs",
    "ramify.extras.sandboxes.file_relay": "ramify.extras.sandboxes.stream_over_files",
    "ramify.extras.sandboxes.file_relay_remote": "ramify.extras.sandboxes.stream_over_files_remote",
    "ramify.extras.cluster.rate": "ramify.extras.cluster.measured_engine_rate",
    "ramify.extras.cluster.steps": "ramify.extras.cluster.step_time_estimate",
    "ramify.extras.cluster.launch_command": "ramify.extras.cluster.launch_cli",
    "ramify.extras.cluster.plan:ClusterPlan": "ramify.extras.cluster.plan:ClusterResourcePlan",
    "ramify.extras.cluster.model_and_device_specs:DeviceSpec": (
        "ramify.extras.cluster.model_and_device_specs:DeviceHardwareSpec"
    ),
    "ramify.inference.http.sglang:SglangServer": "ramify.inference.http.sglang:SglangEngineClient",
    "ramify.inference.http.vllm:RamifyServer": "ramify.inference.http.vllm:RamifyEngineClient",
    "ramify.inference.http.vllm:VllmServer": "ramify.inference.http.vllm:VllmEngineClient",
    "ramify.train.signals.judge:HintJudge": "ramify.train.signals.judge:HintWritingJudge",
    "ramify.evaluate.agent_model_endpoint": "ramify.evaluate.agent_model_server",
    "ramify.extras.cluster.engine_rate": "ramify.extras.cluster.measured_engine_rate",
    "ramify.extras.studies.paper_evidence_task:EvidenceTask": (
        "ramify.extras.studies.paper_evidence_task:PaperEvidenceTask"
    ),
    "ramify.testing.conformance": "ramify.testing.sandbox_conformance",
    "ramify.extras.cluster.measured_engine_rate:EngineRate": (
        "ramify.extras.cluster.measured_engine_rate:InferenceEngineSpeed"
    ),
    "ramify.inference.weight_sync.broadcast:GlooSync": (
        "ramify.inference.weight_sync.broadcast:GlooWeightSync"
    ),
    "ramify.inference.weight_sync.broadcast:NcclSync": (
        "ramify.inference.weight_sync.broadcast:NcclWeightSync"
    ),
    "ramify.inference.weight_sync.cuda_ipc:CudaIpcSync": (
        "ramify.inference.weight_sync.cuda_ipc:CudaIpcWeightSync"
    ),
    "ramify.inference.weight_sync.delta:DeltaSync": (
        "ramify.inference.weight_sync.delta:DeltaWeightSync"
    ),
    "ramify.inference.weight_sync.file_sync:FileSync": (
        "ramify.inference.weight_sync.file_sync:FileWeightSync"
    ),
    "ramify.inference.weight_sync.shared_memory:SharedMemorySync": (
        "ramify.inference.weight_sync.shared_memory:SharedMemoryWeightSync"
    ),
    "ramify.plans.session_plans:SessionPlans": "ramify.plans.session_plans:SessionPlansTool",
    "ramify.train.advantages.credit:hierarchical": (
        "ramify.train.advantages.credit_assignment:subtask_credit"
    ),
    "ramify.train.advantages.credit:per_role": (
        "ramify.train.advantages.credit_assignment:per_role_credit"
    ),
    "ramify.train.advantages.credit:root": (
        "ramify.train.advantages.credit_assignment:root_credit"
    ),
    "ramify.agents.agent_task:AgentTask": ("ramify.agents.agent_task:ExternalAgentTask"),
    "ramify.extras.studies.hindsight_hints:DemonstrationHints": (
        "ramify.extras.studies.hindsight_hints:SolutionHintSource"
    ),
    "ramify.extras.studies.hindsight_hints:Hindsight": (
        "ramify.extras.studies.hindsight_hints:HindsightHints"
    ),
    "ramify.extras.studies.hindsight_hints:NextMessageHints": (
        "ramify.extras.studies.hindsight_hints:NextMessageHintSource"
    ),
    "ramify.extras.studies.programs.judges:RuleJudge": (
        "ramify.extras.studies.programs.judges:RuleHintJudge"
    ),
    "ramify.extras.studies.programs.judges:StepRules": (
        "ramify.extras.studies.programs.judges:ProgramErrorJudge"
    ),
    "ramify.tasks.base:SimpleTask": ("ramify.tasks.base:DatasetTask"),
    "ramify.train.advantages.group_estimators:PassAtK": (
        "ramify.train.advantages.group_estimators:PassAtKEstimator"
    ),
    "ramify.train.backends.fsdp:FsdpTrainedModel": (
        "ramify.train.backends.fsdp:ShardedTrainedModel"
    ),
    "ramify.train.backends.trained_model:LocalTrainedModel": (
        "ramify.train.backends.trained_model:InProcessTrainedModel"
    ),
    "ramify.train.losses.importance_sampling:ImportanceSampling": (
        "ramify.train.losses.importance_sampling:ImportanceSamplingLoss"
    ),
    "ramify.train.losses.masked_importance_sampling:RolloutIs": (
        "ramify.train.losses.masked_importance_sampling:MaskedImportanceSamplingLoss"
    ),
    "ramify.train.signals.outcome:ToolUseSignal": ("ramify.train.signals.outcome:ToolErrorSignal"),
    "ramify.engine.scaffold": "ramify.engine.prompt_scaffold",
    "ramify.engine.strategies": "ramify.engine.answer_strategies",
    "ramify.sources.mail": "ramify.sources.email_conversion",
    "ramify.store.store": "ramify.store.folder_store",
    "ramify.store.stores": "ramify.store.store_opening",
    "ramify.testing.offline": "ramify.testing.offline_model",
    "ramify.testing.script": "ramify.testing.reply_script",
    "ramify.testing.scripted": "ramify.testing.scripted_client",
    "ramify.train.advantages.credit": "ramify.train.advantages.credit_assignment",
    "ramify.train.losses.cov": "ramify.train.losses.covariance_losses",
    "ramify.train.losses.decoupled": "ramify.train.losses.decoupled_ppo",
    "ramify.train.losses.sequence_clip": "ramify.train.losses.sequence_ratio_clip",
    "ramify.train.signals.compose": "ramify.train.signals.signal_composition",
}
"""Maps the first part of a dotted path that an earlier version stored to the part that replaces it
now."""
_OTHERS = "module:name or file.py:name"


class PluginEntry(NamedTuple):
    """A registry entry as shown by ``ramify plugins``: name, origin and description."""

    kind: str
    name: str
    origin: str
    """``ramify``, ``recipe``, or the name and version of an installed package."""
    about: str
    """First sentence of the entry's docstring."""
    error: str = ""
    """Why the entry cannot be used; empty if it can be used."""


class PluginRegistry(Mapping[str, Any]):
    """Maps plug-in names to classes, functions or other objects, and loads them at their first use.

    Iterating over it yields the built-in names, those that a recipe registered, and those of
    installed packages.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        table: Mapping[str, Any],
        *,
        structs: bool = False,
        others: str = _OTHERS,
        aliases: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        """Create the registry for one kind of plug-in, such as algorithms.

        ``kind`` is what error messages call an entry, such as "algorithm", and ``group`` is the
        entry-point group for installed packages. ``table`` maps the names of Ramify's own entries
        to objects or to locations such as ``module:name``. Entries of ``ramify.extras`` are added
        to it.

        If ``structs`` is true, an entry must be a struct whose tag is its name, so that a
        checkpoint can name it. ``others`` describes in errors which values are accepted in place of
        a name. ``aliases`` maps other names, in lower case, to built-in names. ``elsewhere`` maps
        names that belong to another option, in lower case, to advice on what to do instead.
        """
        self.kind = kind
        self.group = group
        self._table = {**table, **ENTRY_POINTS.get(group, {})}
        self.ours = frozenset(self._table)
        """Names of entries that need no package other than this one."""
        self._structs = structs
        self._others = others
        self._aliases = dict(aliases or {})
        self._elsewhere = dict(elsewhere or {})
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self.resolve(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._table, *(point.name for point in self._entry_points())]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._table or any(point.name == name for point in self._entry_points())

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a class as the plug-in called ``name``.

        Raises ConfigError if the name is taken, or if the class cannot be registered under it.
        """

        def put(entry: T) -> T:
            before = self._table.get(name)
            if before is not None and not _is_same(before, entry):
                raise ConfigError(
                    f"{self.kind} '{name}' is taken by {_entry_location(before)}: choose "
                    "another name"
                )
            self._check_tag(name, entry)
            self._table[name] = entry
            return entry

        return put

    def resolve(self, name: str) -> Any:
        """Return the plug-in with this name, or the object at a location such as ``file.py:name``.

        A location may also be ``module:name``. Raises ConfigError. The error for an unknown name
        suggests the nearest name. An entry that cannot be imported is reported with its package and
        its own error, and if two packages have an entry with the same name, both are named.
        """
        name = self.canonical(name)
        if name in self._table:
            entry = self._table[name]
            return load_object(entry, f"{self.kind} '{name}'") if isinstance(entry, str) else entry
        if is_object_location(name):
            return load_object(name, f"{self.kind} '{name}'")
        if name not in self._loaded:
            points = [point for point in self._entry_points() if point.name == name]
            if not points:
                raise self._unknown_name_error(name)
            if problem := self._describe_name_clash(points):
                raise ConfigError(f"{self.kind} '{name}' {problem}")
            self._loaded[name] = self._load_entry_point(points[0])
        return self._loaded[name]

    def check_known_name(self, name: str) -> None:
        """Raise ConfigError, suggesting the nearest known name, if no plug-in has the given name.

        The entry is not imported.
        """
        name = self.canonical(name)
        if name not in self and not is_object_location(name):
            raise self._unknown_name_error(name)

    def _unknown_name_error(self, name: str) -> ConfigError:
        hint = self._elsewhere.get(name.lower())
        advice = hint or f"{did_you_mean(name, self)}; or give {self._others}"
        return ConfigError(f"unknown {self.kind} '{name}': {advice}")

    def canonical(self, name: str) -> str:
        """Return the built-in plug-in name that an alias refers to.

        Any other name is returned unchanged.
        """
        return self._aliases.get(name.lower(), name)

    def build(self, value: Any) -> Any:
        """Instantiate the plug-in that is registered under a name.

        ``value`` is the entry's name, or a mapping with ``name`` and options. Any other value is
        returned unchanged. Raises ConfigError if the entry is unknown or the options are invalid.
        """
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            return value
        options = dict(value)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(
                f"{self.kind}: {dict(value)!r:.80} has no key 'name': give one of "
                f"{', '.join(sorted(self))}"
            )
        kind = self.resolve(name)
        try:
            if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
                return kind(**options)
            config = kind.__struct_config__
            tag = {config.tag_field: config.tag} if config.tag_field else {}
            return msgspec.convert({**options, **tag}, kind)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(
                f"{self.kind} '{name}': {explain_conversion_error(error, kind)}"
            ) from error

    def reset(self) -> None:
        """Remove plug-ins registered by recipes, and discard those loaded from installed
        packages."""
        self._table = {name: each for name, each in self._table.items() if name in self.ours}
        self._loaded.clear()

    def entries(self) -> Iterator[PluginEntry]:
        """Yield an entry for each plug-in of the registry that describes it and names its origin.

        Entries of installed packages are imported, so that a broken entry is listed with its error.
        """
        for name, entry in self._table.items():
            origin = "ramify" if name in self.ours else "recipe"
            yield PluginEntry(self.kind, name, origin, _first_doc_sentence(entry))
        points = self._entry_points()
        for point in points:
            same = [each for each in points if each.name == point.name]
            try:
                about, problem = "", self._describe_name_clash(same)
                if not problem:
                    about = _first_doc_sentence(self._load_entry_point(point))
            except RamifyError as error:
                problem = str(error).partition(": ")[2] or str(error)
            yield PluginEntry(self.kind, point.name, _package(point), about, problem)

    def _entry_points(self) -> list[EntryPoint]:
        # Searching the installed packages takes milliseconds, which most commands need not spend.
        from importlib.metadata import entry_points

        return sorted(entry_points(group=self.group), key=lambda point: point.name)

    def _describe_name_clash(self, points: list[EntryPoint]) -> str:
        """Return why entry points that share a plug-in name cannot be used, or ``""`` if they can
        be."""
        name = points[0].name
        if name in self._table:
            return f"is ramify's own, which is used: choose {points[0].value}, or rename the entry"
        if is_object_location(name):
            return "cannot be chosen, as a name has no dot, slash or colon: rename the entry"
        if len(points) > 1:
            places = " and ".join(f"{_package(point)} ({point.value})" for point in points)
            return f"is in {len(points)} packages, {places}: uninstall one, or give module:name"
        return ""

    def _load_entry_point(self, point: EntryPoint) -> Any:
        what = f"{self.kind} '{point.name}' of the package {_package(point)} ({point.value})"
        entry = load_object(point.value, what)
        self._check_tag(point.name, entry)
        return entry

    def _check_tag(self, name: str, entry: Any) -> None:
        config = getattr(entry, "__struct_config__", None)
        if self._structs and (config is None or config.tag != name or config.tag_field != "name"):
            raise ConfigError(
                f"{self.kind} '{name}' ({_entry_location(entry)}) must be a msgspec.Struct with "
                f"tag_field='name', tag='{name}', so that a checkpoint can name it"
            )


def registries() -> Iterator[PluginRegistry | PluginEntry]:
    """Yield all plug-in registries of Ramify.

    If a registry needs a package that is not installed, an entry with that error is yielded
    instead.
    """
    for location in REGISTRIES:
        try:
            yield load_object(location, location)
        except RamifyError as error:
            yield PluginEntry(location.rpartition(":")[2].lower(), "*", "ramify", "", str(error))


def is_object_location(name: str) -> bool:
    """Return True if ``name`` is an import location, not the name of a registered plug-in.

    Locations are ``module:name``, ``file.py:name`` and dotted module names.
    """
    return not {*".:/"}.isdisjoint(name)


def _resolve_location(location: str) -> Any:
    """Load the object that a reference such as ``module:name`` points to.

    The location is ``module:name``, or a dotted path of a module or of an object in one.
    """
    module, _, name = location.partition(":")
    if name:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        parent, _, name = module.rpartition(".")
        if error.name != module or not parent:
            raise
    return getattr(importlib.import_module(parent), name)


def load_file(path: Path) -> ModuleType:
    """Load a Python file and return its module.

    The file is executed again only if it has changed. It can import modules from its own folder,
    and its errors are raised unchanged.
    """
    path = path.absolute()
    return _run_file(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _run_file(path: Path, _changed_ns: int) -> ModuleType:
    import importlib.util

    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # structs look up the types of their fields there
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def check_methods(field: str, part: Any, *methods: str) -> None:
    """Raise ConfigError if an object lacks one of the named methods.

    ``field`` is the option's name in the error message.
    """
    missing = [name for name in methods if not callable(getattr(part, name, None))]
    if missing:
        raise ConfigError(
            f"{field}: {type(part).__name__} has no method {missing[0]}(): give an object that "
            "has one"
        )


def class_import_location(kind: type) -> str:
    """Return the location from which a class can be loaded again, either ``file.py:Class`` or
    ``module:Class``.

    Returns an empty string for Ramify's own classes, which have registered names, and for classes
    defined inside a function or outside a file.
    """
    module, name = sys.modules.get(kind.__module__), kind.__qualname__
    file = getattr(module, "__file__", None)
    if file is None or "<locals>" in name or kind.__module__.partition(".")[0] == "ramify":
        return ""
    is_file = kind.__module__ == _module_name(Path(file))
    return f"{file if is_file else kind.__module__}:{name}"


def replace_names_with_import_locations(part: Any, data: Any) -> None:
    """Replace plug-in names in a serialized configuration with import locations.

    A process that resumes the run may not know the registered names of plug-ins.
    """
    if isinstance(part, Mapping):
        for name, each in part.items():
            replace_names_with_import_locations(each, data[name])
    elif isinstance(part, tuple):
        for each, inner in zip(part, data, strict=True):
            replace_names_with_import_locations(each, inner)
    elif isinstance(part, msgspec.Struct):
        place = class_import_location(type(part))
        if place:
            data["name"] = place
        for field in ("outcome", "other", "tasks"):  # of an algorithm that wraps others
            if field in data:
                replace_names_with_import_locations(getattr(part, field), data[field])


def _module_name(path: Path) -> str:
    return re.sub(r"\W", "_", str(path))


def load_object(location: str, what: str) -> Any:
    """Return a module, or the object at ``module:name`` or ``file.py:name``.

    Raises ConfigError if it cannot be loaded. ``what`` is the beginning of the error message.
    """
    place, _, name = location.rpartition(":")
    if location.startswith(":") or location.endswith((".py", ":", ".")):
        raise ConfigError(f"{what} names no object: write module:name or file.py:name")
    try:
        if place.endswith(".py"):
            return functools.reduce(getattr, name.split("."), load_file(Path(place).expanduser()))
        return _resolve_location(_current_location(location))
    except RamifyError as error:
        raise ConfigError(f"{what}: {error}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{what}: file {error.filename} does not exist") from error
    except ModuleNotFoundError as error:
        if os.path.isfile(location):
            raise ConfigError(
                f"{what} is a file, not an object: write file.py:name; rows are read from .jsonl "
                "and .parquet files"
            ) from error
        raise ConfigError(f"{what} cannot be loaded{_line_in(place, error)}: {error}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        line = _line_in(place, error)
        if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType | type):
            lacks = _describe_missing_attribute(error.obj, error.name or name)
            raise ConfigError(f"{what} cannot be loaded{line}: {lacks}") from error
        is_plain = isinstance(error, ImportError | AttributeError | SyntaxError | OSError)
        reason = " ".join(str(error).split()) if is_plain else repr(error)
        raise ConfigError(f"{what} cannot be loaded{line}: {reason}") from error


def _describe_missing_attribute(owner: ModuleType | type, name: str) -> str:
    """Return an error sentence for a missing attribute, suggesting the nearest name."""
    file = getattr(owner, "__file__", None) or ""
    is_file = owner.__name__ == _module_name(Path(file))
    short = os.path.relpath(file) if is_file else f"'{owner.__name__}'"
    where = file if short.startswith("..") else short
    own = [
        known
        for known, value in vars(owner).items()
        if not known.startswith("_") and not isinstance(value, ModuleType)
    ]
    close = nearest_name(name, own)
    hint = f"; did you mean '{close}'?" if close else ""
    return f"{where} has no attribute '{name}'{hint}"


def _line_in(place: str, error: BaseException) -> str:
    """Return the line of a file where an error was raised, as a message suffix: `` in line 3``.

    Returns an empty string if the line is unknown or the error already mentions it.
    """
    if not place.endswith(".py") or isinstance(error, SyntaxError):
        return ""
    path = str(Path(place).expanduser().absolute())
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return f" in line {lines[-1]}" if lines else ""


def _current_location(location: str) -> str:
    """Translate an object location stored by an earlier version of Ramify to the current one.

    A module may have moved several times.
    """
    for old, new in MOVED_MODULES.items():
        rest = location.removeprefix(old)
        if rest != location and (old.endswith(".") or rest[:1] in ("", ".", ":")):
            return _current_location(new + rest)
    return location


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"


def _entry_location(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    return f"{getattr(entry, '__module__', '')}:{getattr(entry, '__qualname__', repr(entry))}"


def _is_same(first: Any, second: Any) -> bool:
    """Return True if two registry entries refer to the same object in the same file.

    A file may be imported twice, as a module and as ``file.py:name``.
    """
    if _entry_location(first) == _entry_location(second):
        return True
    places = [
        (os.path.realpath(file), getattr(each, "__qualname__", repr(each)))
        for each in (first, second)
        if (file := getattr(sys.modules.get(getattr(each, "__module__", "")), "__file__", None))
    ]
    return len(places) == 2 and places[0] == places[1]


def _first_doc_sentence(entry: Any) -> str:
    """Return the first sentence of the docstring of a registry entry.

    For a location within Ramify, it is read from the source text, because importing the module may
    require a missing package.
    """
    if isinstance(entry, str):
        text = _doc_in_source(entry)
    elif isinstance(entry, ModuleType | type) or callable(entry):
        text = inspect.getdoc(entry) or ""
    else:
        text = getattr(entry, "title", "")
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\w[\w`)])\. ", paragraph)[0].removesuffix(".")


def _doc_in_source(location: str) -> str:
    """Return the docstring of a module, class or function in this package without importing it.

    For an assignment, it is the string that follows.
    """
    module, _, name = location.partition(":")
    path = os.path.join(os.path.dirname(__file__), *module.split(".")[1:])
    path = f"{path}/__init__.py" if os.path.isdir(path) else f"{path}.py"
    tree = ast.parse(Path(path).read_bytes())
    if not name:
        return ast.get_docstring(tree) or ""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        match node:
            case ast.ClassDef() | ast.FunctionDef() if node.name == name:
                return ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        return text
    return ""


def explain_conversion_error(error: Exception, kind: Any) -> str:
    """Explain why a value could not be converted to ``kind``, and list the allowed values.

    Invalid enum value 'adam' - at `$.optim.kind`: did you mean 'adamw'? known: adamw, muon
    """
    text = str(error)
    problem, _, place = text.partition(" - at `$")
    given = re.search(r"unknown field `(.*)`|enum value (.*)", problem)
    if given is None:
        return text
    kinds = _members(kind)
    for field, in_container in re.findall(r"\.([\w-]+)|(\[)", place):
        inner: list[Any] = []
        for each in kinds:
            if in_container:
                inner += [arg for arg in typing.get_args(each) if arg is not Ellipsis]
            elif hasattr(each, "__struct_fields__"):
                stored = dict(
                    zip(each.__struct_encode_fields__, each.__struct_fields__, strict=True)
                )
                inner.append(typing.get_type_hints(each).get(stored.get(field, field), Any))
        kinds = [member for each in inner for member in _members(each)]
    known = [
        str(name)
        for each in kinds
        for name in (
            getattr(each, "__struct_encode_fields__", ()) if given[1] else typing.get_args(each)
        )
    ]
    return (
        f"{text}: {did_you_mean((given[1] or given[2]).strip(chr(39)), known)}" if known else text
    )


def _members(kind: Any) -> list[Any]:
    """Return the types that a union combines, including those of nested unions.

    Any other type is returned as the only element of a list.
    """
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return [kind]
    return [inner for each in typing.get_args(kind) for inner in _members(each)]
