"""Optional parts of Ramify: third-party sandboxes, cluster planning, studies, and test suites.

    sandboxes/    sessions of monty, IPython, E2B, Modal, Daytona and Prime
    cluster/      plans, simulations and job files of a run on many machines
    studies/      tasks and signals of studies, and the defaults of other trainers
    suites/       questions over long contexts, by which answers of models and systems are compared

Users refer to these parts by name, as if an installed package had provided them. ``ENTRY_POINTS``
contains what the ``[project.entry-points]`` of such a package would contain, and
``ramify/plugins.py`` reads it. Nothing outside this package imports one of its modules, and none of
its folders imports another one (``tests/extras/test_beside.py``). If a folder is deleted, only its
names become unknown.

This module defines the names of the parts. They are looked up by ``ramify/plugins.py``, which also
knows where moved modules are now (``MOVED_MODULES``).
"""

from __future__ import annotations

ENTRY_POINTS: dict[str, dict[str, str]] = {
    "ramify.tasks": {
        "code_qa": "ramify.extras.suites.code_qa:code_qa",
        "evidence": "ramify.extras.studies.paper_evidence_task:evidence",
        "mrcr": "ramify.extras.suites.mrcr:mrcr",
        "multihop": "ramify.extras.suites.multihop:multihop",
        "needle": "ramify.extras.suites.niah:needle",
        "niah": "ramify.extras.suites.niah:niah",
        "oolong": "ramify.extras.suites.oolong:oolong",
        "oolong_pairs": "ramify.extras.suites.oolong_pairs:oolong_pairs",
        "planted": "ramify.extras.suites.planted:planted",
        "programs": "ramify.extras.studies.programs.task:programs",
        "toolmath": "ramify.extras.studies.toolmath.task:toolmath",
    },
    "ramify.offline": {
        "code_qa": "ramify.extras.suites.code_qa_offline_model:CODE_QA",
        "mrcr": "ramify.extras.suites.mrcr_offline_model:MRCR",
        "multihop": "ramify.extras.suites.multihop_offline_model:MULTIHOP",
        "niah": "ramify.extras.suites.niah_offline_model:NIAH",
        "oolong": "ramify.extras.suites.oolong_offline_model:OOLONG",
        "oolong_pairs": "ramify.extras.suites.oolong_pairs_offline_model:PAIRS",
        "planted": "ramify.extras.suites.planted_offline_model:PLANTED",
    },
    "ramify.demos": {
        "programs": "ramify.extras.studies.programs.scripted_demonstrator:program_demos",
        "retool": "ramify.extras.studies.toolmath.retool_sft_conversion:retool_demos",
    },
    "ramify.signals": {"hindsight": "ramify.extras.studies.hindsight_hints:HindsightHints"},
    "ramify.presets": {
        "trl": "ramify.extras.studies.other_trainer_presets:TRL",
        "skyrl": "ramify.extras.studies.other_trainer_presets:SKYRL",
        "prime": "ramify.extras.studies.other_trainer_presets:PRIME",
        "verl": "ramify.extras.studies.other_trainer_presets:VERL",
        "areal": "ramify.extras.studies.other_trainer_presets:AREAL",
    },
    "ramify.hints": {
        "demonstrations": "ramify.extras.studies.hindsight_hints:SolutionHintSource",
        "feedback": "ramify.extras.studies.hindsight_hints:FeedbackHints",
        "hindsight": "ramify.extras.studies.hindsight_hints:HindsightHints",
        "next_message": "ramify.extras.studies.hindsight_hints:NextMessageHintSource",
    },
    "ramify.sandboxes": {
        "daytona": "ramify.extras.sandboxes.daytona",
        "e2b": "ramify.extras.sandboxes.e2b",
        "ipython": "ramify.extras.sandboxes.ipython",
        "modal": "ramify.extras.sandboxes.modal",
        "monty": "ramify.extras.sandboxes.monty",
        "prime": "ramify.extras.sandboxes.prime",
    },
}
"""Entry points by group and name, as in a package's ``pyproject.toml``. Each is ``module:name``, or
a module."""
EXTRA_COMMANDS = {
    "cluster plan": (
        "ramify.extras.cluster.plan_and_simulate_commands",
        "estimate a recipe's process placement, memory and step time",
    ),
    "cluster simulate": (
        "ramify.extras.cluster.plan_and_simulate_commands",
        "predict the speed of a finished run on other hardware",
    ),
    "launch": (
        "ramify.extras.cluster.launch_cli",
        "write and submit a recipe's job files: Slurm, Kubernetes, SkyPilot, Ray",
    ),
}
"""Command of ``ramify`` -> its module and its one-line description."""
