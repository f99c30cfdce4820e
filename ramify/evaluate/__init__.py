"""Evaluate models on the items of a task, and report scores with confidence intervals and costs.

    >>> from ramify import RLM, evaluate, tasks
    >>> async with RLM("openai:gpt-5-mini") as rlm:
    ...     done = await evaluate.evaluate(rlm, tasks.task_of("needle"), plan)
    >>> print(evaluate.table(evaluate.report(done)))

    run           EvaluationPlan evaluate Evaluation AttemptOutcome
    figures       report table difference EvaluationReport ItemKindScores AttemptTotals
    statistics    pass_at_k majority_at_k mean_with_interval paired_difference MeanEstimate
    rewards       RewardModel (behind HTTP)
    for others    text_env TaskEnv (SkyRL-gym, Gymnasium), taskset harness (verifiers)
    from others   verifiers_task (environments of verifiers, played as they are)

These are all the public names (``__all__``); modules below this package are private.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
