"""The configuration of inference engines behind HTTP: section ``inference`` of a training recipe.

    InferenceSpec()                                   start one `ramify serve-policy` on a free port
    InferenceSpec(engine="vllm", num=2, gpus=("0", "1"))        start two vLLM servers
    InferenceSpec(engine="sglang", urls=("http://n1:30000",))   use one that already runs

Supported protocols, with the versions that they were checked with:

    ramify     PROTOCOL of ``inference/base.py``, the same on both sides
    vllm       0.29 to 0.33: weight transfer in four phases (init, start, update, finish),
               RL routes, token ids in and out
    sglang     0.5.x from 0.5.23: update_weights_from_disk, pause_generation with modes,
               weight_version

An older version is rejected. A newer one is used with a warning: its routes are looked up before
the first rollout, and a test after each weight sync shows whether its replies are right.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.errors import ConfigError
from ramify.logging import ComponentLogger
from ramify.plugins import PluginRegistry

_log = ComponentLogger("inference")
VERSIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "vllm": ((0, 29), (0, 34)),
    "sglang": ((0, 5, 23), (0, 6)),
}
"""Engine -> (first version that has this protocol, first version that is too new to have been
tested)."""
KEY_VARIABLE = "RAMIFY_ENGINE_KEY"
EXPERTS_OPTION = "--enable-return-routed-experts"
"""Command-line option that makes vLLM, SGLang and `ramify serve-policy` report experts."""
ENGINES = PluginRegistry(
    "engine",
    "ramify.engines",
    {
        "ramify": "ramify.inference.http.vllm:RamifyEngineClient",
        "vllm": "ramify.inference.http.vllm:VllmEngineClient",
        "sglang": "ramify.inference.http.sglang:SglangEngineClient",
    },
)
"""Name -> class that implements ``EngineClient``. It is called with (url, spec, key)."""


class InferenceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of inference engines in separate processes: which software, how many,
    where, and how they receive new weights."""

    engine: str = "ramify"
    """A name in ``ENGINES``, or the location of a class: ``module:name`` or ``file.py:name``."""
    urls: tuple[str, ...] = ()
    """URLs of running servers, without /v1. If empty, servers are started and end with the run."""
    num: int = 1
    """Number of servers to start."""
    ports: tuple[int, ...] = ()
    """One port for each server to start. Empty: free ports."""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES for each server to start. Empty: inherited."""
    command: tuple[str, ...] = ()
    """Command that starts a server. Empty: `ramify serve-policy`, `vllm serve` or `python -m
    sglang.launch_server`. Folder, port and the protocol's options are added."""
    args: tuple[str, ...] = ()
    """Additional options for the command."""
    weight_sync: str = ""
    """How weights are sent: a name in ``inference.weight_sync.WEIGHT_SYNCS``, module:name or
    file.py:name. Empty: shared memory, or files for SGLang."""
    weight_sync_options: dict[str, str | int | float | bool] = {}
    """Options of the weight sync, such as ``{"by": "nccl"}`` for ``delta``; see docs/engines.md."""
    key_variable: str = KEY_VARIABLE
    """Environment variable with the servers' API key. If it is not set, servers that the run starts
    get a generated key, and no key is sent to ``urls``."""
    start_s: float = 600.0
    """Timeout in seconds until a started server answers."""
    request_s: float = 600.0
    """Timeout in seconds for one reply."""
    update_s: float = 300.0
    """Timeout in seconds for one step of a weight update."""
    probe_s: float = 5.0
    """Timeout in seconds for a health check."""
    restarts: int = 3
    """How many times a lost engine may be brought back before it takes a new version of the
    weights. Engines started by the run are restarted, others are waited for. 0: continue without
    it."""
    return_s: float = 120.0
    """Seconds to wait for a lost engine of ``urls`` to return. For engines that the run restarts,
    ``start_s`` applies instead."""
    report_experts: bool = False
    """True if replies report the experts of each token, as ``rl.rollout.replay_routes`` requires.
    Servers that are started get the option --enable-return-routed-experts. Others must already have
    it."""
    sleep: Literal["auto", "learn", "never"] = "auto"
    """learn: engines release device memory during training steps, and allocate it again for new
    weights. auto: as learn if they share a GPU with the trainer, and otherwise as never."""
    sleep_level: Literal[1, 2] | None = None
    """1: weights move to main memory. 2: they are dropped, and each update sends all of them. None:
    2 for engines that end with the run, 1 for those that outlive it (``urls``) or receive only
    differences (``delta``)."""
    tolerance: float | None = None
    """Maximum difference between the engine's and the trainer's log-probability of a token, in the
    check after a weight sync. The mean difference may be a tenth of that. None: in fp32, 1e-4 for
    `ramify` and 1e-3 for others. Otherwise 0.3, or 1/32 of the largest log-probability in the check
    if that is more."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES.ours:
            ENGINES.resolve(self.engine)
            if not (self.urls or self.command):
                raise ConfigError(
                    f"inference.engine={self.engine}: give inference.urls, or inference.command "
                    "that starts a server (folder, --host, --port and --dtype are added)"
                )
        if self.num < 1:
            raise ConfigError(f"inference: num={self.num} must be at least 1")
        waits = (self.start_s, self.request_s, self.update_s, self.probe_s, self.return_s)
        if min(waits) <= 0 or self.restarts < 0:
            raise ConfigError(
                "inference: start_s, request_s, update_s, probe_s and return_s must be positive, "
                "restarts must not be negative"
            )
        if self.tolerance is not None and not self.tolerance > 0:
            raise ConfigError(
                f"inference.tolerance={self.tolerance:g} must be above 0; give null for the default"
            )
        for name, given in (("ports", self.ports), ("gpus", self.gpus)):
            if given and len(given) != self.num:
                raise ConfigError(
                    f"inference.{name} has {len(given)} entries for {self.num} servers: give one "
                    "for each server"
                )
        if len(set(self.ports)) != len(self.ports):
            raise ConfigError(f"inference.ports={self.ports}: each server needs a different port")
        bad = next((url for url in self.urls if not url.startswith(("http://", "https://"))), None)
        if bad is not None:
            raise ConfigError(f"inference.urls: '{bad}' is not an address; write http://HOST:PORT")
        if self.urls and (self.ports or self.command or self.args or self.gpus or self.num != 1):
            raise ConfigError(
                "inference: with urls no server is started: remove num, ports, gpus, command and "
                "args"
            )
        if self.engine == "sglang" and self.weight_sync not in ("", "file"):
            raise ConfigError(
                f"inference.weight_sync={self.weight_sync}: SGLang takes weights from files: use "
                "'file'"
            )
        if self.engine == "vllm" and self.weight_sync == "delta":
            asked = self.weight_sync_options
            if asked.get("places", False) or not asked.get("layers", True):
                raise ConfigError(
                    "inference: the weight sync 'delta' sends vLLM whole layers: remove "
                    "weight_sync_options.places and layers"
                )

    @property
    def effective_sleep_level(self) -> int:
        """The sleep level of engines while the trainer learns: 1 keeps the weights in main memory,
        and 2 drops them.

        0 if engines do not sleep, or if that is still undecided (``auto``).
        """
        if self.sleep != "learn":
            return 0
        return self.sleep_level or (1 if self.urls or self.weight_sync == "delta" else 2)

    @property
    def weight_sync_name(self) -> str:
        """The name of the weight sync that sends new weights to the engines."""
        return self.weight_sync or ("file" if self.engine == "sglang" else "shared")


def check_version(engine: str, where: str, version: str) -> None:
    """Check an engine's version.

    Raises ConfigError if it is too old for the protocol, and warns if it was not tested.
    """
    first, beyond = VERSIONS[engine]
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    low, high = (".".join(map(str, each)) for each in (first, beyond))
    if not found or found < first:
        raise ConfigError(
            f"{where} is {engine} {version or 'of an unknown version'}; versions before {low} are "
            "not supported: run a newer one"
        )
    if found >= beyond:
        text = (
            f"{where} is {engine} {version}; versions from {low} to before {high} were checked. It "
            "is used, and the canary of each weight sync decides whether its replies are right"
        )
        _log.warning("unchecked_engine", text, shown=True, engine=engine, version=version)
