"""The registry of weight syncs, which send a trainer's weights to inference engines.

The engines run in other processes. ``base.py`` defines their interface.
"""

from ramify.plugins import PluginRegistry

_HERE = "ramify.inference.weight_sync"

WEIGHT_SYNCS = PluginRegistry(
    "weight sync",
    "ramify.weight_syncs",
    {
        "shared": f"{_HERE}.shared_memory:SharedMemoryWeightSync",
        "file": f"{_HERE}.file_sync:FileWeightSync",
        "gloo": f"{_HERE}.broadcast:GlooWeightSync",
        "nccl": f"{_HERE}.broadcast:NcclWeightSync",
        "cuda_ipc": f"{_HERE}.cuda_ipc:CudaIpcWeightSync",
        "delta": f"{_HERE}.delta:DeltaWeightSync",
    },
)
"""Name -> class that implements ``base.WeightSync``."""
