"""Devices by name: memory, and the two speeds that bound training and decoding.

Figures are from data sheets, for dense bf16 without sparsity. A program achieves a share of them
(``DeviceEfficiency``), which is stated with each estimate. The figures of a CPU core were measured
for this package (``backends/single.py``).
"""

from __future__ import annotations

import msgspec

from ramify.errors import ConfigError, nearest


class DeviceSpec(msgspec.Struct, frozen=True):
    """One GPU, or one core of a CPU."""

    name: str
    memory_gb: float
    """Memory in 10^9 bytes; 0 for a device without its own memory."""
    tflops: float
    """Matrix products in 10^12 FLOP per second."""
    gb_per_s: float
    """Memory bandwidth in 10^9 bytes per second."""

    @property
    def is_cpu(self) -> bool:
        return not self.memory_gb


class DeviceEfficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of a device's peak speed that a program achieves."""

    train: float = 0.35
    """Share of FLOP/s in forward and backward passes (MFU)."""
    prefill: float = 0.4
    """Share of FLOP/s while prompts are read."""
    decode: float = 0.6
    """Share of bandwidth while tokens are sampled."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"the share {name}={value:g} must be above 0 and at most 1")


DEVICES = {
    device.name: device
    for device in (
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
    """Return the device called ``name``. Raises ConfigError for an unknown name."""
    if name not in DEVICES:
        raise ConfigError(f"unknown device '{name}': {nearest(name, DEVICES)}")
    return DEVICES[name]
