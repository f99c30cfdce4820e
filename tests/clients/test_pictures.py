"""Pictures on the wire: the format of each API, against servers on loopback, and the tokens that the
providers' rules give for their own examples."""

import base64
import io

import msgspec
import pytest
from PIL import Image

from ramify.clients.base import Request, Sampling
from ramify.clients.picture_token_costs import can_read_pictures, picture_tokens_upper_bound
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import RequestRefusedError
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message
from ramify.types.picture import Picture, picture_from_bytes
from tests.clients.helpers import Books, Says, run

FILE = io.BytesIO()
Image.new("RGB", (8, 6), "red").save(FILE, "JPEG")
DATA = FILE.getvalue()
PICTURE = picture_from_bytes(DATA, "red.jpg")
BASE64 = base64.b64encode(DATA).decode()
URL = f"data:image/jpeg;base64,{BASE64}"


def read(digest):
    if digest != PICTURE.digest:
        raise RequestRefusedError("a picture is no longer available")
    return DATA


def asking(*messages, **options):
    return Request(messages, Sampling(max_tokens=64), read_picture=read, **options)


SHOWN = asking(
    Message("system", "be brief"), Message("user", "what is this?", pictures=(PICTURE, PICTURE))
)


def sent(name, key, body, root_suffix=""):
    """The body that a client sends for ``SHOWN`` to a server that answers ``body``."""

    async def main():
        async with Says(lambda _: (200, msgspec.json.encode(body), {})) as server:
            url = f"{server.root}{root_suffix}"
            pool = RateLimitedClientPool(
                max_attempts=1, keys={key: "key-0123456789"}, base_urls={key: url}
            )
            await pool.ask(pool.client(name), SHOWN, Books())
            await pool.close()
            return msgspec.json.decode(server.asked[0].body)

    return run(main())


def test_chat_completions_get_data_urls_before_the_text():
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    choice = {"message": {"content": "red"}, "finish_reason": "stop"}
    fields = sent("openai:gpt-4o", "openai", {"choices": [choice], "usage": usage}, "/v1")
    part = {"type": "image_url", "image_url": {"url": URL}}
    assert fields["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [part, part, {"type": "text", "text": "what is this?"}]},
    ]


def test_the_responses_api_gets_input_images():
    text = {"type": "message", "content": [{"type": "output_text", "text": "red"}]}
    usage = {"input_tokens": 9, "output_tokens": 1}
    body = {"status": "completed", "output": [text], "usage": usage}
    fields = sent("openai:gpt-4o", "openai", body, "/v1/responses")
    part = {"type": "input_image", "image_url": URL}
    assert fields["input"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [part, part, {"type": "input_text", "text": "what is this?"}]},
    ]


def test_claude_gets_image_blocks():
    usage = {"input_tokens": 9, "output_tokens": 1}
    text = [{"type": "text", "text": "red"}]
    body = {"content": text, "stop_reason": "end_turn", "usage": usage}
    fields = sent("anthropic:claude-sonnet-4-5", "anthropic", body)
    source = {"type": "base64", "media_type": "image/jpeg", "data": BASE64}
    part = {"type": "image", "source": source}
    assert fields["messages"] == [
        {"role": "user", "content": [part, part, {"type": "text", "text": "what is this?"}]}
    ]


@pytest.mark.filterwarnings("ignore")
def test_litellm_passes_pictures_on():
    pytest.importorskip("litellm", reason="the extra 'litellm' is not installed")

    async def main():
        async with ScriptedServer(lambda messages: f"{messages[-1].pictures}") as server:
            pool = RateLimitedClientPool(
                max_attempts=1,
                keys={"litellm": "key-0123456789"},
                base_urls={"litellm": server.url},
            )
            reply = await pool.ask(pool.client("litellm:openai/gpt-4o-mini"), SHOWN, Books())
            await pool.close()
            return reply.message.content

    assert run(main()).count(PICTURE.digest) == 2


def test_the_scripted_server_sees_pictures_and_refuses_a_wrong_format():
    async def main(picture):
        async with ScriptedServer(lambda messages: messages[-1].pictures[0].digest) as server:
            pool = RateLimitedClientPool(
                max_attempts=1, keys={"openai": "k"}, base_urls={"openai": server.url}
            )
            asked = asking(Message("user", "?", pictures=(picture,)))
            try:
                return (
                    await pool.ask(pool.client("openai:gpt-4o"), asked, Books())
                ).message.content
            finally:
                await pool.close()

    assert run(main(PICTURE)) == PICTURE.digest
    wrong = msgspec.structs.replace(PICTURE, kind="png")
    with pytest.raises(
        RequestRefusedError, match="a picture of type image/jpeg was sent as 'data:image/png'"
    ):
        run(main(wrong))


