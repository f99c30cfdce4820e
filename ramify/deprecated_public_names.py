"""Keep deprecated public names from earlier versions of Ramify working.

They still work, but issue a warning that gives the new name.

``docs/renames.tsv`` lists every rename, including those of names that are not public.
"""

from __future__ import annotations

import warnings

from ramify.errors import DeprecatedSettingNameWarning

PUBLIC_NAMES = {
    "ramify": {
        "AttemptFailed": "RequestAttemptFailed",
        "Branches": "BestOfBranches",
        "OpenPage": "ServedViewerPage",
        "PromptPreview": "FirstRequestPreview",
        "Suspended": "RunSuspendedError",
    },
    "ramify.evaluate": {
        "AgentJob": "AgentRolloutInput",
        "AgentOutcome": "AgentExitReason",
        "AgentTask": "ExternalAgentTask",
        "Evaluation": "EvaluationResult",
        "McpTask": "TaskWithMcpTools",
        "ItemKindStatistics": "ItemKindScores",
        "ReportRow": "ItemKindScores",
    },
    "ramify.inference": {
        "BadReply": "MalformedResponse",
        "InferenceClient": "UpdatableInferenceClient",
        "LazyWeight": "LazyExportWeight",
        "Refused": "RequestRefusedError",
        "ReplyCut": "ReplyTruncatedError",
        "ReplyLost": "ReplyLostError",
        "ServerFailed": "ServerStatusError",
        "WeightPiece": "WeightUpdateTensor",
        "WeightSource": "LazyExportWeight",
    },
    "ramify.plans": {
        "Calibration": "PartSizeCalibration",
        "CalibrationPoint": "PartSizeAccuracy",
        "Part": "ContextPart",
        "PlanCost": "PlanCostBound",
        "TextPart": "ContextPart",
    },
    "ramify.ray": {
        "Asker": "RayDataAsker",
    },
    "ramify.tasks": {
        "IntervalF1Score": "IntervalF1Scorer",
        "MathScore": "MathScorer",
        "NumericScore": "NumericScorer",
        "RubricScore": "RubricScorer",
        "SimpleTask": "DatasetTask",
        "StepScoredTask": "BatchScoredTask",
        "TaskStart": "RolloutInitialState",
        "UnitTestScore": "UnitTestScorer",
        "WholeTrajectoryReward": "TrajectoryRewardFunction",
    },
    "ramify.testing": {
        "AccuracyCurve": "SimulatedAccuracyCurve",
        "BatchServer": "FakeBatchApiServer",
        "ByteTokenIds": "ScriptedByteTokenizer",
        "HubServer": "FakeHubServer",
        "OfflineSuite": "OfflineModelSuiteStrategy",
        "SandboxProbe": "SandboxUnderTest",
    },
    "ramify.train": {
        "AgentJob": "AgentRolloutInput",
        "AgentOutcome": "AgentExitReason",
        "AgentTask": "ExternalAgentTask",
        "AssignedRollout": "RolloutAdvantages",
        "AssignedStep": "OptimizerStepAdvantages",
        "ByTask": "PerTaskAlgorithm",
        "ComputeSpec": "TrainerComputeSpec",
        "DemonstrationHints": "SolutionHintSource",
        "FrozenSpec": "FrozenModelBudget",
        "GroupOptions": "GroupAlgorithmOptions",
        "GroupRecords": "RolloutGroupOutcomes",
        "Hindsight": "HindsightHints",
        "HintFilter": "HintAcceptanceRules",
        "HintJudge": "HintWritingJudge",
        "ImportanceSampling": "ImportanceSamplingLoss",
        "JudgedTurn": "JudgeTurnView",
        "LossFormula": "BaseLossFormula",
        "LossTokens": "PolicyLossInputs",
        "ModelCaller": "JudgeModelCaller",
        "NextMessageHints": "NextMessageHintSource",
        "NodePool": "NodePoolSpec",
        "PassAtK": "PassAtKEstimator",
        "PublicationResult": "PublishedPolicyLocations",
        "PublishedPolicy": "PublishedPolicyLocations",
        "RolloutIs": "MaskedImportanceSamplingLoss",
        "Rollouter": "TaskRolloutRunner",
        "RuleJudge": "RuleHintJudge",
        "RunInfo": "TrackerRunInfo",
        "ScoringRow": "TokenScoringRequest",
        "ServiceSpec": "RewardServiceSpec",
        "ShardSpec": "FsdpSpec",
        "StepAdvantages": "OptimizerStepAdvantages",
        "StepRules": "ProgramErrorJudge",
        "StepSampleSpec": "RolloutBatchSpec",
        "ToolUseSignal": "ToolErrorSignal",
        "TrainedModel": "TrainableModel",
        "TrainedPolicySpec": "CoTrainedPolicySpec",
        "TrainingGuard": "TrainingGuardSpec",
        "TrajectoryHints": "HintsForTrajectory",
        "WarmUpSpec": "InductionWarmUpSpec",
        "ratio": "importance_ratio",
    },
}
"""Maps each package to its renamed public names, and each old name to the current one."""


def resolve_deprecated_name(package: str, name: str) -> str | None:
    """Return the current public name for a deprecated one, and issue a warning at the caller's
    line.

    Returns None if the package never had that name.
    """
    new = PUBLIC_NAMES.get(package, {}).get(name)
    if new is not None:
        warnings.warn(
            f"{package}.{name} is now called {package}.{new}: use that name",
            DeprecatedSettingNameWarning,
            stacklevel=3,
        )
    return new
