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
"""Engine name -> class that implements ``EngineClient`` and whose constructor takes (url, spec,
key)."""


class InferenceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Configuration of external inference engines, such as their software, number and weight sync.

    The engines run in separate processes.
    """

    engine: str = "ramify"
    """Inference software: a name that ``ramify plugins engine`` lists, or the location of a class
    as ``module:name`` or ``file.py:name``."""
    urls: tuple[str, ...] = ()
    """URLs of servers that already run, without /v1. If empty, the run starts servers and stops
    them when it ends."""
    num: int = 1
    """Number of servers to start."""
    ports: tuple[int, ...] = ()
    """One port for each server that the run starts. If empty, free ports are chosen."""
    gpus: tuple[str, ...] = ()
    """``CUDA_VISIBLE_DEVICES`` for each server that the run starts. If empty, servers inherit the
    value of the run."""
    command: tuple[str, ...] = ()
    """Command that starts a server; folder, port and the protocol's options are added. If empty,
    `ramify serve-policy`, `vllm serve` or `python -m sglang.launch_server`, depending on
    ``engine``."""
    args: tuple[str, ...] = ()
    """Additional command-line options for each server that the run starts."""
    weight_sync: str = ""
    """How weights are sent to the engines: a name that ``ramify plugins weight sync`` lists,
    ``module:name`` or ``file.py:name``. If empty, shared memory is used, or files for SGLang."""
    weight_sync_options: dict[str, str | int | float | bool] = {}
    """Options of the weight sync, such as ``{"by": "nccl"}`` for ``delta``; see docs/engines.md."""
    key_variable: str = KEY_VARIABLE
    """Environment variable that holds the servers' API key. If it is not set, servers that the run
    starts get a generated key, and requests to ``urls`` carry none."""
    start_s: float = 600.0
    """Timeout in seconds for a started server to answer. Large models load slowly and may need
    more."""
    request_s: float = 600.0
    """Timeout in seconds for one reply from an engine."""
    update_s: float = 300.0
    """Timeout in seconds for one step of a weight update."""
    probe_s: float = 5.0
    """Timeout in seconds for a health check of an engine."""
    restarts: int = 3
    """Maximum number of times that one lost engine is restarted, or waited for if the run did not
    start it, between two weight updates. With 0, the run continues without lost engines."""
    return_s: float = 120.0
    """Seconds to wait for a lost engine of ``urls`` to return. For engines that the run restarts,
    ``start_s`` applies instead."""
    report_experts: bool = False
    """True if replies report the experts that processed each token, as ``rl.rollout.replay_routes``
    requires. Started servers get the option --enable-return-routed-experts; servers in ``urls``
    must already have it."""
    sleep: Literal["auto", "learn", "never"] = "auto"
    """When engines release device memory: ``learn`` during training steps, until they receive new
    weights; ``never`` not at all. ``auto`` is ``learn`` if they share a GPU with the trainer,
    otherwise ``never``."""
    sleep_level: Literal[1, 2] | None = None
    """How sleeping engines release their weights: 1 moves them to main memory; 2 drops them, so
    each update must send all of them. None means 2 for engines that end with the run, and 1 for
    those that outlive it (``urls``) or receive only differences (``delta``)."""
    tolerance: float | None = None
    """Maximum difference between the engine's and the trainer's log-probability of a token in the
    check after a weight sync; the mean difference may be a tenth of it. None means 1e-4 in
    fp32 (1e-3 for engines other than `ramify`), 0.04 in fp16 and 0.3 in bf16, the coarser of engine
    and trainer. In fp16 1/256 and in bf16 1/32 of the largest log-probability in the check, if that
    is more."""

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
    """Check whether Ramify supports the version of an engine's software.

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
