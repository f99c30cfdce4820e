"""Ids in, ids out: ``POST /v1/completions`` as vLLM has it with ``return_token_ids``, and ``POST
/generate`` as SGLang has it.

    {"prompt": [5, 9], "max_tokens": 4, "logprobs": 0, "return_token_ids": true}
        -> {"choices": [{"token_ids": […], "logprobs": {"token_logprobs": […]}, "finish_reason": "length", …}], …}

Prompts are ids, or one text. ``prompt_logprobs`` scores the prompt. What this engine says besides
vLLM's fields: ``versions`` (which version sampled which tokens) and ``kept`` (what top-p and top-k
left); what it may be told: ``prompt_cache_key``, the same for requests that share a beginning. What
would change the answer and is not understood is refused by name.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ramify.clients.base import Sampling
from ramify.errors import Refused
from ramify.inference.local.generation import Generation
from ramify.inference.local.local_client import LocalClient

_NOT_HERE = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": None,
    "stream": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": None,
    "min_tokens": 0,
    "ignore_eos": False,
}
"""Field -> the value at which it changes nothing."""
_NOT_IN_GENERATE = {"text": None, "stream": False, "top_logprobs_num": 0}


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


async def complete(client: LocalClient, body: bytes, model: str) -> dict[str, Any]:
    """vLLM's answer. Raises Refused."""
    asked: _PromptBody = _read(body, _PromptBody, _NOT_HERE)
    tokenizer = client.policy.tokenizer
    ids = asked.prompt if isinstance(asked.prompt, list) else list(tokenizer.encode(asked.prompt))
    scores = await _scores(client, ids) if asked.prompt_logprobs is not None else None
    sampling = Sampling(
        asked.max_tokens,
        asked.temperature,
        asked.top_p,
        stop=_texts(asked.stop),
        seed=asked.seed,
        top_k=max(asked.top_k, 0),
    )
    done = await _sampled(client, ids, sampling, asked.stop_token_ids, asked.prompt_cache_key)
    choice: dict[str, Any] = {
        "index": 0,
        "text": tokenizer.decode(done.sampled, skip_special_tokens=True),
        "finish_reason": done.end,
        "versions": [[span.start, span.end, span.version] for span in done.versions],
    }
    if asked.logprobs is not None:
        choice["logprobs"] = {"token_logprobs": done.logprobs}
    if asked.return_token_ids:
        choice |= {"token_ids": done.sampled, "prompt_token_ids": ids, "kept": done.kept}
    if scores is not None:
        told = ({str(id): {"logprob": score}} for id, score in zip(ids[1:], scores, strict=True))
        choice["prompt_logprobs"] = [None, *told]
    usage = {
        "prompt_tokens": len(ids),
        "completion_tokens": len(done.logprobs),
        "total_tokens": len(ids) + len(done.logprobs),
        "prompt_tokens_details": {"cached_tokens": done.num_reused},
    }
    return {
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


async def generate(client: LocalClient, body: bytes) -> dict[str, Any]:
    """SGLang's answer. Raises Refused."""
    asked: _Generate = _read(body, _Generate, _NOT_IN_GENERATE)
    given, ids = asked.sampling_params, asked.input_ids
    about: dict[str, Any] = {}
    if asked.return_logprob and asked.logprob_start_len == 0:
        scores = await _scores(client, ids)
        told = ([score, id, None] for id, score in zip(ids[1:], scores, strict=True))
        about["input_token_logprobs"] = [[None, ids[0], None], *told]
    sampling = Sampling(
        given.max_new_tokens,
        given.temperature,
        given.top_p,
        stop=_texts(given.stop),
        seed=given.sampling_seed,
        top_k=max(given.top_k, 0),
    )
    done = await _sampled(client, ids, sampling, given.stop_token_ids or [], "")
    if asked.return_logprob:
        about["output_token_logprobs"] = [
            [at, id, None] for id, at in zip(done.sampled, done.logprobs, strict=True)
        ]
    about |= {
        "finish_reason": {"type": done.end},
        "prompt_tokens": len(ids),
        "completion_tokens": len(done.logprobs),
        "cached_tokens": done.num_reused,
        "weight_version": str(client.version),
    }
    text = client.policy.tokenizer.decode(done.sampled, skip_special_tokens=True)
    return {"text": text, "output_ids": done.sampled, "meta_info": about}


def _read(body: bytes, kind: Any, harmless: dict[str, Any]) -> Any:
    try:
        asked, fields = (
            msgspec.json.decode(body, type=kind),
            msgspec.json.decode(body, type=dict[str, Any]),
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a request for a completion: {error}") from None
    for name, value in harmless.items():
        if fields.get(name) not in (None, value):
            raise Refused(f"{name}={fields[name]!r} is not supported: leave it out")
    return asked


async def _sampled(
    client: LocalClient, ids: list[int], sampling: Sampling, stop_ids: list[int], affinity: str
) -> Generation:
    _check(client, ids, sampling, stop_ids)
    most = max(client.window - len(ids), 1)
    return await client.sample(
        ids, msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most)), affinity
    )


async def _scores(client: LocalClient, ids: list[int]) -> list[float]:
    _check(client, ids, Sampling(1, 1.0, 1.0), [])
    return await client.logprobs(ids) if len(ids) > 1 else []


def _check(client: LocalClient, ids: list[int], sampling: Sampling, stop_ids: list[int]) -> None:
    vocabulary = client.policy.config.vocab_size
    outside = next((id for id in ids if not 0 <= id < vocabulary), None)
    if outside is not None:
        raise Refused(f"token id {outside} is out of vocabulary: this model has {vocabulary}")
    if not ids:
        raise Refused("the prompt is empty: give at least one id")
    if sampling.max_tokens < 1:
        raise Refused(f"max_tokens is {sampling.max_tokens}: give at least 1")
    if not (sampling.temperature or 0) >= 0 or not 0 < (sampling.top_p or 0) <= 1:
        raise Refused(
            f"temperature={sampling.temperature} must be at least 0, top_p={sampling.top_p} above "
            "0 and at most 1"
        )
    ends = client.policy.renderer.stop_ids
    if set(stop_ids) - set(ends):
        raise Refused(
            f"stop_token_ids={stop_ids}: this engine ends replies at {list(ends)}, and at no other "
            "ids"
        )


def _texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return tuple(filter(None, [stop] if isinstance(stop, str) else stop or []))
