"""Tasks and signals of studies, and the defaults of other trainers to compare with.

    paper_evidence_task.py    answers whose proof comes from many sources
    programs/                 named operations, with a demonstrator, judges and an evaluator
    toolmath/                 mathematical problems for an agent with a Python tool
    hindsight_hints.py        hints for a rollout that has ended
    other_trainer_presets.py  the defaults of other trainers, for ``ramify train --preset``

Each of them is a row of ``ENTRY_POINTS`` in ``ramify/extras/__init__.py``. Public names that lead
here, such as ``train.Hindsight``, are in the ``__init__.pyi`` of their namespace.
"""
