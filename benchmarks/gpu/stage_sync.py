"""Weight sync from this process to an engine in another, in units of a device copy, with fingerprint
and canary; and an engine that gives its memory back while it sleeps."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from kit import Kit, Skipped

from ramify.clients.base import Sampling
from ramify.errors import RamifyError
from ramify.http_server.access import new_key
from ramify.inference.base import TAGS
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import KEY_VARIABLE, InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.inference.weight_sync.base import to_lazy_weights
from ramify.models.load import Policy, save_policy
from ramify.models.weights import fingerprint

SHAPE = "0.6B"
METHODS = {
    # name -> (whether both sides must be on a GPU, the range in device copies)
    "cuda_ipc": (True, (1.0, 12.0)),
    "nccl": (True, (1.0, 30.0)),
    "gloo": (False, (1.0, 2000.0)),
    "shared": (False, (1.0, 2000.0)),
    "delta": (False, (0.0, 2000.0)),
}


def measure(kit: Kit) -> None:
    policy = kit.policy(SHAPE, torch.bfloat16 if kit.is_cuda else torch.float32)
    copy_s = _copy(kit, policy)
    with tempfile.TemporaryDirectory() as folder:
        save_policy(policy, Path(folder) / "model")
        for name, (needs_gpu, limits) in METHODS.items():
            with kit.figure(f"sync by {name}"):
                if needs_gpu and not kit.is_cuda:
                    raise Skipped(f"{name} needs a GPU that both processes reach")
                with _server(kit, Path(folder)) as url:
                    asyncio.run(_sync(kit, name, policy, url, copy_s, limits))
    with kit.figure("sleep and wake"):
        asyncio.run(_sleep(kit, policy))


def _copy(kit: Kit, policy: Policy) -> float:
    """Seconds of one copy of all weights on the device."""
    given = [each.detach() for each in policy.model.parameters()]
    into = [torch.empty_like(each) for each in given]
    expected = None
    if kit.sheet is not None and kit.is_cuda and not kit.quick:
        limit = kit.sheet.gb_per_s
        why = "reads and writes together"
        expected = kit.expect("a device copy", 0.5 * limit, limit, "GB/s", why)
    took = kit.timed(lambda: torch._foreach_copy_(into, given), 5).median
    num_bytes = sum(each.nbytes for each in given)
    kit.add("a device copy", 2 * num_bytes / took / 1e9, "GB/s", expected=expected)
    return took


@contextmanager
def _server(kit: Kit, folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "ramify", "serve-policy", "model", "--port", "0"]
    command += ["--weight-transfer", "--slots", "4", "--device", kit.device.type]
    # The trainer of this process finds the engine's key there.
    key = os.environ.setdefault(KEY_VARIABLE, new_key())
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "RAMIFY_SERVE_KEY": key},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        words = line.split()
        if len(words) < 3 or not words[2].startswith("http"):
            raise Skipped(f"the engine did not start: {line.strip() or 'it said nothing'}")
        yield words[2]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stderr.close()


async def _sync(
    kit: Kit, name: str, policy: Policy, url: str, copy_s: float, limits: tuple[float, float]
) -> None:
    spec = InferenceSpec(urls=(url,), weight_sync=name, probe_s=60)
    engines = HttpEngineClient(policy, spec, name="gpu")
    low, high = limits
    why = "the requests, since the model is small" if kit.quick else "a copy in and a copy out"
    high = 1e6 if kit.quick else high
    expected = kit.expect(f"sync by {name}", low, high, "copies", why)
    try:
        await engines.start(Path("unused"), lambda _: None)
        took = []
        for version in range(1, 4 if kit.quick else 6):
            _change(policy)
            given = to_lazy_weights(policy.model.named_parameters(), policy.dtype)
            kit.sync()
            started = time.perf_counter()
            await engines.update(given, version)
            took.append(time.perf_counter() - started)
        agrees = bool(await engines.fingerprint() == fingerprint(policy.model))
        differs = await _canary(policy, url)
    except (RamifyError, RuntimeError, ValueError) as error:
        raise Skipped(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from None
    finally:
        await engines.close()
    if not agrees:
        raise AssertionError(f"sync by {name}: the engine's fingerprint is another one")
    kit.add(
        f"sync by {name}",
        median(took[1:]) / copy_s,
        "copies",
        expected=expected,
        against={"seconds": median(took[1:]), "the first, s": took[0], "fingerprint": "equal"},
    )
    floor = 1e-3 if policy.dtype == torch.float32 else 0.5
    kit.add(f"sync by {name}: canary", differs, "nats", floor=floor)


def _change(policy: Policy) -> None:
    """Change one value in a hundred, as little as a step does."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.view(-1)[::100] *= 1.001


async def _canary(policy: Policy, url: str) -> float:
    """The largest difference of a log-probability between the engine that was synced and one in
    this process, over the same reply."""
    import aiohttp

    ids = list(range(4, 36))
    client = LocalClient(policy, slots=1)
    ended = await client.sample(ids, Sampling(16, 0.0), "canary")
    ours = list(ended.logprobs)
    await client.close()
    body = {"model": "model", "prompt": ids, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    headers = {"Authorization": f"Bearer {os.environ[KEY_VARIABLE]}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/completions", json=body) as got,
    ):
        answered = await got.json()
    theirs = answered["choices"][0]["logprobs"]["token_logprobs"]
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


async def _sleep(kit: Kit, policy: Policy) -> None:
    """Bytes that an engine gives back while it sleeps, and the seconds to wake."""
    # The libraries' own memory on a GPU is more than a small model.
    most = 1.0 if not kit.is_cuda else 1e6 if kit.quick else 0.2
    expected = kit.expect("a share that stays", 0.0, most, "", "the weights move to main memory")
    client = LocalClient(policy, slots=8)
    before = fingerprint(policy.model)
    await client.sample([5, 6, 7], Sampling(4, 0.0), "")
    held = sum(client.device_memory_usage().values())
    client.pause()
    started = time.perf_counter()
    await client.sleep(TAGS)
    slept_s = time.perf_counter() - started
    left = (
        torch.cuda.memory_allocated(kit.device)
        if kit.is_cuda
        else sum(client.device_memory_usage().values())
    )
    started = time.perf_counter()
    await client.wake(TAGS)
    kit.sync()
    woke_s = time.perf_counter() - started
    client.resume()
    same = fingerprint(policy.model) == before
    await client.close()
    if not same:
        raise AssertionError("an engine that woke has other weights")
    kit.add(
        "sleep: share of the engine's memory that stays",
        left / held,
        "",
        expected=expected,
        against={"sleep s": slept_s, "wake s": woke_s, "held GB": held / 1e9},
    )
