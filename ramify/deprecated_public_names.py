"""Keep deprecated public names from earlier versions of Ramify working.

They still work, but issue a warning that gives the new name.

``docs/renames.tsv`` lists every rename, including those of names that are not public.
"""

from __future__ import annotations

import warnings

from ramify.errors import DeprecatedSettingNameWarning

PUBLIC_NAMES = {
    "ramify.evaluate": {"Evaluation": "EvaluationResult", "ReportRow": "ItemKindStatistics"},
    "ramify.inference": {"BadReply": "MalformedResponse", "WeightSource": "LazyWeight"},
    "ramify.plans": {"Calibration": "PartSizeCalibration", "Part": "TextPart"},
    "ramify.tasks": {
        "IntervalF1Score": "IntervalF1Scorer",
        "MathScore": "MathScorer",
        "NumericScore": "NumericScorer",
        "RubricScore": "RubricScorer",
        "StepScoredTask": "BatchScoredTask",
        "UnitTestScore": "UnitTestScorer",
        "WholeTrajectoryReward": "TrajectoryRewardFunction",
    },
    "ramify.testing": {
        "ByteTokenIds": "ScriptedByteTokenizer",
        "OfflineSuite": "OfflineModelSuiteStrategy",
        "SandboxProbe": "SandboxUnderTest",
    },
    "ramify.train": {
        "AssignedRollout": "RolloutAdvantages",
        "AssignedStep": "StepAdvantages",
        "ByTask": "PerTaskAlgorithm",
        "FrozenSpec": "FrozenModelBudget",
        "HintJudge": "HintWritingJudge",
        "JudgedTurn": "JudgeTurnView",
        "LossFormula": "BaseLossFormula",
        "LossTokens": "PolicyLossInputs",
        "PublishedPolicy": "PublicationResult",
        "RunInfo": "TrackerRunInfo",
        "ScoringRow": "TokenScoringRequest",
        "ServiceSpec": "RewardServiceSpec",
        "StepSampleSpec": "RolloutBatchSpec",
        "TrainedPolicySpec": "CoTrainedPolicySpec",
        "TrajectoryHints": "HintsForTrajectory",
        "WarmUpSpec": "InductionWarmUpSpec",
        "ratio": "importance_ratio",
    },
}
"""Maps each package to its renamed public names, and each old name to the current one."""


def resolve_deprecated_name(package: str, name: str) -> str | None:
    """Return the current name for an old public name, and issue a warning at the caller's line.

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
