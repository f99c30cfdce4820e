"""Choose the engine's and trainer's numeric precision from the checkpoint and the device.

This module also defines how far their log-probabilities may then differ.

    policy.dtype   compute.precision   engine                  trainer's products
    auto           auto                fp32 on a CPU and from  fp32 if the engine is fp32, else
                                       scratch, else as        bf16 (fp32 on a GPU without bf16)
                                       stored
    auto           fp32, bf16          as compute.precision    as given
    given          auto                as given                bf16 if that has 16 bits, else fp32
    given          fp32, bf16          as given                as given

The decision does not depend on which precision is fast on a processor, since otherwise the same run
would compute different numbers on another machine. The trainer's weights, log-probabilities and
losses are always fp32.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ramify.errors import ConfigError
from ramify.train.config import Run
from ramify.train.engine_consistency_checks import CanaryTolerance

_OPTIONS = "policy.dtype (engine) and compute.precision (trainer)"
_LIMITS = {"float32": (1e-4, 0.0), "float16": (0.04, 2.0**-8), "bfloat16": (0.3, 2.0**-5)}
"""Largest difference between two log-probabilities that each precision can cause. It is given in
nats, and relative to the largest log-probability of the compared tokens, since rounding grows with
it.

bf16 has 8 bits: 2^-5 is eight units in the last place; six were measured. A pair of precisions
gets the limit of the coarser one, because with bf16 on one side as much was measured as with bf16
on both.
"""
_FOREIGN = 1e-3
"""Minimum tolerance in nats for an engine other than Ramify's, whose kernels round differently."""
_UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative error of one rounding, by precision."""


class RunNumericPrecision(NamedTuple):
    """The numeric precisions a run uses for the engine and for the trainer's matrix products."""

    engine: str
    """Precision of the engine: ``float32``, ``float16`` or ``bfloat16``."""
    trainer: Literal["fp32", "bf16"]
    """Precision of the trainer's matrix products."""

    @property
    def engine_and_trainer(self) -> tuple[str, str]:
        """The engine's and trainer's precisions as PyTorch dtype names, such as ``float32``."""
        return self.engine, "float32" if self.trainer == "fp32" else "bfloat16"

    def canary_limits(self, run: Run) -> CanaryTolerance:
        """Return the limits for the log-probability differences between engine and trainer on the
        canary.

        The canary is a test reply. It is the larger of the limits for their two precisions, or
        ``inference.tolerance`` if that is set. A deterministic run allows no difference.
        """
        spec = run.inference
        hint = f"the engine computes in {self.engine} and the trainer in {self.trainer}"
        if run.deterministic:
            hint += (
                "; deterministic=true needs the same bits, which this device does not give: set "
                "deterministic=false"
                + ("" if self.trainer == "fp32" else ", or policy.dtype=float32")
            )
            return CanaryTolerance(0.0, 0.0, hint)
        if self.engine_and_trainer != ("float32", "float32"):
            hint += "; set policy.dtype=float32 and compute.precision=fp32 to rule out rounding"
        if spec is not None and spec.tolerance is not None:
            return CanaryTolerance(spec.tolerance, 0.0, hint)
        is_ours = spec is None or spec.engine == "ramify"
        tolerance, rounding = max(_LIMITS[each] for each in self.engine_and_trainer)
        return CanaryTolerance(tolerance if is_ours else max(tolerance, _FOREIGN), rounding, hint)


def choose_precisions(
    run: Run, stored: str, device: str, *, has_bf16: bool = True
) -> RunNumericPrecision:
    """Choose the precisions of engine and trainer for a run.

    ``stored`` is the precision of the checkpoint's weights, or ``float32`` without a checkpoint.
    ``device`` is ``cpu`` or ``cuda``. Raises ConfigError if the log-probabilities of engine and
    trainer could not agree.

    ``has_bf16`` is True if the device supports bf16, as every CPU does.
    """
    dtype, products = run.policy.dtype, run.compute.precision
    if not has_bf16 and "bf16" in (products, dtype.replace("bfloat16", "bf16")):
        raise ConfigError(
            f"policy.dtype={dtype} and compute.precision={products}: this device does not support "
            "bf16: set both to auto, or to float32 and fp32"
        )
    if dtype != "auto":
        engine = str(dtype)
    elif products != "auto":
        engine = "float32" if products == "fp32" else "bfloat16"
    else:
        engine = "float32" if device == "cpu" else stored
    if products == "auto":
        products = "bf16" if engine != "float32" and has_bf16 else "fp32"
    precision = RunNumericPrecision(engine, products)
    _check(run, precision)
    return precision


def _check(run: Run, precision: RunNumericPrecision) -> None:
    """Raise ConfigError if the precisions conflict with ``deterministic`` or
    ``inference.tolerance``.

    A deterministic run needs the same precision in engine and trainer, and the tolerance must be at
    least one rounding error.
    """
    if run.deterministic and precision.engine_and_trainer[0] != precision.engine_and_trainer[1]:
        raise ConfigError(
            f"deterministic=true needs one precision, but the engine would compute in "
            f"{precision.engine} and the trainer in {precision.trainer}: set {_OPTIONS} to the "
            "same, or only one of them"
        )
    tolerance = None if run.inference is None else run.inference.tolerance
    unit = max(_UNITS[each] for each in precision.engine_and_trainer)
    if tolerance is not None and tolerance < unit:
        raise ConfigError(
            f"inference.tolerance={tolerance:g} is below the rounding error ({unit:.2g}) of "
            f"{precision.engine} in the engine and {precision.trainer} in the trainer: raise it, "
            f"or set {_OPTIONS} to fp32"
        )
