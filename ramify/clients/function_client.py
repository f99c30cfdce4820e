"""Use a Python function as a model, such as an expert program that demonstrates a task.

    FunctionClient(lambda messages: "FINAL(42)", "expert:function")

Text is estimated at one token for every four characters, rounded up. This is simple, the same on
every machine, and never more than the bytes that a budget reserves. This module also cuts replies
at their token limit. Scripted models for tests are in ``ramify/testing``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ramify.clients.base import ASSUMED_WINDOW, Price, Request
from ramify.errors import ConfigError, RamifyError
from ramify.types.message import Message, Reply, Usage

ModelFunction = Callable[[Sequence[Message]], str | Message | Awaitable[str | Message]]
"""Function from the messages of a request to the model's reply. The reply may contain tool
calls."""


class FunctionClient:
    """A model whose replies come from a Python function.

    The function is called with the messages of each request. Implements ``Client``.
    """

    price: Price | None = None

    def __init__(self, reply: ModelFunction, name: str) -> None:
        """Create a model from the function ``reply``.

        ``name`` is the model's name in records and errors.
        """
        self.name = name
        self.window = ASSUMED_WINDOW
        self._reply = reply

    async def complete(self, request: Request) -> Reply:
        started = time.perf_counter()
        try:
            given = self._reply(request.messages)
            reply = given if isinstance(given, str | Message) else await given
        except RamifyError:
            raise
        except Exception as error:
            # The function is the caller's own code: another attempt would meet the same fault.
            raise ConfigError(
                f"{self.name} raised {error!r:.200}: fix the function that returns the replies"
            ) from error
        whole = reply_with_token_counts(reply, request.messages, request.sampling.max_tokens)
        model = self.name.partition(":")[2]
        return msgspec.structs.replace(whole, model=model, seconds=time.perf_counter() - started)

    async def close(self) -> None:
        """Do nothing, because a function has no connection to close."""


def count(text: str | None) -> int:
    """Estimate the number of tokens in ``text`` without a tokenizer, at four characters each.

    The number is rounded up.
    """
    return (len(text) + 3) // 4 if text else 0


def estimate_message_tokens(message: Message) -> int:
    """Estimate the number of tokens in a message for a model without a tokenizer.

    These are the tokens of its text and its tool calls, and one token for each 32 × 32 pixels of
    its pictures.
    """
    calls = sum(count(call.name) + count(call.arguments) for call in message.tool_calls)
    cells = sum((-(-p.width // 32)) * (-(-p.height // 32)) for p in message.pictures)
    return count(message.content) + count(message.reasoning) + calls + cells


def reply_with_token_counts(
    step: str | Message | Reply, messages: tuple[Message, ...], max_tokens: int
) -> Reply:
    """Convert what a model function returned to a complete reply that includes token counts.

    The text is cut at ``max_tokens``, and the tokens of the prompt and the reply are counted.
    """
    if isinstance(step, Reply) and step.usage.calls:
        return step
    reply = (
        step
        if isinstance(step, Reply)
        else Reply(step if isinstance(step, Message) else Message("assistant", step))
    )
    message, finish = reply.message, reply.finish
    room = max_tokens - count(message.reasoning)
    if count(message.content) > room:
        message, finish = (
            msgspec.structs.replace(message, content=message.content[: 4 * max(room, 0)]),
            "length",
        )
    elif message.tool_calls and finish == "stop":
        finish = "tool_calls"
    usage = Usage(
        input_tokens=sum(map(estimate_message_tokens, messages)),
        output_tokens=estimate_message_tokens(message),
        reasoning_tokens=count(message.reasoning),
        calls=1,
    )
    return msgspec.structs.replace(reply, message=message, finish=finish, usage=usage)
