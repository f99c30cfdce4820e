"""One algorithm, one file. ``ALGORITHMS`` names them; ``module:name`` of one's own does as well."""

ALGORITHMS = {
    "dr_grpo": "ramify.train.algorithms.dr_grpo:DrGRPO",
    "grpo": "ramify.train.algorithms.grpo:GRPO",
    "hybrid": "ramify.train.signals.compose:Hybrid",
    "rloo": "ramify.train.algorithms.rloo:RLOO",
    "sft": "ramify.train.algorithms.sft:SFT",
}
"""Name -> the class that implements ``base.Algorithm``."""
