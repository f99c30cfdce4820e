"""Train recursive language models: define recipes and custom algorithms, losses and training
signals.

    from ramify import Limits, train

    def run() -> train.Run:
        return train.Run(
            policy=train.PolicySpec(path="Qwen/Qwen3-0.6B"),
            task=train.TaskSpec(name="my_task.py:task"),
            rl=train.RlSpec(steps=200, algorithm=train.GRPO()),
            limits=Limits(max_turns=8),
        )

    a run           Run PolicySpec TaskSpec SftSpec RlSpec EvaluateSpec Schedule …
    start it        load_recipe train, or on the command line ``ramify train RECIPE``
    objectives      RlSpec(objective="gspo"), with_objective: an estimator with its loss
    algorithms      GRPO DrGRPO RLOO PPO … (ALGORITHMS); your own: GroupAlgorithmOptions
    losses          PpoClip Gspo Cispo … (POLICY_LOSSES); your own: BaseLossFormula importance_ratio
    corrections     TokenTis IcePop … (CORRECTIONS)
    tree credit     CREDITS CreditNode
    signals         Hybrid HybridTerm TeacherSignal ProcessRewardSignal OutcomeSignal …
    your own        Signal SignalContext SignalScore Judge JudgeView JudgeVerdict Tracker …
    processes       TrainerComputeSpec OptimizerSpec FsdpSpec PlacementSpec NodePoolSpec RoleSpec
    a loop          TaskRolloutRunner token_sequences pack SingleBackend FsdpRanks TokenSequence
                    Batch Group
    afterwards      read_metrics StepMetrics read_group_records RolloutGroupOutcomes

Importing this package loads no tensor library. These are all the public names (``__all__``);
modules below this package are private.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
