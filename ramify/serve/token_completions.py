"""Completion routes that take and return token ids, in vLLM's and SGLang's formats.

``POST /v1/completions`` is vLLM's API with ``return_token_ids``; ``POST /generate`` is SGLang's.

    {"prompt": [5, 9], "max_tokens": 4, "logprobs": 0, "return_token_ids": true}
        -> {"choices": [{"token_ids": […], "logprobs": {"token_logprobs": […]},
                         "finish_reason": "length", …}], …}

A prompt is a list of ids or one text. ``prompt_logprobs`` scores the prompt. The response has two
fields that vLLM lacks: ``versions`` (which weights sampled which tokens) and ``kept`` (the tokens
left by top-p and top-k). If the server reports experts, ``routed_experts`` has those of the tokens
that predict the sampled ones, as if the request had set ``routed_experts_prompt_start`` (vLLM) or
``routed_experts_start_len`` (SGLang) to the prompt's last token. A request may set
``prompt_cache_key``, the same for all requests that share a prefix. A field that would change the
answer but is not supported is rejected by name.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ramify.clients.base import Sampling
from ramify.errors import RequestRefusedError
from ramify.http_server.model_api import decode_request, refuse_unsupported
from ramify.inference.http.reported_experts import encode_experts_int32, encode_experts_npy
from ramify.inference.local.generation_request import GenerationState
from ramify.inference.local.local_client import LocalClient

_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
}
"""Request fields that are not supported, each with the values that are accepted nevertheless
because they change nothing. Other values are rejected."""
_NOT_IN_GENERATE: dict[str, tuple[Any, ...]] = {
    "text": (),
    "stream": (False,),
    "top_logprobs_num": (0,),
}


class _PromptBody(msgspec.Struct):
    prompt: list[int] | str
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    prompt_cache_key: str = ""
    # Rejected unless their value has no effect: see ``_NOT_HERE``.
    n: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    stream: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None


class _Params(msgspec.Struct):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None


class _Generate(msgspec.Struct):
    input_ids: list[int]
    sampling_params: _Params = msgspec.field(default_factory=_Params)
    return_logprob: bool = False
    logprob_start_len: int = -1
    return_routed_experts: bool = False
    # Rejected unless their value has no effect: see ``_NOT_IN_GENERATE``.
    text: Any = None
    stream: Any = None
    top_logprobs_num: Any = None


_prompt_decoder = msgspec.json.Decoder(_PromptBody)
_generate_decoder = msgspec.json.Decoder(_Generate)


async def answer_vllm_completion(client: LocalClient, body: bytes, model: str) -> dict[str, Any]:
    """Answer a completion request in vLLM's format.

    Raises RequestRefusedError or RequestRejected if the request is invalid.
    """
    parsed = decode_request(_prompt_decoder, body, "completion")
    refuse_unsupported(parsed, _NOT_HERE)
    tokenizer = client.policy.tokenizer
    ids = (
        parsed.prompt if isinstance(parsed.prompt, list) else list(tokenizer.encode(parsed.prompt))
    )
    scores = await _prompt_logprobs(client, ids) if parsed.prompt_logprobs is not None else None
    sampling = Sampling(
        parsed.max_tokens,
        parsed.temperature,
        parsed.top_p,
        stop=_stop_texts(parsed.stop),
        seed=parsed.seed,
        top_k=max(parsed.top_k, 0),
    )
    generation = await _sample_tokens(
        client, ids, sampling, parsed.stop_token_ids, parsed.prompt_cache_key
    )
    choice: dict[str, Any] = {
        "index": 0,
        "text": tokenizer.decode(generation.sampled_ids, skip_special_tokens=True),
        "finish_reason": generation.end,
        "versions": [[span.start, span.end, span.version] for span in generation.version_spans],
    }
    if parsed.logprobs is not None:
        choice["logprobs"] = {"token_logprobs": generation.logprobs}
    if parsed.return_token_ids:
        choice |= {
            "token_ids": generation.sampled_ids,
            "prompt_token_ids": ids,
            "kept": generation.candidate_ids_by_token,
        }
    if client.experts is not None:
        choice["routed_experts"] = encode_experts_npy(generation.routes, client.experts)
    if scores is not None:
        entries = ({str(id): {"logprob": score}} for id, score in zip(ids[1:], scores, strict=True))
        choice["prompt_logprobs"] = [None, *entries]
    usage = {
        "prompt_tokens": len(ids),
        "completion_tokens": len(generation.logprobs),
        "total_tokens": len(ids) + len(generation.logprobs),
        "prompt_tokens_details": {"cached_tokens": generation.num_reused},
    }
    return {
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


async def answer_sglang_generate(client: LocalClient, body: bytes) -> dict[str, Any]:
    """Answer a completion request in SGLang's format.

    Raises RequestRefusedError or RequestRejected if the request is invalid.
    """
    parsed = decode_request(_generate_decoder, body, "completion")
    refuse_unsupported(parsed, _NOT_IN_GENERATE)
    params, ids = parsed.sampling_params, parsed.input_ids
    about: dict[str, Any] = {}
    if parsed.return_logprob and parsed.logprob_start_len == 0:
        scores = await _prompt_logprobs(client, ids)
        entries = ([score, id, None] for id, score in zip(ids[1:], scores, strict=True))
        about["input_token_logprobs"] = [[None, ids[0], None], *entries]
    sampling = Sampling(
        params.max_new_tokens,
        params.temperature,
        params.top_p,
        stop=_stop_texts(params.stop),
        seed=params.sampling_seed,
        top_k=max(params.top_k, 0),
    )
    generation = await _sample_tokens(client, ids, sampling, params.stop_token_ids or [], "")
    if parsed.return_logprob:
        about["output_token_logprobs"] = [
            [logprob, id, None]
            for id, logprob in zip(generation.sampled_ids, generation.logprobs, strict=True)
        ]
    about |= {
        "finish_reason": {"type": generation.end},
        "prompt_tokens": len(ids),
        "completion_tokens": len(generation.logprobs),
        "cached_tokens": generation.num_reused,
        "weight_version": str(client.version),
    }
    if parsed.return_routed_experts and client.experts is not None:
        about["routed_experts"] = encode_experts_int32(generation.routes, client.experts)
    text = client.policy.tokenizer.decode(generation.sampled_ids, skip_special_tokens=True)
    return {"text": text, "output_ids": generation.sampled_ids, "meta_info": about}


async def _sample_tokens(
    client: LocalClient, ids: list[int], sampling: Sampling, stop_ids: list[int], affinity: str
) -> GenerationState:
    _check(client, ids, sampling, stop_ids)
    most = max(client.window - len(ids), 1)
    return await client.sample(
        ids, msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most)), affinity
    )


async def _prompt_logprobs(client: LocalClient, ids: list[int]) -> list[float]:
    _check(client, ids, Sampling(1, 1.0, 1.0), [])
    return await client.logprobs(ids) if len(ids) > 1 else []


def _check(client: LocalClient, ids: list[int], sampling: Sampling, stop_ids: list[int]) -> None:
    vocabulary = client.policy.config.vocab_size
    outside = next((id for id in ids if not 0 <= id < vocabulary), None)
    if outside is not None:
        raise RequestRefusedError(
            f"token id {outside} is out of vocabulary: this model has {vocabulary} tokens"
        )
    if not ids:
        raise RequestRefusedError("the prompt is empty: give at least one id")
    if sampling.max_tokens < 1:
        raise RequestRefusedError(f"max_tokens is {sampling.max_tokens}: give at least 1")
    if not (sampling.temperature or 0) >= 0 or not 0 < (sampling.top_p or 0) <= 1:
        raise RequestRefusedError(
            f"temperature={sampling.temperature} must be at least 0, top_p={sampling.top_p} above "
            "0 and at most 1"
        )
    ends = client.policy.renderer.stop_ids
    if set(stop_ids) - set(ends):
        raise RequestRefusedError(
            f"stop_token_ids={stop_ids} is not supported: this engine ends replies only at "
            f"{list(ends)}"
        )


def _stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or []))
