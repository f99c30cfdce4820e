"""What all stages of the GPU kit share: the device and its data sheet, models from a configuration,
figures with the range that was expected before they were measured, and the file of a stage.

    kit = Kit(...)                       one stage, in a separate process
    with kit.figure("name", …): …        a failure or a missing capability costs one figure
    OUT/gpu/STAGE.json                   written again after every figure

A range comes from the data sheet of a GPU (``ramify.extras.cluster.model_and_device_specs``) and the share of it that a
program may reach. A CPU has no sheet: a matrix product and a copy of this run take its place.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import AutoConfig

from ramify.extras.cluster.model_and_device_specs import DEVICES, DeviceHardwareSpec
from ramify.models.load import Policy, from_config
from ramify.models.tokenizer_training import train_tokenizer

VOCABULARY = 512
"""Tokens of the kit's tokenizer; a model may have more."""
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7B": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "MoE": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
}
"""Configurations of Qwen3's sizes, and of a small mixture of experts."""
_CUT = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}
"""What ``--quick`` makes of every shape: the same code in a small model."""


class GpuFigure(msgspec.Struct, kw_only=True):
    """One measured number, in the form of the other benchmarks."""

    name: str
    value: float | None
    unit: str
    against: dict[str, float | str]
    floor: float | None
    """Promised maximum."""
    expected: tuple[float, float] | None
    """The range that the data sheet allows, stated before the measurement."""
    holds: bool | None
    """Whether ``value`` is within ``floor`` and ``expected``; None if there is neither."""
    note: str = ""
    """Why it was not measured, or what bounds it."""


class Skipped(Exception):
    """This machine lacks what a figure needs; the message says what."""


