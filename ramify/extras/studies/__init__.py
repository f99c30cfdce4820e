"""Research tasks and training signals, and other trainers' default settings for comparison.

    paper_evidence_task.py    answers whose proof comes from many sources
    programs/                 named operations, with a demonstrator, judges and an evaluator
    toolmath/                 mathematical problems for an agent with a Python tool
    hindsight_hints.py        hints for a rollout that has ended
    other_trainer_presets.py  the defaults of other trainers, for ``ramify train --preset``

Each of them has a row in ``ENTRY_POINTS`` of ``ramify/extras/__init__.py``. Their public names,
such as ``train.HindsightHints``, are declared in the ``__init__.pyi`` of the namespace.
"""
