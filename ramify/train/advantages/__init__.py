"""The built-in RL algorithms.

Those that differ only in one formula are in ``group_estimators.py``, and most others have a file of
the same name.

``ALGORITHMS`` maps names to classes. A recipe can also name its own class as ``module:name``, or
register one (see ``ramify/plugins.py``). ``docs/algorithms.md`` shows the result of each algorithm
on one fixed batch.
"""

from ramify.plugins import PluginRegistry

_HERE = "ramify.train.advantages"

ALGORITHMS = PluginRegistry(
    "algorithm",
    "ramify.algorithms",
    {
        "dr_grpo": f"{_HERE}.group_estimators:DrGRPO",
        "grpo": f"{_HERE}.group_estimators:GRPO",
        "dapo": f"{_HERE}.group_estimators:DAPO",
        "rloo": f"{_HERE}.group_estimators:RLOO",
        "maxrl": f"{_HERE}.group_estimators:MaxRL",
        "opo": f"{_HERE}.group_estimators:OPO",
        "pass_at_k": f"{_HERE}.group_estimators:PassAtKEstimator",
        "gdpo": f"{_HERE}.gdpo:GDPO",
        "hierarchical": f"{_HERE}.group_estimators:Hierarchical",
        "reinforce_pp": f"{_HERE}.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": f"{_HERE}.group_estimators:ReinforcePPBaseline",
        "remax": f"{_HERE}.remax:ReMax",
        "branch": f"{_HERE}.fork_estimators:BranchEstimator",
        "vine": f"{_HERE}.fork_estimators:VineEstimator",
        "entropy_branch": f"{_HERE}.fork_estimators:EntropyBranchEstimator",
        "state_group": f"{_HERE}.fork_estimators:StateGroupEstimator",
        "rae": f"{_HERE}.rae:RAE",
        "ppo": f"{_HERE}.ppo:PPO",
        "by_task": f"{_HERE}.by_task:PerTaskAlgorithm",
        "hybrid": "ramify.train.signals.signal_composition:Hybrid",
        "sft": f"{_HERE}.sft:SFT",
    },
    structs=True,
    aliases={
        "drgrpo": "dr_grpo",
        "dr-grpo": "dr_grpo",
        "dr.grpo": "dr_grpo",
        "reinforce++": "reinforce_pp",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce++_baseline": "reinforce_pp_baseline",
        "reinforce++-baseline": "reinforce_pp_baseline",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        "max_rl": "maxrl",
        "gae": "ppo",
    },
    elsewhere={
        name: f"it is a loss with GRPO's estimator: set rl.objective={name}"
        for name in ("gspo", "cispo", "sapo", "gmpo", "dppo", "dppo_kl", "rollout_is")
    },
)
"""Name -> the class that implements ``base.Algorithm``, or its import path.

Example:
    rl.algorithm=grpo                       # in a recipe, by name
    rl.algorithm=my_module:MyAlgorithm      # your own
"""
