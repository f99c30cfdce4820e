"""The code beside the core: nothing imports it, names lead to it, and so do places of old runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import ramify.extras
from ramify.extras import ENTRY_POINTS, EXTRA_COMMANDS
from ramify.plugins import PluginRegistry, registries
from ramify.sandbox.base import SANDBOXES, SandboxSpec, check_provider_exists
from tests.test_house import check_house

FOLDERS = sorted(path.parent.name for path in Path(ramify.extras.__path__[0]).glob("*/__init__.py"))
OLD_PLACES = {
    "ramify.clients.script:Script": "ramify.testing.reply_script",
    "ramify.clients.scripted:ScriptedClient": "ramify.testing.scripted_client",
    "ramify.clients.scripted_server:ScriptedServer": "ramify.testing.scripted_server",
    "ramify.sandbox.conformance:ConformanceResult": "ramify.testing.sandbox_conformance",
    "ramify.testing.conformance:ConformanceResult": "ramify.testing.sandbox_conformance",
    "ramify.extras.cluster.engine_rate:EngineRate": (
        "ramify.extras.cluster.measured_engine_rate:InferenceEngineSpeed"
    ),
    "ramify.extras.studies.paper_evidence_task:EvidenceTask": (
        "ramify.extras.studies.paper_evidence_task:PaperEvidenceTask"
    ),
    "ramify.cluster.plan:ClusterPlan": "ramify.extras.cluster.plan:ClusterResourcePlan",
    "ramify.cluster.shape:DeviceSpec": (
        "ramify.extras.cluster.model_and_device_specs:DeviceHardwareSpec"
    ),
    "ramify.tasks.evidence:evidence": "ramify.extras.studies.paper_evidence_task",
    "ramify.tasks.needle:needle": "ramify.extras.suites.niah",
    "ramify.tasks.oolong:oolong": "ramify.extras.suites.oolong",
    "ramify.extras.studies.oolong:oolong": "ramify.extras.suites.oolong",
    "ramify.tasks.programs.task:programs": "ramify.extras.studies.programs.task",
    "ramify.tasks.toolmath.task:toolmath": "ramify.extras.studies.toolmath.task",
    "ramify.train.data.sft_data:program_demos": "ramify.extras.studies.programs.scripted_demonstrator",
    "ramify.train.data.sft_data:retool_demos": "ramify.extras.studies.toolmath.retool_sft_conversion",
    "ramify.train.signals.hindsight:FeedbackHints": "ramify.extras.studies.hindsight_hints",
    "ramify.train.signals.hindsight:Hindsight": "ramify.extras.studies.hindsight_hints:HindsightHints",
    "ramify.train.signals.programs:OracleJudge": "ramify.extras.studies.programs.judges",
    "ramify.train.signals.programs:RuleJudge": "ramify.extras.studies.programs.judges:RuleHintJudge",
    "ramify.train.signals.programs:ShuffledHints": "ramify.extras.studies.programs.judges",
    "ramify.train.signals.programs:StepRules": "ramify.extras.studies.programs.judges:ProgramErrorJudge",
    "ramify.agents.agent_task:AgentTask": "ramify.agents.agent_task:ExternalAgentTask",
    "ramify.extras.studies.hindsight_hints:DemonstrationHints": "ramify.extras.studies.hindsight_hints:SolutionHintSource",
    "ramify.extras.studies.hindsight_hints:Hindsight": "ramify.extras.studies.hindsight_hints:HindsightHints",
    "ramify.extras.studies.hindsight_hints:NextMessageHints": "ramify.extras.studies.hindsight_hints:NextMessageHintSource",
    "ramify.extras.studies.programs.judges:RuleJudge": "ramify.extras.studies.programs.judges:RuleHintJudge",
    "ramify.extras.studies.programs.judges:StepRules": "ramify.extras.studies.programs.judges:ProgramErrorJudge",
    "ramify.tasks.base:SimpleTask": "ramify.tasks.base:DatasetTask",
    "ramify.train.advantages.group_estimators:PassAtK": "ramify.train.advantages.group_estimators:PassAtKEstimator",
    "ramify.train.backends.fsdp:FsdpTrainedModel": "ramify.train.backends.fsdp:ShardedTrainedModel",
    "ramify.train.backends.trained_model:LocalTrainedModel": "ramify.train.backends.trained_model:InProcessTrainedModel",
    "ramify.train.losses.importance_sampling:ImportanceSampling": "ramify.train.losses.importance_sampling:ImportanceSamplingLoss",
    "ramify.train.losses.masked_importance_sampling:RolloutIs": "ramify.train.losses.masked_importance_sampling:MaskedImportanceSamplingLoss",
    "ramify.train.signals.outcome:ToolUseSignal": "ramify.train.signals.outcome:ToolErrorSignal",
    "ramify.sandbox.cloud.daytona:open_provider": "ramify.extras.sandboxes.daytona",
    "ramify.sandbox.cloud.e2b:open_provider": "ramify.extras.sandboxes.e2b",
    "ramify.sandbox.cloud.modal:open_provider": "ramify.extras.sandboxes.modal",
    "ramify.sandbox.cloud.prime:open_provider": "ramify.extras.sandboxes.prime",
    "ramify.sandbox.docker:open_provider": "ramify.sandbox.providers.docker",
    "ramify.sandbox.inprocess:open_provider": "ramify.sandbox.providers.inprocess",
    "ramify.sandbox.ipython:open_provider": "ramify.extras.sandboxes.ipython",
    "ramify.sandbox.jail.provider:open_provider": "ramify.sandbox.providers.jail",
    "ramify.sandbox.monty:open_provider": "ramify.extras.sandboxes.monty",
    "ramify.sandbox.process:open_provider": "ramify.sandbox.providers.process",
}
"""Place that an earlier version stored -> module in which the object is today."""


def folder_of(module: str) -> str | None:
    """The folder of ``ramify.extras`` that has ``module``; None for a module of the core."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["ramify", "extras"] and len(parts) > 2 else None


def test_only_names_lead_to_the_code_beside_the_core() -> None:
    imported = [
        f"{module} imports {other}"
        for module, others in check_house.imported_modules().items()
        for other in others
        if folder_of(other) not in (None, folder_of(module))
    ]
    assert imported == []


def test_every_folder_beside_the_core_has_names() -> None:
    places = [
        *(place for names in ENTRY_POINTS.values() for place in names.values()),
        *(module for module, _ in EXTRA_COMMANDS.values()),
    ]
    assert sorted({folder_of(place.partition(":")[0]) for place in places}) == FOLDERS


def test_every_group_of_names_has_a_registry() -> None:
    groups = {each.group for each in registries() if isinstance(each, PluginRegistry)}
    assert set(ENTRY_POINTS) <= groups


def test_a_sandbox_that_an_old_run_stored_resolves() -> None:
    spec = SandboxSpec(provider="ramify.tasks.programs.evaluator", allow_weaker=True)
    check_provider_exists(spec)
    assert (
        SANDBOXES.resolve(spec.provider).__name__
        == "ramify.extras.studies.programs.program_interpreter"
    )


@pytest.mark.parametrize(("old", "module"), OLD_PLACES.items())
def test_a_place_that_an_old_run_stored_resolves(old: str, module: str) -> None:
    found = PluginRegistry("part", "ramify.tests", {}).resolve(old)
    module, _, name = module.partition(":")
    name = name or old.partition(":")[2]
    assert (found.__module__, found.__qualname__) == (module, name)
