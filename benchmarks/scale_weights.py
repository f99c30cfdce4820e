"""Cost of a weight sync: a model of 100M parameters from a trainer to an engine in a separate
process, by each transport.

    python benchmarks/scale_weights.py            print a table; medians, as ratios to a plain copy
                                                  of the same bytes
    python benchmarks/scale_weights.py --quick    three rounds instead of five
    python benchmarks/scale_weights.py --json     also print {"figures": […]} like engine.py

The engine is the server of `ramify serve-policy` with a model that has almost no attention. The
whole update is timed from the trainer's side: pause, chunks, end, resume. Copies and syncs
alternate, so that the machine's load affects both, and a sync finds the caches in the state after a
training step. The fingerprint after every sync is a separate figure. Each side uses one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, show

WEIGHT_SYNCS: dict[str, dict[str, Any]] = {
    "shared": {},
    "file": {"folder": f"/dev/shm/ramify-bench-{os.getpid()}"},
    "gloo": {},
    "delta": {},
}
FLOORS = {"shared": 3.0}
DELTA_FLOOR = 0.2
MILLIONS = 100
"""Parameters of the model, in millions."""
ROUNDS = 5


def weights_figures(*, quick: bool = False) -> list[Figure]:
    """Return the figures of this file; ``scale.py`` includes them."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_all_figures(Path(folder), 3 if quick else ROUNDS))


async def _all_figures(folder: Path, rounds: int) -> list[Figure]:
    import torch

    from ramify.models.load import save_policy
    from ramify.models.weights import fingerprint

    torch.set_num_threads(1)
    policy = _policy(MILLIONS)
    num_bytes = sum(4 * parameter.numel() for parameter in policy.model.parameters())
    flat = [parameter.detach() for parameter in policy.model.parameters()]
    into = [tensor.clone() for tensor in flat]
    copy = partial(_copy_seconds, into, flat)
    copy_s = median(copy() for _ in range(ROUNDS))
    figures = [Figure("a plain copy", num_bytes / copy_s / 1e9, "GB/s", {})]
    started = time.perf_counter()
    fingerprint(policy.model)
    figures.append(
        Figure("the fingerprint, each side", (time.perf_counter() - started) / copy_s, "copies", {})
    )
    save_policy(policy, folder / "model")
    with _server(folder) as url:
        for name, options in WEIGHT_SYNCS.items():
            figures += await _sync_figures(name, options, policy, url, copy, rounds)
    return figures


def _copy_seconds(into: list[Any], given: list[Any]) -> float:
    started = time.perf_counter()
    for ours, theirs in zip(into, given, strict=True):
        ours.copy_(theirs)
    return time.perf_counter() - started


async def _sync_figures(
    name: str,
    options: dict[str, Any],
    policy: Any,
    url: str,
    copy: Callable[[], float],
    rounds: int,
) -> list[Figure]:
    from ramify.inference.http.http_engines import HttpEngineClient
    from ramify.inference.http.inference_spec import InferenceSpec

    engines = HttpEngineClient(
        policy,
        InferenceSpec(urls=(url,), weight_sync=name, weight_sync_options=options, probe_s=60),
        name="bench",
    )
    await engines.start(Path("unused"), lambda _: None)
    label = "file in memory" if name == "file" else name
    try:
        first_s = await _sync(engines, policy, 1)
        if name == "delta":
            return await _delta_figures(engines, policy, copy, rounds)
        pairs = [
            (copy(), await _sync(engines, policy, version)) for version in range(2, 2 + rounds)
        ]
        first = {"the first": first_s / median(copied for copied, _ in pairs)}
        whole = Figure(f"sync by {label}", _ratio(pairs), "copies", first, FLOORS.get(label))
        return [whole._replace(valid=await _agrees(engines, policy))]
    finally:
        await engines.close()
        if "folder" in options:
            shutil.rmtree(options["folder"], ignore_errors=True)


async def _delta_figures(
    engines: Any, policy: Any, copy: Callable[[], float], rounds: int
) -> list[Figure]:
    """Yield figures of deltas: a step that changes 1 % of the parameters with the others frozen,
    and one that changes 1 % of all values."""
    import torch

    parameters = list(policy.model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    moved, left = [], total // 100
    for parameter in sorted(parameters, key=lambda each: each.numel()):
        if parameter.numel() <= left:
            moved.append(parameter)
            left -= parameter.numel()
    for parameter in parameters:
        parameter.requires_grad_(any(parameter is each for each in moved))
    version = 1
    await _sync(engines, policy, version)  # from now on, the engine has the frozen parameters

    def step() -> None:
        with torch.no_grad():
            for parameter in moved:
                parameter += 1e-3

    def scattered() -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.view(-1)[::100] += 1e-3

    found = []
    for name, change, floor in (
        (
            f"delta, {sum(p.numel() for p in moved) / total:.1%} of the parameters trained",
            step,
            DELTA_FLOOR,
        ),
        ("delta, 1% of the values anywhere", scattered, None),
    ):
        if change is scattered:
            for parameter in parameters:
                parameter.requires_grad_(True)
        pairs = []
        for _ in range(
            3 * rounds
        ):  # these are short, so a single disturbed one would distort a median of three
            change()
            version += 1
            pairs.append((copy(), await _sync(engines, policy, version)))
        figure = Figure(f"sync by {name}", _ratio(pairs), "copies", {}, floor)
        found.append(figure._replace(valid=await _agrees(engines, policy)))
    return found


async def _sync(engines: Any, policy: Any, version: int) -> float:
    import torch

    from ramify.inference.weight_sync.base import to_lazy_weights

    given = to_lazy_weights(policy.model.named_parameters(), torch.float32)
    started = time.perf_counter()
    await engines.update(given, version)
    return time.perf_counter() - started


async def _agrees(engines: Any, policy: Any) -> bool:
    from ramify.models.weights import fingerprint

    return bool(await engines.fingerprint() == fingerprint(policy.model))


def _policy(millions: int) -> Any:
    from transformers import Qwen3Config

    from ramify.models.load import from_config
    from ramify.models.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer(["some words to begin with, and some more"] * 3, 262)
    width = 512
    layer = 4 * width * width + 3 * width * 4 * width
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=max(1, millions * 1_000_000 // layer),
        tie_word_embeddings=True,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    return from_config(config, tokenizer, 0)


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    # The trainer of this process finds the engine's key there.
    key = os.environ.setdefault("RAMIFY_ENGINE_KEY", secrets.token_urlsafe(24))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAMIFY_SERVE_KEY": key}
    command = [
        sys.executable,
        "-m",
        "ramify",
        "serve-policy",
        "model",
        "--port",
        "0",
        "--weight-transfer",
        "--slots",
        "1",
    ]
    process = subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[2]
    finally:
        process.terminate()
        process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


def _ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the ratio of the medians of the syncs and of the copies between them."""
    return median(synced for _, synced in pairs) / median(copied for copied, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures = weights_figures(quick=asked.quick)
    show(figures)
    if asked.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    sys.exit(any(figure.holds is False for figure in figures))


if __name__ == "__main__":
    main()