class Timing(NamedTuple):
    """Seconds of some runs of one thing."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)


class Kit:
    """One stage's device, models and figures."""

    def __init__(self, stage: str, device: str, out: Path, *, quick: bool, trace: bool) -> None:
        self.device = torch.device(device)
        self.quick = quick
        self.out = out
        self.stage = stage
        self.num_failed = 0
        self._trace = trace
        self._figures: list[GpuFigure] = []
        self._drawn: tuple[str, Policy] | None = None
        self._write()
        self.sheet = sheet_of(self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_measured(self) -> int:
        return sum(each.value is not None for each in self._figures)

    def add(
        self,
        name: str,
        value: float | None,
        unit: str,
        *,
        expected: tuple[float, float] | None = None,
        floor: float | None = None,
        against: Mapping[str, float | str] | None = None,
        note: str = "",
    ) -> None:
        """Keep a figure, print it, and write the stage's file."""
        holds = None
        if expected is not None or floor is not None:
            low, high = expected or (-float("inf"), float("inf"))
            holds = value is not None and low <= value <= min(high, floor or float("inf"))
            holds = None if value is None else holds
        figure = GpuFigure(
            name=name,
            value=value,
            unit=unit,
            against=dict(against or {}),
            floor=floor,
            expected=expected,
            holds=holds,
            note=note,
        )
        self._figures.append(figure)
        self._write()
        print(f"{self.stage}: {line_of(figure)}", flush=True)

    @contextlib.contextmanager
    def figure(self, name: str) -> Iterator[None]:
        """Measure one figure: what it lacks here, or its failure, costs this figure and not the
        others."""
        try:
            yield
        except Skipped as why:
            self.add(name, None, "", note=f"skipped: {why}")
        except torch.OutOfMemoryError:
            self.add(
                name, None, "", note=f"skipped: the device's {self.memory_gb:.0f} GB are short"
            )
        except Exception as error:  # noqa: BLE001  (reported, and the stage fails at its end)
            traceback.print_exc()
            self.num_failed += 1
            reason = str(error).strip().partition("\n")[0][:300]
            self.add(name, None, "", note=f"failed: {type(error).__name__}: {reason}")
        finally:
            self.release()

    def expect(
        self, name: str, low: float, high: float, unit: str, why: str
    ) -> tuple[float, float]:
        """State a range before it is measured."""
        print(f"{self.stage}: expects {name} of {low:.3g} to {high:.3g} {unit}: {why}", flush=True)
        return low, high

    # --- the device

    @property
    def memory_gb(self) -> float:
        """Memory of the device in 10^9 bytes; 0 on a CPU."""
        if not self.is_cuda:
            return 0.0
        return torch.cuda.get_device_properties(self.device).total_memory / 1e9

    def need(self, what: str, gigabytes: float) -> None:
        """Raise Skipped if the device has too little free memory for ``what``."""
        if self.is_cuda:
            free = torch.cuda.mem_get_info(self.device)[0] / 1e9
            if gigabytes > free:
                raise Skipped(f"{what} needs {gigabytes:.0f} GB, and {free:.0f} GB are free")

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], Any], rounds: int, *, warm: int = 1) -> Timing:
        """Run ``work`` ``warm`` times without and ``rounds`` times with a clock, each until the
        device is done."""
        for _ in range(warm):
            work()
        seconds = []
        for _ in range(rounds):
            self.sync()
            started = time.perf_counter()
            work()
            self.sync()
            seconds.append(time.perf_counter() - started)
        return Timing(seconds)

    def peak_gb(self, work: Callable[[], Any]) -> float:
        """Run ``work`` and return the most device memory that it held, in 10^9 bytes."""
        if not self.is_cuda:
            raise Skipped("the memory of one step is only counted on a GPU")
        self.release()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.sync()
        return torch.cuda.max_memory_allocated(self.device) / 1e9

    def release(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def traced(self, name: str) -> Iterator[None]:
        """Write a trace of PyTorch's profiler with ``--trace``."""
        if not self._trace:
            yield
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.is_cuda else []
        with torch.profiler.profile(activities=kinds) as profile:
            yield
        profile.export_chrome_trace(str(self.out / f"{self.stage}-{name}.trace.json.gz"))

    # --- models

    def config(self, shape: str) -> Any:
        """The configuration of ``shape``, cut down with ``--quick``."""
        fields = dict(SHAPES[shape])
        if self.quick:
            fields |= {**_CUT, "hidden_size": fields["hidden_size"] // 16}
            if "num_experts" in fields:
                fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        fields |= {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
        return AutoConfig.for_model(**fields)

    def policy(self, shape: str, dtype: torch.dtype = torch.float32) -> Policy:
        """A policy of ``shape`` with random weights, on the device.

        The weights of the latest shape are kept in main memory: a CPU draws 4B of them in half a
        minute.
        """
        if self._drawn is None or self._drawn[0] != shape:
            self._drawn = None
            self._drawn = shape, from_config(self.config(shape), tokenizer(), seed=0)
        drawn = self._drawn[1]
        model = copy.deepcopy(drawn.model).to(self.device, dtype)
        made = dataclasses.replace(drawn, model=model)
        # No token ends a reply, so that each has the length that was asked for.
        made.renderer.stop_ids = ()  # type: ignore[misc]
        return made

    # --- the file

    def _write(self) -> None:
        about = {"stage": self.stage, "machine": machine_of(self.device), "quick": self.quick}
        text = json.dumps({**about, "figures": msgspec.to_builtins(self._figures)}, indent=1)
        path = self.out / f"{self.stage}.json"
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)

    def last_line(self) -> str:
        return json.dumps({"figures": msgspec.to_builtins(self._figures)})


def line_of(figure: GpuFigure) -> str:
    """One figure as a line of text."""
    if figure.value is None:
        return f"{figure.name}: {figure.note or 'not measured'}"
    parts = [f"{figure.name}: {figure.value:.4g} {figure.unit}".strip()]
    if figure.expected is not None:
        parts.append("expected {:.3g} to {:.3g}".format(*figure.expected))
    if figure.floor is not None:
        parts.append(f"at most {figure.floor:.3g}")
    if figure.holds is False:
        parts.append("OUTSIDE")
    parts += [f"{name} {_short(value)}" for name, value in figure.against.items()]
    return "; ".join([*parts, *([figure.note] if figure.note else [])])


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


@functools.cache
def tokenizer() -> Any:
    """A tokenizer of ``VOCABULARY`` tokens."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefghij "), 60)) for _ in range(2000)]
    return train_tokenizer(texts, VOCABULARY)


def sheet_of(device: torch.device) -> DeviceHardwareSpec | None:
    """The data sheet of a GPU, or a CPU's own speeds in a matrix product and a copy; None for a
    GPU that ``ramify.extras.cluster.model_and_device_specs`` does not list."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower().replace(" ", "")
        return next(
            (DEVICES[key] for key in DEVICES if not DEVICES[key].is_cpu and key in name), None
        )
    size = 512
    left, right = torch.randn(size, size), torch.randn(size, size)
    big = torch.randn(1 << 24)
    into = torch.empty_like(big)
    product = min(_seconds(lambda: torch.mm(left, right)) for _ in range(20))
    copy = min(_seconds(lambda: into.copy_(big)) for _ in range(5))
    return DeviceHardwareSpec("cpu", 0, 2 * size**3 / product / 1e12, 2 * big.nbytes / copy / 1e9)


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def machine_of(device: torch.device) -> dict[str, str]:
    """What a reader of a figure must know of the machine."""
    about = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    with contextlib.suppress(ImportError):
        import transformers

        about["transformers"] = transformers.__version__
    if device.type == "cuda":
        about["cuda"] = str(torch.version.cuda)
        total = torch.cuda.get_device_properties(device).total_memory
        about["memory"] = f"{total / 1e9:.0f} GB"
    return about


def check(device: str, out: Path) -> None:
    """Exit with a sentence if nothing can be measured: no such device, or no space in ``out``."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("scripts/gpu: no CUDA device here; its CPU form: scripts/gpu --device cpu --quick")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "probe").write_bytes(b"\0" * (1 << 20))
        (out / "probe").unlink()
    except OSError as error:
        sys.exit(f"scripts/gpu: cannot write to {out} ({error.strerror}): choose another --out")
    free = shutil.disk_usage(out).free
    if free < 64 << 20:
        sys.exit(f"scripts/gpu: {out} has {free >> 20} MiB free and needs 64: choose another --out")
