"""One algorithm, one file. ``ALGORITHMS`` names them; ``module:name`` of one's own does as well,
and so does whatever a recipe registers (see ``train/registry.py``). What each does to a known batch
is in ``docs/algorithms.md``.
"""

from ramify.train.registry import Registry

_HERE = "ramify.train.algorithms"

ALGORITHMS = Registry(
    "algorithm",
    {
        "dr_grpo": f"{_HERE}.dr_grpo:DrGRPO",
        "grpo": f"{_HERE}.grpo:GRPO",
        "rloo": f"{_HERE}.rloo:RLOO",
        "maxrl": f"{_HERE}.maxrl:MaxRL",
        "opo": f"{_HERE}.opo:OPO",
        "pass_at_k": f"{_HERE}.pass_at_k:PassAtK",
        "gdpo": f"{_HERE}.gdpo:GDPO",
        "hierarchical": f"{_HERE}.hierarchical:Hierarchical",
        "reinforce_pp": f"{_HERE}.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": f"{_HERE}.reinforce_pp_baseline:ReinforcePPBaseline",
        "remax": f"{_HERE}.remax:ReMax",
        "rae": f"{_HERE}.rae:RAE",
        "ppo": f"{_HERE}.ppo:PPO",
        "hybrid": "ramify.train.signals.compose:Hybrid",
        "sft": f"{_HERE}.sft:SFT",
    },
)
"""Name -> the class that implements ``base.Algorithm``, or where it is."""
