"""Tasks: questions with right answers, and functions that score a model's answers.

    >>> from ramify import tasks
    >>> def make(rng):
    ...     words = rng.choices(["teal", "mint"], k=1000)
    ...     return tasks.Item("How often does 'teal' occur?", " ".join(words), words.count("teal"))
    >>> task = tasks.DatasetTask("teal", tasks.generated("teal", make), tasks.numeric)
    >>> tasks.validate(task)
    ''

    a task        Item Task DatasetTask RolloutInitialState Score TrajectoryRewardFunction generated
                  dataset BatchScoredTask (scores the rollouts of a step together)
    by name       task_of items_of; PROGRAM_WORDS PROGRAM_HINT (the task programs)
    rewards       numeric exact normalised f1 choice … (SCORERS), RubricScorer, BatchedReward
    elsewhere     from_verifiers env_task
    a result      Trajectory Call Turn Cell Stop

These are all the public names (``__all__``); modules below this package are private.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
