"""The public names: the exact lists, that every name resolves, and that importing them is light."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ramify
from ramify.deprecated_public_names import PUBLIC_NAMES
from ramify.errors import DeprecatedSettingNameWarning
from ramify.pip_install_command import install_command

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("check_public", ROOT / "scripts/check_public.py")
CHECK = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CHECK)

PUBLIC = {
    "ramify": """
        BestOfBranches Call CallEnded CallStarted Cell CellRan CellResult Citation Client
        ConfigError DepthOptions DockerSpec Event FirstRequestPreview JailSpec Limits
        MapResult McpTools MemoryStore Message ModeChosen Model ModelError NoteAdded Picture
        PictureBytes PreparedContext Price ProgressState RLM RamifyError ReplayDiverged
        ReplyReceived RequestAttemptFailed RequestStarted Result RunEnded RunOptions
        RunResumed RunStarted RunStore RunSuspendedError Sampling Sandbox
        SandboxCapabilities SandboxError SandboxSpec Scaffold ScoreAdded ScriptedClient
        ServedViewerPage Session SourceError Stop Store StoreError ToolAnswered TrainError
        Trajectory Turn Usage WeakSandboxWarning amap by_score evaluate inference load map
        open_sandbox plans ray subscribe tasks testing train view vote
    """,
    "ramify.tasks": """
        BatchScoredTask BatchedReward Call Cell DatasetColumns DatasetTask GeneratedSplit
        IntervalF1Scorer Item MathScorer NumericScorer PROGRAM_HINT PROGRAM_WORDS
        RolloutInitialState Rubric RubricScorer SCORERS Score Stop Task Trajectory
        TrajectoryRewardFunction Turn UnitTestScorer boxed_math choice dataset env_task
        exact f1 from_verifiers generated interval_f1 items_of last_number line_f1
        math_answer normalised numeric task_of unit_tests validate verifiers_v1
    """,
    "ramify.evaluate": """
        AgentExitReason AgentRolloutInput AgentRun AttemptOutcome AttemptTotals
        EvaluationPlan EvaluationReport EvaluationResult ExternalAgentTask ItemKindScores
        MeanEstimate RewardModel TaskEnv TaskWithMcpTools difference evaluate harness
        majority_at_k mean_with_interval paired_difference pass_at_k report table taskset
        text_env verifiers_task
    """,
    "ramify.inference": """
        CachePressure Client EngineLost InferenceSpec KnownPrefix LazyExportWeight
        LocalClient MalformedResponse Message ModelError Policy Price RateLimited Reply
        ReplyFiltered ReplyLostError ReplyTruncatedError Request RequestRefusedError
        Sampling SamplingDefaults ServerStatusError Tool ToolCall Unreachable
        UpdatableInferenceClient Usage VersionSpan WeightChunk WeightReceiver WeightSync
        WeightUpdateTensor connect from_config load_policy save_policy
    """,
    "ramify.plans": """
        CallBound Comparison ContextPart Leaf PartSizeAccuracy PartSizeCalibration Pattern
        Plan PlanCostBound PlanStrategy Relevance SplitText aggregate ask best both
        calibration_of classify combine concat count cross distinct field filter join map
        multi_hop pairwise peek periods plan_for ready_plan reduce search split spread
        strategy_for summarise top total
    """,
    "ramify.ray": "RayDataAsker",
    "ramify.testing": """
        CHECKS ConformanceCheck ConformanceError ConformanceResult FakeBatchApiServer
        FakeHubServer ForgetfulDisk ModelLatency OfflineModel OfflineModelSuiteStrategy
        ReceivedRequest SandboxUnderTest Script ScriptRule ScriptedByteTokenizer
        ScriptedClient ScriptedFailure ScriptedServer SimulatedAccuracyCurve check_one
        check_sandbox cut dropped html malformed no_choices no_usage rate_limited refused
        server_error stalled unreachable
    """,
    "ramify.train": """
        ALGORITHMS AgentExitReason AgentRolloutInput AgentRun Algorithm AlgorithmNeeds
        AnnealSchedule Backend BaseLossFormula Batch BranchEstimator BranchOptions
        CORRECTIONS CREDITS Cispo ClipCov CoTrainedPolicySpec CollapseAlarms CreditNode
        CriticOnlyLoss CriticSpec DAPO Decoupled DecoupledGspo DepthSpec DppoCapped DppoKl
        DppoTv DrGRPO DualClip EntropyBranchEstimator EvaluateSpec ExternalAgentTask
        FeedbackHints FormatSignal FrozenModelBudget FsdpRanks FsdpSpec GDPO GRPO
        GeometricMask Gmpo Group GroupAlgorithmOptions Gspo Hierarchical HindsightHints
        HintAcceptanceRules HintWritingJudge HintsForTrajectory Hybrid HybridTerm IcePop
        ImportanceSamplingLoss InductionWarmUpSpec Judge JudgeModelCaller JudgeTurnView
        JudgeVerdict JudgeView KlCov LoraSpec LossSpec MaskedImportanceSamplingLoss MaxRL
        NextMessageHintSource NodePoolSpec OPO OffPolicyCorrection Opsm OptimizerSpec
        OptimizerStepAdvantages OracleJudge OutcomeSignal POLICY_LOSSES PPO PassAtKEstimator
        PerTaskAlgorithm PlacementSpec PolicyLoss PolicyLossInputs PolicySpec PpoClip
        ProcessRewardSignal ProgramErrorJudge ProxApprox PublishedPolicyLocations RAE RLOO
        ReMax ReinforcePP ReinforcePPBaseline RewardServiceSpec RlSpec RoleSpec
        RolloutAdvantages RolloutBatchSpec RolloutGroupOutcomes RolloutOptions RuleHintJudge
        Run SFT Sapo Schedule SequenceClip SequenceMask SequenceSums SequenceTis SftSpec
        ShuffledHints Signal SignalContext SignalScore SingleBackend SolutionHintSource
        StateGroupEstimator StepJudge StepMetrics TaskRolloutRunner TaskSpec TeacherSignal
        TokenCredit TokenScorer TokenScores TokenScoringRequest TokenSequence TokenTis
        ToolErrorSignal TopKCandidates Tracker TrackerRunInfo TrainableModel
        TrainerComputeSpec TrainingGuardSpec VineEstimator WorstTokenMask demonstrate
        importance_ratio kl_estimate load_recipe pack publish read_group_records
        read_metrics token_sequences train with_objective with_preset
    """,
}
"""Namespace -> its public names."""
NAMES = [(package, name) for package, names in PUBLIC.items() for name in names.split()]


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_match_the_list(package: str) -> None:
    assert importlib.import_module(package).__all__ == PUBLIC[package].split()


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_public_name_resolves(package: str, name: str) -> None:
    namespace = importlib.import_module(package)
    value = getattr(namespace, name)
    assert name in dir(namespace)
    if isinstance(value, types.ModuleType):
        assert value.__name__ == f"{package}.{name}"
    elif isinstance(value, type | types.FunctionType):
        assert value.__name__ == name


@pytest.mark.parametrize("package", PUBLIC)
def test_no_public_name_is_hidden_by_a_module(package: str) -> None:
    modules = {
        module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
    }
    packages = set(PUBLIC) - {"ramify"}
    assert modules & set(PUBLIC[package].split()) == (
        {name.removeprefix("ramify.") for name in packages} if package == "ramify" else set()
    )


@pytest.mark.parametrize("package", PUBLIC)
def test_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Frobnicator'"):
        importlib.import_module(package).Frobnicator  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from ramify.train import grpo", "cannot import name 'grpo' from 'ramify.train': did you mean 'GRPO'?"),
        ("import ramify; ramify.train.RLSpec", "module 'ramify.train' has no attribute 'RLSpec': did you mean 'RlSpec'?"),
        ("from ramify.tasks import numerics", "cannot import name 'numerics' from 'ramify.tasks': did you mean 'numeric'?"),
        ("from ramify.train import GRPOSpec", "cannot import name 'GRPOSpec' from 'ramify.train': did you mean 'GRPO'?"),
        ("from ramify import Item", "cannot import name 'Item' from 'ramify': it is in ramify.tasks: from ramify.tasks import Item"),
        ("from ramify.train import Qqq", "cannot import name 'Qqq' from 'ramify.train'"),
        ("from ramify.train import _grpo", "cannot import name '_grpo' from 'ramify.train'"),
    ],
)  # fmt: skip
def test_unknown_public_name_suggests_the_right_one(statement: str, message: str) -> None:
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {})
    text = str(caught.value)
    assert text == message or text.startswith(f"{message} (")  # Python's own adds the file


def test_unknown_public_name_is_tested_for_without_an_error() -> None:
    train = importlib.import_module("ramify.train")
    assert not hasattr(train, "grpo")
    assert getattr(train, "grpo", None) is None


def loaded_by(statement: str) -> set[str]:
    """Modules that ``statement`` loads in a new interpreter."""
    script = f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_a_namespace_loads_nothing_else() -> None:
    light = loaded_by("import ramify")
    assert light - loaded_by("import __future__, importlib, logging, warnings") == {"ramify"}
    for package in set(PUBLIC) - {"ramify"}:
        assert loaded_by(f"import {package}") - light == {package}


def test_an_rlm_loads_nothing_that_only_its_runs_need() -> None:
    loaded = loaded_by("import ramify; ramify.RLM")
    assert "ramify.engine.rlm" in loaded
    assert not loaded & {
        "ctypes",
        "httptools",
        "pkgutil",
        "ramify.engine.run_handle",
        "ramify.http_client.http_transport",
        "ramify.store.base",
    }


def test_a_missing_package_is_named_with_its_extra() -> None:
    """The error for a name whose module needs a missing package says which extra to install."""
    script = "import sys; sys.modules['torch'] = None; from ramify import inference; inference.LocalClient"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: ramify.inference.LocalClient needs torch: {install_command('train')}"
    )


def test_docs_use_only_public_names_and_each_is_documented() -> None:
    command = [sys.executable, str(ROOT / "scripts/check_public.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    ("code", "deep"),
    [
        ("from ramify import RLM, train\nimport ramify.tasks as rt", []),
        ("from ramify.train import Run, load_recipe", []),
        ("import os\nfrom ramify.train.config import Run", ["from ramify.train.config import Run"]),
        ("import ramify.engine.rlm", ["import ramify.engine.rlm"]),
        ("from ramify import engine", ["from ramify import engine"]),
        ("from ramify.train import config", ["from ramify.train import config"]),
        ("def f():\n    from ramify.types import Stop", ["from ramify.types import Stop"]),
        (
            'python -c "from ramify.tasks.base import Item; print(Item)" | wc',
            ["from ramify.tasks.base import Item"],
        ),
        (
            "write('''\nfrom ramify.errors import nearest\n''')",
            ["from ramify.errors import nearest"],
        ),
        ("await x\nasync with y:\n    import ramify.cli", ["import ramify.cli"]),
    ],
)
def test_deep_imports_are_detected(code: str, deep: list[str], tmp_path: Path) -> None:
    """In a documentation page with one block of code."""
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"# A page\n\n```python\n{code}\n```\n")
    assert [text.split(": ", 1)[1] for text in CHECK.deep_imports(tmp_path)] == deep


@pytest.mark.parametrize(
    ("code", "documented"),
    [
        ('def f():\n    """Returns a number."""', False),
        ('def f():\n    """Returns a number.\n\n    >>> f()\n    2\n    """', True),
        ('class F:\n    """A limit."""\n\n    wait: float\n    """Pause."""', False),
        ('class F:\n    """A limit."""\n\n    wait: float\n    """Pause, in seconds."""', True),
        ('class F:\n    wait: float\n    """Pause, in seconds."""', False),
        ('class F:\n    """A limit."""\n\n    def wait(self):\n        """[T] floats."""', True),
        ('F = {}\n"""Names."""', False),
        ('F = {}\n"""Names.\n\n    F["a"]\n"""', True),
    ],
)
def test_documented_names_are_recognised(code: str, documented: bool) -> None:
    name = code.split()[1].strip("():") if code.startswith(("def", "class")) else "F"
    assert CHECK.is_documented(code, name) is documented


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_docstring_examples_of_public_names_pass(
    package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run each ``>>>`` example of a docstring, with the namespaces imported."""
    value = getattr(importlib.import_module(package), name)
    if not isinstance(value, type | types.FunctionType):
        return
    monkeypatch.chdir(tmp_path)
    spaces = ("evaluate", "inference", "plans", "tasks", "testing", "train")
    names = {"ramify": ramify, **{space: getattr(ramify, space) for space in spaces}}
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    globs = {**vars(sys.modules[value.__module__]), **names}
    said: list[str] = []
    for test in finder.find(value, name, module=False, globs=globs):
        runner.run(test, out=said.append)
    assert said == []


@pytest.mark.parametrize("package", PUBLIC_NAMES)
def test_old_public_names_still_work_with_a_warning(package: str) -> None:
    namespace = importlib.import_module(package)
    for old, new in PUBLIC_NAMES[package].items():
        with pytest.warns(
            DeprecatedSettingNameWarning, match=f"{package}.{old} is now called {package}.{new}"
        ):
            assert getattr(namespace, old) is getattr(namespace, new)
        assert old not in dir(namespace)
