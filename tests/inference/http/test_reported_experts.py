"""Experts that engines over HTTP report, in the form of each version of vLLM and SGLang.

The doubles answer with payloads in the forms that those programs document. None of them runs here.
The last test compares what `ramify serve-policy` reports in both forms with the engine itself.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from transformers import Qwen3MoeConfig

from ramify.clients.base import Sampling
from ramify.errors import ConfigError, MalformedResponse
from ramify.inference.http.http_engines import HttpEngineClient
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy, from_config
from ramify.serve.policy_server import PolicyServer
from ramify.types.message import Message
from tests.inference.helpers import ENGINE_KEY
from tests.inference.http.engine_world import request
from tests.models.templates import tokenizer_of

LAYERS, EXPERT_LAYERS, TOP_K, EXPERTS = 3, (1, 2), 2, 8
REPLY = (65, 66, 67, 3)


def mixture(**changes: Any) -> Policy:
    """A mixture whose first of three layers has no experts."""
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "mlp_only_layers": [0],
        "max_position_embeddings": 256,
        "eos_token_id": 3,
        "initializer_range": 0.3,
        **changes,
    }
    return from_config(Qwen3MoeConfig(**sizes), tokenizer_of("tiny"), 0)


def table(num: int) -> np.ndarray[Any, Any]:
    """[num, layers, top-k] different ids for each position; zeros where a layer has no experts."""
    rows = np.zeros((num, LAYERS, TOP_K), np.int32)
    for position in range(num):
        for layer in EXPERT_LAYERS:
            first = (position + layer) % EXPERTS
            rows[position, layer] = first, (first + 1 + position % 3) % EXPERTS
    return rows


def npy(rows: np.ndarray[Any, Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()


def flat(rows: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(rows.tobytes()).decode()


Form = Callable[[np.ndarray[Any, Any], int], dict[str, Any]]
"""(rows of all positions, length of the prompt) -> fields of the answer."""
VLLM: dict[str, Form] = {
    "whole prompt": lambda rows, num: {"routed_experts": npy(rows[:-1].astype(np.uint8))},
    "from the last token": lambda rows, num: {
        "routed_experts": npy(rows[num - 1 : -1].astype(np.uint16))
    },
    "only layers with experts": lambda rows, num: {
        "routed_experts": npy(rows[:-1, list(EXPERT_LAYERS)])
    },
    "lists, prompt apart (0.21)": lambda rows, num: {
        "prompt_routed_experts": rows[:num].tolist(),
        "routed_experts": rows[num:].tolist(),
    },
    "lists of all": lambda rows, num: {"routed_experts": rows[:-1].tolist()},
}
SGLANG: dict[str, Form] = {
    "whole prompt": lambda rows, num: {"routed_experts": flat(rows[:-1])},
    "from the last token": lambda rows, num: {"routed_experts": flat(rows[num - 1 : -1])},
}
FORMS = [("vllm", name, form) for name, form in VLLM.items()]
FORMS += [("sglang", name, form) for name, form in SGLANG.items()]


class Double:
    """The routes of vLLM and SGLang that a client needs, with experts in one form. A reply is
    always ``REPLY``, as far as it may be that long."""

    def __init__(self, form: Form, end: str = "stop") -> None:
        self.form, self.end = form, end
        self.asked: list[dict[str, Any]] = []
        self.parts: list[tuple[str, Form]] = []
        """(end, form) of the next answers."""

    async def answer(self, http: web.Request) -> web.Response:
        paths = ["pause", "resume", "init_weight_transfer_engine", "start_weight_update"]
        paths += ["update_weights", "finish_weight_update", "reset_prefix_cache", "v1/completions"]
        about: dict[str, Any] = {
            "version": "0.33.0" if http.path == "/version" else "0.5.23",
            "vocab_size": 320,
        }
        if http.path == "/openapi.json":
            return web.json_response({"paths": {f"/{path}": {} for path in paths}})
        if http.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 256}]})
        if http.method == "GET":
            return web.json_response(about)
        body = await http.json() if http.can_read_body else {}
        if http.path not in ("/v1/completions", "/generate"):
            return web.json_response({})
        if self.parts:
            self.end, self.form = self.parts.pop(0)
        ids: list[int] = body["prompt"] if "prompt" in body else body["input_ids"]
        if max(ids) >= 320:
            return web.json_response({"error": "out of vocabulary"}, status=400)
        self.asked.append(body)
        params = body.get("sampling_params", body)
        reply = REPLY[: params.get("max_tokens", params.get("max_new_tokens"))]
        fields = self.form(table(len(ids) + len(reply)), len(ids))
        if http.path == "/generate":
            logprobs = [[-0.5, id, None] for id in reply]
            end = {"type": self.end}
            about = {"output_token_logprobs": logprobs, "finish_reason": end, **fields}
            return web.json_response({"meta_info": about})
        choice: dict[str, Any] = {"token_ids": reply, "finish_reason": self.end}
        choice |= {"logprobs": {"token_logprobs": [-0.5] * len(reply)}}
        prompt = fields.pop("prompt_routed_experts", None)
        return web.json_response(
            {"choices": [{**choice, **fields}], "prompt_routed_experts": prompt}
        )


@asynccontextmanager
async def engines(engine: str, double: Double, **options: Any) -> AsyncIterator[HttpEngineClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", double.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    spec = InferenceSpec(engine=engine, urls=(url,), report_experts=True, restarts=0, **options)
    made = HttpEngineClient(mixture(), spec, name="engines")
    try:
        await made.start(Path("unused"), lambda _: None)
        yield made
    finally:
        await made.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("engine", "form"),
    [(engine, form) for engine, _, form in FORMS],
    ids=[f"{engine}: {name}" for engine, name, _ in FORMS],
)
def test_reply_has_the_experts_that_predict_each_token(engine: str, form: Form) -> None:
    async def test() -> None:
        double = Double(form)
        async with engines(engine, double) as made:
            reply = await made.complete(request())
        assert reply.token_ids == REPLY
        assert reply.prompt_ids is not None
        first = len(reply.prompt_ids) - 1
        wanted = table(first + 5)[first : first + 4, list(EXPERT_LAYERS)].reshape(4, -1)
        assert reply.routes == tuple(map(tuple, wanted.tolist()))
        body = double.asked[-1]
        if engine == "sglang":
            assert body["return_routed_experts"] is True
        start = {"vllm": "routed_experts_prompt_start", "sglang": "routed_experts_start_len"}
        assert body[start[engine]] == first

    asyncio.run(test())


def changed(rows: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
    """Give the experts of the last row an impossible value."""
    rows = rows[:-1].copy()
    rows[-1, 2] = value
    return rows


BAD: dict[str, tuple[str, Form, str]] = {
    "none": (
        "vllm",
        lambda rows, num: {},
        "no routed_experts in the answer: start the engine with",
    ),
    "none of sglang": ("sglang", lambda rows, num: {}, "start the engine with --enable-return-r"),
    "a row less": (
        "vllm",
        lambda rows, num: {"routed_experts": npy(rows[:-2])},
        "has 3 rows for 4 tokens of the prompt and 1 of the reply: it needs 1 or 4",
    ),
    "twice the rows": (
        "sglang",
        lambda rows, num: {"routed_experts": flat(np.concatenate([rows, rows]))},
        "has 10 rows for 4 tokens of the prompt and 1 of the reply: it needs 1 or 4",
    ),
    "truncated file": (
        "vllm",
        lambda rows, num: {"routed_experts": npy(rows[:-1])[:-8]},
        "routed_experts cannot be read: ",
    ),
    "truncated numbers": (
        "sglang",
        lambda rows, num: {"routed_experts": flat(rows[:-1])[:-8]},
        "routed_experts cannot be read: buffer size must be a multiple",
    ),
    "not base64": ("vllm", lambda rows, num: {"routed_experts": "é!"}, "cannot be read: "),
    "another top-k": (
        "vllm",
        lambda rows, num: {"routed_experts": npy(np.tile(rows[:-1], 2))},
        r"has shape \[4, 3, 4\] of int32, .* \[tokens, 2 or 3, 2\]: the engine serves another",
    ),
    "other layers": ("vllm", lambda rows, num: {"routed_experts": npy(rows[:-1, :1])}, "another m"),
    "not numbers": ("vllm", lambda rows, num: {"routed_experts": [[["a"]]]}, "of <U1, and this"),
    "ragged": ("vllm", lambda rows, num: {"routed_experts": [[[1, 2]], [[1]]]}, "cannot be read"),
    "a float": ("vllm", lambda rows, num: {"routed_experts": npy(rows * 0.5)}, "of float64"),
    "out of range": (
        "vllm",
        lambda rows, num: {"routed_experts": npy(changed(rows, 9))},
        "has expert 9 for sampled token 0 in layer 1, and the model has 8",
    ),
    "never filled": (
        "sglang",
        lambda rows, num: {"routed_experts": flat(changed(rows, 0))},
        "expert 0 twice for sampled token 0 in layer 1: the engine did not record its choice",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_experts_are_refused_before_the_first_rollout(name: str) -> None:
    engine, form, says = BAD[name]

    async def test() -> None:
        with pytest.raises(ConfigError, match=rf"^http://127.0.0.1:\d+: .*{says}") as refused:
            async with engines(engine, Double(form)):
                pass
        assert "\n" not in str(refused.value)

    asyncio.run(test())


def test_experts_that_become_wrong_end_the_reply() -> None:
    async def test() -> None:
        double = Double(VLLM["whole prompt"])
        async with engines("vllm", double) as made:
            double.form = lambda rows, num: {"routed_experts": npy(rows[1:-1])}
            with pytest.raises(
                MalformedResponse, match=r"^http://\S+: routed_experts has \d+ rows for"
            ):
                await made.complete(request())

    asyncio.run(test())


def test_trainer_chooses_for_a_part_that_a_pause_ended_without_experts() -> None:
    async def test() -> None:
        double = Double(SGLANG["whole prompt"])
        async with engines("sglang", double) as made:
            double.parts = [("abort", lambda rows, num: {}), ("stop", SGLANG["whole prompt"])]
            reply = await made.complete(request(7, 12))
        assert reply.token_ids == REPLY * 2
        assert reply.routes is not None
        assert reply.routes[:4] == ((),) * 4
        assert all(len(each) == len(EXPERT_LAYERS) * TOP_K for each in reply.routes[4:])

    asyncio.run(test())


def test_model_without_experts_is_refused() -> None:
    from tests.inference.helpers import policy

    spec = InferenceSpec(urls=("http://127.0.0.1:1",), report_experts=True)
    with pytest.raises(
        ConfigError,
        match="engines is not a mixture-of-experts model, so it has no experts to report",
    ):
        HttpEngineClient(policy(), spec, name="engines")


@pytest.mark.parametrize("engine", ["ramify", "vllm", "sglang"])
def test_serve_policy_reports_the_experts_of_its_engine(engine: str) -> None:
    async def test() -> None:
        local, embedded = LocalClient(mixture(), slots=4), LocalClient(mixture(), slots=4)
        local.report_routes()
        embedded.report_routes()
        message = Message("user", "which experts?")
        async with PolicyServer(local, name="m", key=ENGINE_KEY, weight_transfer=True) as server:
            spec = InferenceSpec(
                engine=engine,
                urls=(server.url.removesuffix("/v1"),),
                report_experts=True,
                weight_sync="file" if engine == "sglang" else "",
            )
            made = HttpEngineClient(mixture(), spec, name="engines")
            await made.start(Path("unused"), lambda _: None)
            greedy = Sampling(12, 0.0, seed=1, logprobs=True)
            asked = request(7, 12, message)
            asked = type(asked)(asked.messages, greedy, affinity="0")
            ours, theirs = await made.complete(asked), await embedded.complete(asked)
            await made.close()
        assert ours.token_ids == theirs.token_ids
        assert theirs.routes is not None
        assert ours.routes == theirs.routes
        await local.close()
        await embedded.close()

    asyncio.run(test())
