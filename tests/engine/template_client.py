"""A scripted model with a real chat template: it returns exact ids, of which those that it sampled
are not the ones that the tokenizer would give to their text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ramify.clients.base import Request
from ramify.models.chat_renderer import make_prompt_renderer, prompt_ids, renderer_of
from ramify.types.message import Message, Reply, Usage, VersionSpan
from tests.models.templates import tokenizer_of

_ENDS = {"counting": "</s>"}
"""Template -> the token that ends a reply, unless it is that of ChatML."""


class TemplateClient:
    """Replies with the texts of ``script(messages)``. ``log`` has the ids of each reply as the
    engine knows them: (of the prompt, sampled)."""

    window = 100_000
    price = None

    def __init__(
        self,
        script: Callable[[Sequence[Message]], str],
        template: str = "qwen3",
        *,
        is_canonical: bool = False,
    ) -> None:
        """With ``is_canonical``, it samples the ids that the tokenizer would give."""
        self.name = f"scripted:{template}"
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._script = script
        self._is_canonical = is_canonical
        self._tokenizer = tokenizer_of(template)
        end = self._tokenizer.convert_tokens_to_ids(_ENDS.get(template, "<|im_end|>"))
        self._renderer = renderer_of(self._tokenizer, stop_ids=[end])
        self.rendering = make_prompt_renderer(self._renderer, self._tokenizer)

    def sampled(self, text: str) -> tuple[int, ...]:
        """Ids of a reply: one for each letter, and its end."""
        parts = [text] if self._is_canonical else text
        encoded = (self._tokenizer.encode(part, add_special_tokens=False) for part in parts)
        return (*(id for ids in encoded for id in ids), self._renderer.stop_ids[0])

    async def complete(self, request: Request) -> Reply:
        prompt = tuple(prompt_ids(self._renderer, request))
        sampled = self.sampled(self._script(request.messages))
        self.log.append((prompt, sampled))
        message = self._renderer.parse(sampled)
        return Reply(
            message,
            Usage(len(prompt), len(sampled), calls=1),
            finish="tool_calls" if message.tool_calls else "stop",
            prompt_ids=prompt,
            token_ids=sampled,
            logprobs=tuple(-0.001 * id for id in sampled),
            versions=(VersionSpan(0, len(sampled), len(self.log)),),
        )

    async def close(self) -> None:
        pass