def test_a_picture_that_is_gone_is_an_error_that_costs_nothing():
    async def main():
        async with ScriptedServer(["never"]) as server:
            pool = RateLimitedClientPool(keys={"openai": "k"}, base_urls={"openai": server.url})
            lost = msgspec.structs.replace(PICTURE, digest="0" * 64)
            books = Books()
            with pytest.raises(RequestRefusedError, match="no longer available"):
                await pool.ask(
                    pool.client("openai:gpt-4o"),
                    asking(Message("user", "?", pictures=(lost,))),
                    books,
                )
            await pool.close()
            return books.kinds, server.answered

    assert run(main()) == (["release"], 0)


# Examples of the providers' own pages: model, width, height, tokens that they state.
PUBLISHED = [
    ("openai:gpt-4o", 1024, 1024, 85 + 4 * 170),
    ("openai:gpt-4o", 2048, 4096, 85 + 6 * 170),
    ("openai:gpt-4o", 4096, 8192, 85 + 6 * 170),
    ("openai:gpt-4.1-mini", 1024, 1024, 1024 * 1.62),
    ("openai:gpt-4.1-mini", 1800, 2400, 1452 * 1.62),
    ("openai:gpt-4o-mini", 512, 512, 2833 + 5667),
    ("openai:o1", 512, 512, 75 + 150),
    ("openai:gpt-5", 512, 512, 70 + 140),
    ("anthropic:claude-sonnet-4-5", 200, 200, 54),
    ("anthropic:claude-sonnet-4-5", 1000, 1000, 1334),
    ("anthropic:claude-3-5-haiku-latest", 1092, 1092, 1590),
    ("gemini:gemini-2.5-flash", 384, 384, 258),
    ("gemini:gemini-2.5-flash", 960, 540, 6 * 258),
    ("gemini:gemini-3-pro-preview", 2000, 2000, 1120),
    ("vllm:Qwen/Qwen2.5-VL-7B-Instruct", 2000, 1500, 3888),
    ("ollama:llama3.2-vision", 1120, 1120, 6404),
    ("vllm:OpenGVLab/InternVL3-8B", 4000, 3000, 13 * 256),
    ("vllm:mistralai/Pixtral-12B-2409", 1024, 1024, 4160),
]


@pytest.mark.parametrize(("model", "width", "height", "tokens"), PUBLISHED)
def test_the_bound_covers_what_the_provider_publishes(model, width, height, tokens):
    bound = picture_tokens_upper_bound(model, Picture("0" * 64, "png", width, height, 1))
    assert bound >= tokens
    assert can_read_pictures(model) is True


@pytest.mark.parametrize("example", [each for each in PUBLISHED if each[0].startswith("openai")])
def test_the_bound_of_openai_s_models_is_nearly_the_published_number(example):
    model, width, height, tokens = example
    bound = picture_tokens_upper_bound(model, Picture("0" * 64, "png", width, height, 1))
    # A picture of more patches than are counted is scaled down to a few fewer.
    assert tokens <= bound <= 1.06 * tokens + 2


@pytest.mark.parametrize(
    "model", ["openai:gpt-4o", "openai:gpt-4.1-mini", "anthropic:claude-opus-4"]
)
def test_the_bound_stays_near_the_price_that_is_published(model):
    tokens = picture_tokens_upper_bound(model, Picture("0" * 64, "png", 1024, 1024, 1))
    assert tokens < 2000


def test_the_fallback_bounds_models_that_no_rule_names():
    small, large = (Picture("0" * 64, "png", side, side, 1) for side in (10, 5600))
    assert picture_tokens_upper_bound("my:model", small) == 6500
    assert picture_tokens_upper_bound("my:model", large) == 200 * 200 + 16


@pytest.mark.parametrize(
    ("model", "sees"),
    [
        ("openai:gpt-5-mini", True),
        ("openai:gpt-4.1-nano", True),
        ("openai:o3", True),
        ("openai:o3-mini", False),
        ("openai:gpt-3.5-turbo", False),
        ("openrouter:anthropic/claude-sonnet-4.5", True),
        ("litellm:bedrock/anthropic.claude-3-haiku", True),
        ("groq:openai/gpt-oss-120b", False),
        ("deepseek:deepseek-chat", False),
        ("vllm:Qwen/Qwen3-VL-8B@http://127.0.0.1:8000/v1", True),
        ("vllm:Qwen/Qwen3-8B", False),
        ("vllm:meta-llama/Llama-3.3-70B-Instruct", False),
        ("vllm:meta-llama/Llama-4-Scout", True),
        ("ollama:gemma3:4b", True),
        ("ollama:gemma3:1b", False),
        ("my:model", None),
    ],
)
def test_what_is_known_of_a_model_by_its_name(model, sees):
    assert can_read_pictures(model) is sees
