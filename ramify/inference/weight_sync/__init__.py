"""Weight syncs by name: the methods by which a trainer sends new weights to inference engines in
other processes.

``base.py`` defines their interface.
"""

from ramify.plugins import Registry

_HERE = "ramify.inference.weight_sync"

WEIGHT_SYNCS = Registry(
    "weight sync",
    "ramify.weight_syncs",
    {
        "shared": f"{_HERE}.shared_memory:SharedMemorySync",
        "file": f"{_HERE}.file_sync:FileSync",
        "gloo": f"{_HERE}.broadcast:GlooSync",
        "nccl": f"{_HERE}.broadcast:NcclSync",
        "cuda_ipc": f"{_HERE}.cuda_ipc:CudaIpcSync",
        "delta": f"{_HERE}.delta:DeltaSync",
    },
)
"""Name -> class that implements ``base.WeightSync``."""
