"""Show the prompt that a run would send to a model, without sending it.

    RLM.prompt(context, query) ──> a run over a pool that sends nothing ──> FirstRequestPreview

A preview is a real run up to its first request: the context is encoded, the facts are gathered, and
the request is built. The client pool keeps that request instead of sending it, so a preview cannot
differ from the prompt of a run. To reach the prompt of a child call, the pool answers the calls
above it with code that calls ``rlm_query``. The text of prompts is in ``prompt_text.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.clients.base import Client, OnPiece, Price, Request, RequestBudgetReservation, Tool
from ramify.clients.model_config import Model
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.engine.event_recorder import EventRecorder
from ramify.engine.question import Question
from ramify.engine.resources import RefCountedLoopResources, RlmSetup, new_run_id
from ramify.engine.run_handle import RunHandle
from ramify.errors import ConfigError, ModelError
from ramify.types.message import Message, Reply, Usage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNUSED_KEY = "no-key-is-needed-for-a-preview"


class FirstRequestPreview(msgspec.Struct, frozen=True):
    """The first request of a call, exactly as a run would send it.

    Example:
        preview = rlm.prompt(text, "Which host failed?")
        print(preview, preview.estimated_tokens)
    """

    model: str
    """Name of the model in the form ``provider:model``."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    """Native tools that the request offers to the model."""
    is_direct: bool = False
    """True if one plain call answers the question, without a session."""
    window: int = 0
    """Context window of the model (tokens)."""
    max_reply_tokens: int = 0
    """Maximum tokens of the reply, hidden reasoning included."""
    price: Price | None = None

    @property
    def chars(self) -> int:
        return sum(len(message.content) for message in self.messages)

    @property
    def estimated_tokens(self) -> int:
        """Estimated number of tokens in the prompt, assuming four bytes per token.

        This is typical of English text.
        """
        return (
            sum(len(message.content.encode("utf-8", "replace")) for message in self.messages) // 4
        )

    def text(self) -> str:
        """Return the messages and the tools as one text with a heading for each."""
        parts = [f"[{message.role}]\n{message.content}" for message in self.messages]
        parts += [f"[tool]\n{json.dumps(msgspec.to_builtins(tool))}" for tool in self.tools]
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.text()

    def rendered(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the prompt as text, rendered with the tokenizer's chat template."""
        tools: Any = [
            {"type": "function", "function": msgspec.to_builtins(tool)} for tool in self.tools
        ]
        messages = [{"role": each.role, "content": each.content} for each in self.messages]
        text = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the token ids of the prompt, rendered with the tokenizer's chat template."""
        ids = tokenizer(self.rendered(tokenizer), add_special_tokens=False)["input_ids"]
        return list(ids)

    def cost(self, input_tokens: int, output_tokens: int) -> float | None:
        """Return the dollar cost of a request with these token counts, or None if the price is
        unknown."""
        return None if self.price is None else self.price.of(Usage(input_tokens, output_tokens))


class _PreviewEnd(ModelError):
    """Raised to end the preview's run once the requested prompt has been built."""


class _PreviewPool(RateLimitedClientPool):
    """A client pool that captures a call's first request instead of sending it.

    It keeps the first request of a call at a given depth.
    """

    def __init__(self, max_in_flight: int, depth: int, reply_above: Reply) -> None:
        """Create a pool that captures the first request of a call at ``depth``.

        Calls at a smaller depth, such as the root call, receive ``reply_above`` as the model's
        reply.
        """
        super().__init__(max_in_flight=max_in_flight)
        self._depth = depth
        self._reply_above = reply_above
        self.kept: FirstRequestPreview | None = None

    def client_for_model(self, model: Model) -> Client:
        try:
            return super().client_for_model(model)
        except ConfigError:
            # A missing key does not matter, since nothing is sent. Any other error occurs again
            # below and is reported there.
            return super().client_for_model(model.with_key(_UNUSED_KEY))

    async def ask(
        self,
        client: Client,
        request: Request,
        account: RequestBudgetReservation,
        on_retry: Callable[[str], None] | None = None,
        patience_s: float = 0.0,
        *,
        on_send: Callable[[], None] | None = None,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        call: Any = getattr(account, "call")  # noqa: B009 -- the engine's account of one turn
        if self.kept is None and call.depth < self._depth:
            assert on_send is not None
            on_send()  # the journal must show a request before its reply
            return self._reply_above
        if self.kept is None:
            self.kept = FirstRequestPreview(
                client.name,
                request.messages,
                request.tools,
                call.kind == "lm",
                client.window,
                request.sampling.max_tokens,
                client.price,
            )
        raise _PreviewEnd("the request was kept, not sent")


async def preview(setup: RlmSetup, question: Question, depth: int) -> FirstRequestPreview:
    """Return the first request that a call at ``depth`` would send.

    Raises ConfigError if no call can have this depth, and for every setting that a run would
    reject.
    """
    most = setup.limits.max_depth
    if not 0 <= depth <= most:
        raise ConfigError(f"depth {depth} has no calls: max_depth is {most}")
    if depth:
        question = msgspec.structs.replace(question, direct=False)
    setup = msgspec.structs.replace(setup, blobs=None)
    reply = setup.scaffold.code_reply(f"rlm_query({question.text!r})")
    pools: list[_PreviewPool] = []

    def make_pool(max_in_flight: int) -> RateLimitedClientPool:
        pools.append(_PreviewPool(max_in_flight, depth, reply))
        return pools[-1]

    shared = RefCountedLoopResources(setup.limits.max_concurrency, setup.sandbox, make_pool)
    result = await RunHandle(setup, question, shared, EventRecorder(new_run_id(), None, ()))
    kept = pools[0].kept
    if kept is None:
        raise ConfigError(f"no prompt was made at depth {depth}: {result.error or result.stop}")
    return kept
