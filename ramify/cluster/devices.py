"""What a process computes on, by name: memory and the two speeds that bound training and decoding.

Figures of makers' data sheets, dense bf16 without sparsity; what a program gets of them is a share
(``DeviceEfficiency``), which is stated beside each estimate. A core of a CPU is what this package
measured (``backends/single.py``).
"""

from __future__ import annotations

import msgspec

from ramify.errors import ConfigError, nearest


class DeviceSpec(msgspec.Struct, frozen=True):
    """One GPU, or one core of a CPU."""

    name: str
    memory_gb: float
    """10^9 bytes; 0 where it has none of its own."""
    tflops: float
    """10^12 FLOP per second of matrix products."""
    gb_per_s: float
    """10^9 bytes per second from its memory."""

    @property
    def is_cpu(self) -> bool:
        return not self.memory_gb


class DeviceEfficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a device's speed is got."""

    train: float = 0.35
    """MFU: of products, forward and backward."""
    prefill: float = 0.4
    """Of products, while prompts are read."""
    decode: float = 0.6
    """Of bandwidth, while tokens are sampled."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"the share {name}={value:g} must be above 0 and at most 1")


DEVICES = {
    each.name: each
    for each in (
        DeviceSpec("cpu", 0, 0.05, 10),
        DeviceSpec("l4", 24, 121, 300),
        DeviceSpec("rtx4090", 24, 165, 1008),
        DeviceSpec("l40s", 48, 362, 864),
        DeviceSpec("a100", 80, 312, 2039),
        DeviceSpec("h100", 80, 989, 3350),
        DeviceSpec("h200", 141, 989, 4800),
        DeviceSpec("b200", 180, 2250, 7700),
        DeviceSpec("mi300x", 192, 1307, 5300),
    )
}


def device_of(name: str) -> DeviceSpec:
    """Raises ConfigError for a name that is not known."""
    if name not in DEVICES:
        raise ConfigError(f"there is no device '{name}': {nearest(name, DEVICES)}")
    return DEVICES[name]
