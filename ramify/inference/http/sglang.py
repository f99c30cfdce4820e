"""A client of SGLang servers: sampling, weight updates and memory release over HTTP.

    ids       POST /generate with input_ids, return_logprob; logprob_start_len 0 to score
    weights   POST /pause_generation ─ /update_weights_from_disk ─ /flush_cache
                   ─ /continue_generation
    memory    POST /pause_generation ─ /release_memory_occupation
                   ─ /resume_memory_occupation for weights, then for kv_cache

To sleep, a server must be started with --enable-memory-saver, and to keep the weights meanwhile,
with --enable-weights-cpu-backup. SGLang's log-probabilities are those at the requested temperature,
before top-p and top-k are applied. Weights are sent as files: its other routes (tensor,
distributed) take pickles or need a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.clients.base import Sampling
from ramify.errors import ConfigError, MalformedResponse, RequestRefusedError
from ramify.inference.base import PROTOCOL, TAGS
from ramify.inference.http.engine_client import EngineServerInfo, SampledTokenIds
from ramify.inference.http.engine_json_http import BaseEngineClient, next_reply_seed
from ramify.inference.http.inference_spec import check_version


class SglangEngineClient(BaseEngineClient):
    """A client of one SGLang server.

    Implements ``EngineClient``.
    """

    async def facts(self) -> EngineServerInfo:
        about = await self._api.get("/server_info", 4 * self._spec.probe_s)
        version = str(about.get("version", ""))
        if "ramify_protocol" not in about:
            check_version("sglang", self.url, version)
        elif about["ramify_protocol"] != PROTOCOL:
            raise ConfigError(
                f"{self.url} speaks protocol {about['ramify_protocol']}, but this is protocol "
                f"{PROTOCOL}: install the same version of ramify on both sides"
            )
        window = (
            about.get("max_model_len")
            or about.get("context_length")
            or about.get("max_req_input_len")
        )
        dtype = str(about.get("dtype", "")).removeprefix("torch.")
        dtype = "" if dtype == "auto" else dtype
        return EngineServerInfo(
            version, window, dtype, about.get("vocab_size"), "processed_logprobs", _levels(about)
        )

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], affinity: str
    ) -> SampledTokenIds:
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": list(stop_ids),
            "top_k": sampling.top_k or -1,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            params["sampling_seed"] = next_reply_seed(sampling.seed, affinity, len(ids))
        body = {"input_ids": list(ids), "sampling_params": params, "return_logprob": True}
        if self._spec.report_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": len(ids) - 1}
        answer = await self._generate(body)
        try:
            about = answer["meta_info"]
            token_logprobs = about["output_token_logprobs"]
            return SampledTokenIds(
                tuple(int(id) for _, id, *_ in token_logprobs),
                tuple(float(logprob) for logprob, *_ in token_logprobs),
                str((about["finish_reason"] or {}).get("type")),
                int(about.get("cached_tokens") or 0),
                None,
                None,
                about.get("routed_experts"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed_response(error) from None

    async def score(self, ids: Sequence[int]) -> list[float]:
        params = {"max_new_tokens": 1, "temperature": 1.0}
        body = {
            "input_ids": list(ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._generate(body)
        try:
            return [
                float(logprob) for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed_response(error) from None

    async def is_in_vocabulary(self, id: int) -> bool:
        try:
            await self._generate({"input_ids": [id], "sampling_params": {"max_new_tokens": 1}})
        except RequestRefusedError:
            return False
        return True

    async def pause(self) -> None:
        await self._post("/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        await self._post("/continue_generation")

    async def open_weights(self, info: dict[str, Any]) -> None:
        """Do nothing, because each update names the folder that holds the weights."""

    async def update(self, info: dict[str, Any], version: int, *, first: bool, last: bool) -> None:
        """Load all new weights from the folder that the update names."""
        body = {"model_path": info["path"], "weight_version": str(version), "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", body)
        if not answer.get("success", True):
            raise MalformedResponse(
                f"POST {self.url}/update_weights_from_disk: {answer.get('message')}"
            )
        await self._post("/flush_cache")

    async def sleep(self, level: int) -> None:
        """Put the SGLang server to sleep, which releases its memory.

        The server's flags decide whether weights are kept in main memory. The server must be idle,
        or it exits.
        """
        await self.pause()
        await self._post("/release_memory_occupation", {"tags": list(TAGS)})

    async def wake(self, tag: str) -> None:
        """Reallocate one kind of memory, ``weights`` or ``kv_cache``, after ``sleep`` released it.

        The server exits if that memory was not released.
        """
        await self._post("/resume_memory_occupation", {"tags": [tag]})

    async def is_asleep(self) -> bool:
        return False

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._api.post("/generate", body, self._spec.request_s)

    def _malformed_response(self, error: Exception) -> MalformedResponse:
        return MalformedResponse(
            f"POST {self.url}/generate: no ids and log-probabilities in the answer: {error!r}"
        )


def _levels(about: dict[str, Any]) -> tuple[int, ...]:
    """Return the sleep levels that an SGLang server supports according to its startup flags.

    A flag that is not reported is assumed to be set.
    """
    if not about.get("enable_memory_saver", True):
        return ()
    return (1, 2) if about.get("enable_weights_cpu_backup", True) else (2,)
