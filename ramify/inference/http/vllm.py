"""Clients of vLLM servers and of `ramify serve-policy`.

The latter has the same HTTP routes and reports more about each reply.

    ids       POST /v1/completions with ids as the prompt, return_token_ids, logprobs 0;
                   prompt_logprobs to score
    weights   POST /pause ─ /start_weight_update ─ /update_weights … ─ /finish_weight_update
                   ─ /reset_prefix_cache ─ /resume
    memory    POST /sleep?level=… ─ /wake_up?tags=weights ─ (weights) ─ /wake_up?tags=kv_cache
              GET  /is_sleeping

vLLM needs VLLM_SERVER_DEV_MODE=1 and ``--logprobs-mode
processed_logprobs``, to sleep also ``--enable-sleep-mode``, and to receive weights from Ramify the
one module that it loads itself (``inside/ramify_in_vllm.py``). ``engine_process.py`` sets all of
them when it starts vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.clients.base import Sampling
from ramify.errors import ConfigError, MalformedResponse, RequestRefusedError
from ramify.inference.base import PROTOCOL
from ramify.inference.http.engine_client import EngineServerInfo, SampledTokenIds
from ramify.inference.http.engine_json_http import BaseEngineClient, next_reply_seed
from ramify.inference.http.inference_spec import check_version
from ramify.types.message import VersionSpan

_ROUTES = (
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/v1/completions",
)


class VllmEngineClient(BaseEngineClient):
    """A client of one vLLM server.

    Implements ``EngineClient``.
    """

    _model = ""

    async def facts(self) -> EngineServerInfo:
        wait_s = self._spec.probe_s
        about = await self._api.get("/version", wait_s)
        version = str(about.get("version", ""))
        if "ramify_protocol" in about:
            self._check_ramify(about)
        else:
            check_version("vllm", self.url, version)
            await self._check_routes()
        models = (await self._api.get("/v1/models", wait_s)).get("data") or [{}]
        self._model = str(models[0].get("id", ""))
        dtype, vocabulary, mode, levels = await self._about_model(about)
        return EngineServerInfo(
            version, models[0].get("max_model_len"), dtype, vocabulary, mode, levels
        )

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], affinity: str
    ) -> SampledTokenIds:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": sampling.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": list(stop_ids),
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": sampling.top_k or 0,
            **self._seed_fields(sampling, affinity, len(ids)),
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if self._spec.report_experts:  # versions without this field report the whole prompt
            body["routed_experts_prompt_start"] = len(ids) - 1
        answer = await self._api.post("/v1/completions", body, self._spec.request_s)
        try:
            return _parse_sampled(answer, ids)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MalformedResponse(
                f"POST {self.url}/v1/completions: no ids and log-probabilities in the answer: "
                f"{error!r}"
            ) from None

    async def score(self, ids: Sequence[int]) -> list[float]:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = await self._api.post("/v1/completions", body, self._spec.request_s)
        try:
            token_logprobs = answer["choices"][0]["prompt_logprobs"]
            return [
                float(candidates[str(id)]["logprob"])
                for id, candidates in zip(ids[1:], token_logprobs[1:], strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MalformedResponse(
                f"POST {self.url}/v1/completions: no prompt_logprobs in the answer: {error!r}"
            ) from None

    async def pause(self) -> None:
        await self._post("/pause?mode=abort")

    async def resume(self) -> None:
        await self._post("/resume")

    async def open_weights(self, info: dict[str, Any]) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": info})

    async def update(self, info: dict[str, Any], version: int, *, first: bool, last: bool) -> None:
        if first:
            await self._post("/start_weight_update")
        await self._post("/update_weights", {"update_info": info})
        if last:
            await self._post("/finish_weight_update", {"weight_version": str(version)})
            await self._post("/reset_prefix_cache")

    async def sleep(self, level: int) -> None:
        await self._post(f"/sleep?level={level}&mode=abort")

    async def wake(self, tag: str) -> None:
        await self._post(f"/wake_up?tags={tag}")

    async def is_asleep(self) -> bool:
        try:
            return bool(
                (await self._api.get("/is_sleeping", self._spec.probe_s)).get("is_sleeping")
            )
        except RequestRefusedError:  # without this route it cannot sleep
            return False

    def _seed_fields(self, sampling: Sampling, affinity: str, num_ids: int) -> dict[str, Any]:
        """Return the request fields that set the seed with which vLLM samples a reply.

        There are none if the settings have no seed.
        """
        return (
            {}
            if sampling.seed is None
            else {"seed": next_reply_seed(sampling.seed, affinity, num_ids)}
        )

    def _check_ramify(self, about: dict[str, Any]) -> None:
        if about["ramify_protocol"] != PROTOCOL:
            raise ConfigError(
                f"{self.url} speaks protocol {about['ramify_protocol']} (ramify "
                f"{about.get('version')}), but this is protocol {PROTOCOL}: install the same "
                "version of ramify on both sides"
            )
        if not about.get("weight_transfer"):
            raise ConfigError(
                f"{self.url} does not take weights: start it with `ramify serve-policy "
                "--weight-transfer`"
            )

    async def _check_routes(self) -> None:
        paths = (await self._api.get("/openapi.json", self._spec.probe_s)).get("paths", {})
        missing = [path for path in _ROUTES if path not in paths]
        if missing:
            raise ConfigError(
                f"{self.url} has no route {missing[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1 "
                f'and --weight-transfer-config \'{{"backend": "ramify"}}\''
            )

    async def _about_model(
        self, about: dict[str, Any]
    ) -> tuple[str, int | None, str, tuple[int, ...]]:
        """Return what the vLLM server reports about its model, such as its dtype.

        The result is the dtype, the vocabulary size, the log-probability mode, and the sleep
        levels. The vocabulary size is None if it is unknown. The sleep levels are those of the
        server.
        """
        if "ramify_protocol" in about:
            return about["dtype"], about["vocab_size"], about["logprobs_mode"], (1, 2)
        server_info = await self._api.get("/server_info?config_format=json", 4 * self._spec.probe_s)
        model = (server_info.get("vllm_config") or {}).get("model_config") or {}
        levels = (1, 2) if model.get("enable_sleep_mode", True) else ()
        return (
            str(model.get("dtype", "")).removeprefix("torch."),
            None,
            str(model.get("logprobs_mode", "")),
            levels,
        )

    async def is_in_vocabulary(self, id: int) -> bool:
        """Return True if a token id is in the server's vocabulary.

        A request tests this, because vLLM does not report its vocabulary size.
        """
        try:
            await self._api.post(
                "/v1/completions",
                {"model": self._model, "prompt": [id], "max_tokens": 1},
                self._spec.request_s,
            )
        except RequestRefusedError:
            return False
        return True


class RamifyEngineClient(VllmEngineClient):
    """A client of `ramify serve-policy --weight-transfer`.

    It has the same routes as vLLM and a few additions.
    """

    async def facts(self) -> EngineServerInfo:
        about = await self._api.get("/version", self._spec.probe_s)
        if "ramify_protocol" not in about:
            raise ConfigError(
                f"{self.url} is not a `ramify serve-policy` server (its version is "
                f"{about.get('version')}): set inference.engine to the software that runs there"
            )
        return await super().facts()

    async def fingerprint(self) -> str | None:
        return str((await self._api.get("/fingerprint", self._spec.update_s))["fingerprint"])

    async def pause(self) -> None:
        """Do nothing, because the server pauses by itself during an update.

        Running requests continue afterwards where they stopped.
        """

    async def resume(self) -> None:
        """Do nothing, because the end of an update resumes the server."""

    async def update(self, info: dict[str, Any], version: int, *, first: bool, last: bool) -> None:
        """Send a chunk of new weights in one request, which may also begin and end the update.

        vLLM needs three requests for that. This matters because most updates that send only
        differences have a single chunk.
        """
        ends = {"weight_version": str(version)} if last else {}
        await self._post("/update_weights", {"update_info": info, "begins": first, **ends})

    def _seed_fields(self, sampling: Sampling, affinity: str, num_ids: int) -> dict[str, Any]:
        return {"seed": sampling.seed, "prompt_cache_key": affinity}


def _parse_sampled(answer: dict[str, Any], prompt_ids: Sequence[int]) -> SampledTokenIds:
    choice = answer["choices"][0]
    ids = tuple(choice["token_ids"] or ())
    logprobs = tuple(map(float, (choice["logprobs"] or {"token_logprobs": ()})["token_logprobs"]))
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} ids and {len(logprobs)} log-probabilities")
    echoed_ids = choice.get("prompt_token_ids")
    if echoed_ids is not None and list(echoed_ids) != list(prompt_ids):
        raise ValueError("the prompt came back with different token ids")
    spans, kept = choice.get("versions"), choice.get("kept")
    cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get(
        "cached_tokens"
    ) or 0
    return SampledTokenIds(
        ids,
        logprobs,
        str(choice["finish_reason"]),
        cached,
        None if spans is None else tuple(VersionSpan(*span) for span in spans),
        None if kept is None else tuple(map(tuple, kept)),
        _reported_experts(answer),
    )


def _reported_experts(answer: dict[str, Any]) -> Any:
    """Return the experts that vLLM reports for the tokens of a prompt and its reply.

    vLLM 0.21 reports the experts of the prompt's tokens in a separate field. They are put first.
    """
    routed, prompt = answer["choices"][0].get("routed_experts"), answer.get("prompt_routed_experts")
    return [*prompt, *routed] if isinstance(routed, list) and prompt else routed
