"""Which engines behind HTTP a run samples from, as plain data: the part ``inference`` of a recipe.

    InferenceSpec()                                             one `ramify serve-policy` is started, on a free port
    InferenceSpec(engine="vllm", num=2, gpus=("0", "1"))        two servers of vLLM
    InferenceSpec(engine="sglang", urls=("http://n1:30000",))   one that runs already

Protocols that are spoken, with the versions that they were written for:

    ramify     PROTOCOL of ``inference/base.py``, both sides the same
    vllm       0.29 to 0.32: weight transfer in four phases (init, start, update, finish), RL routes, ids in and out
    sglang     0.5.x from 0.5.23: update_weights_from_disk, pause_generation with modes, weight_version
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.errors import ConfigError

VERSIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "vllm": ((0, 29), (0, 33)),
    "sglang": ((0, 5, 23), (0, 6)),
}
"""Engine -> (the first version whose protocol this is, the first that nobody has looked at)."""
KEY_VARIABLE = "RAMIFY_ENGINE_KEY"


class InferenceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines in processes of their own."""

    engine: Literal["ramify", "vllm", "sglang"] = "ramify"
    urls: tuple[str, ...] = ()
    """Of servers that run already, without /v1; empty: they are started, and ended with the run."""
    num: int = 1
    """Servers to start."""
    ports: tuple[int, ...] = ()
    """For those that are started, one each; empty: free ones."""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each that is started; empty: as it is."""
    command: tuple[str, ...] = ()
    """What starts one; empty: `ramify serve-policy`, `vllm serve` or `python -m
    sglang.launch_server`. Folder, port and the options that the protocol needs are added."""
    args: tuple[str, ...] = ()
    """Further options of it."""
    weight_sync: str = ""
    """How weights get there: of ``inference.weights.base.CARRIERS``, or module:Class; empty: shared
    memory, for SGLang files."""
    weight_sync_options: dict[str, str | int | float | bool] = {}
    key_variable: str = KEY_VARIABLE
    """Environment variable with the key that servers ask for. Where it is not set, those that are
    started get one that is made for the run, and none is sent to ``urls``."""
    start_s: float = 600.0
    """How long a server may take to answer after it was started."""
    request_s: float = 600.0
    """How long a reply may take."""
    update_s: float = 300.0
    """How long one step of a weight update may take."""
    probe_s: float = 5.0
    """How long a server may take to say that it is alive."""
    restarts: int = 3
    """How often an engine that went away is brought back without its having taken a new version of
    the weights in between: started again, where it was started here, or waited for. 0: others go on
    without it."""
    return_s: float = 120.0
    """How long an engine that runs already (``urls``) is waited for when it went away; one that is
    started again has ``start_s``."""
    sleep: Literal["auto", "learn", "never"] = "auto"
    """learn: engines give their device's memory back while the trainer learns, and take it again
    for the weights that it made. auto: where they share a GPU with it."""
    sleep_level: Literal[1, 2] | None = None
    """1: weights go to main memory meanwhile. 2: they are dropped, and each update brings all of
    them. None: 2 for engines that end with the run; 1 for those that outlive it (``urls``), and where
    differences alone are carried (``delta``)."""
    tolerance: float | None = None
    """Most that two log-probabilities of engine and trainer may differ by in the canary, whose mean
    difference may be a tenth of it; None: 1e-4 for `ramify` and 1e-3 for others if engine and trainer
    compute in fp32; else 0.3, or 1/32 of the path's largest log-probability if that is more."""

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError(f"inference: num={self.num} must be at least 1")
        waits = (self.start_s, self.request_s, self.update_s, self.probe_s, self.return_s)
        if min(waits) <= 0 or self.restarts < 0:
            raise ConfigError(
                "inference: start_s, request_s, update_s, probe_s and return_s must be positive, "
                "restarts not negative"
            )
        if self.tolerance is not None and not self.tolerance > 0:
            raise ConfigError(
                f"inference.tolerance={self.tolerance:g} must be above 0; give null for the default"
            )
        for name, given in (("ports", self.ports), ("gpus", self.gpus)):
            if given and len(given) != self.num:
                raise ConfigError(
                    f"inference.{name} has {len(given)} entries for {self.num} servers: give one "
                    "for each"
                )
        if len(set(self.ports)) != len(self.ports):
            raise ConfigError(f"inference.ports={self.ports}: each server needs one of its own")
        bad = next((url for url in self.urls if not url.startswith(("http://", "https://"))), None)
        if bad is not None:
            raise ConfigError(f"inference.urls: '{bad}' is no address; write http://HOST:PORT")
        if self.urls and (self.ports or self.command or self.args or self.gpus or self.num != 1):
            raise ConfigError(
                "inference: with urls nothing is started: leave num, ports, gpus, command and args "
                "out"
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
                    "inference: vLLM takes whole layers: leave weight_sync_options.places and "
                    "layers out for the carrier 'delta'"
                )

    @property
    def level(self) -> int:
        """At which they sleep while the trainer learns; 0 where they do not, or nobody has decided
        it yet (``auto``)."""
        if self.sleep != "learn":
            return 0
        return self.sleep_level or (1 if self.urls or self.weight_sync == "delta" else 2)

    @property
    def carried_by(self) -> str:
        return self.weight_sync or ("file" if self.engine == "sglang" else "shared")


def check_version(engine: str, where: str, version: str) -> None:
    """Raises ConfigError for a version whose protocol is another one."""
    first, beyond = VERSIONS[engine]
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not found or found < first or found >= beyond:
        low, high = (".".join(map(str, each)) for each in (first, beyond))
        raise ConfigError(
            f"{where} is {engine} {version or 'of no version'}, and its protocol is known from "
            f"{low} to before {high}: run one "
            "of those there"
        )
