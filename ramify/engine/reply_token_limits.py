"""Compute the maximum length of a model's reply.

It is the smallest of the limits set by the run, the model and the depth, plus the tokens that the
model may use for hidden reasoning.

    limits.max_reply_tokens, sampling.max_tokens of the model, max_reply_tokens of the depth
        ──> text_limit = the smallest        + reasoning_token_allowance of a model that reasons

The budget from which this length is reserved is kept in ``limits.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from ramify.clients.base import Client, Sampling, is_reasoning_model

if TYPE_CHECKING:
    from ramify.engine.limits import BudgetAmount
    from ramify.engine.resources import ModelsByDepth, RlmSetup

_REASONING_TOKENS = 16_384
"""Default limit on hidden reasoning tokens in one reply of a reasoning model."""


class ReplyTokenLimits:
    """The sampling options and maximum reply lengths for all models of a run."""

    def __init__(self, setup: RlmSetup, models: ModelsByDepth, limit: BudgetAmount) -> None:
        """Create the token limits of a run, and derive its sampling options from its settings.

        ``limit`` is the run's budget, which caps the tokens for hidden reasoning.
        """
        self.sampling = msgspec.structs.replace(
            setup.sampling,
            max_tokens=min(setup.sampling.max_tokens, setup.limits.max_reply_tokens),
            stop=tuple(dict.fromkeys([*setup.sampling.stop, *setup.scaffold.stop])),
        )
        """Sampling options of the run."""
        self._setup = setup
        self._models = models
        self._limit = limit
        self._of_client: dict[int, Sampling] = {}
        """Id of a client -> sampling options for its replies."""
        self._text_limits: dict[tuple[int, int, bool], tuple[int, str]] = {}
        """Cached results of ``visible_reply_token_limit``."""
        self._reasoning: dict[str, int] = {}
        """Model -> maximum tokens of hidden reasoning in one reply."""

    def sampling_of(self, client: Client) -> Sampling:
        """Return the sampling options for replies of the model behind ``client``."""
        found = self._of_client.get(id(client))
        if found is None:
            found = self._models.merged_sampling(client, self.sampling)
            self._of_client[id(client)] = found
        return found

    def visible_reply_token_limit(
        self, client: Client, depth: int, is_plain: bool
    ) -> tuple[int, str]:
        """Return the maximum number of tokens in a reply, not counting hidden reasoning.

        The second value names the setting that determines this maximum. ``depth`` is the depth of
        the call in the tree. ``is_plain`` is True for an ``llm_query`` call from a session.
        """
        place = id(client), depth, is_plain
        found = self._text_limits.get(place)
        if found is None:
            found = self._text_limits[place] = self._find_text_limit(client, depth, is_plain)
        return found

    def reply_limits(self, client: Client, depth: int, is_plain: bool) -> tuple[int, int]:
        """Return the token limits for the visible text and for the hidden reasoning of a reply."""
        return self.visible_reply_token_limit(client, depth, is_plain)[
            0
        ], self.reasoning_token_allowance(client)

    def reasoning_token_allowance(self, client: Client) -> int:
        """Return the maximum number of hidden reasoning tokens in a reply of the model of
        ``client``."""
        if client.name not in self._reasoning:
            self._reasoning[client.name] = self._estimated_reasoning(client)
        return self._reasoning[client.name]

    def _find_text_limit(self, client: Client, depth: int, is_plain: bool) -> tuple[int, str]:
        setup = self._setup
        limit, name = self.sampling.max_tokens, "max_reply_tokens"
        for_subs = setup.limits.max_sub_reply_tokens
        if for_subs is not None and is_plain:
            limit, name = for_subs, "max_sub_reply_tokens"
        of_model = self.sampling_of(client).max_tokens
        if of_model < min(limit, self.sampling.max_tokens):
            limit, name = of_model, f"sampling.max_tokens of {client.name}"
        of_depth = setup.options_at_depth(depth).max_reply_tokens
        if of_depth is not None and of_depth < limit:
            limit, name = of_depth, f"max_reply_tokens of depth {depth}"
        return limit, name

    def _estimated_reasoning(self, client: Client) -> int:
        given = self._setup.limits.max_reasoning_tokens
        if given is not None:
            return given
        thinking = self.sampling_of(client).extra.get("thinking")
        if isinstance(thinking, dict) and isinstance(thinking.get("budget_tokens"), int):
            return int(thinking["budget_tokens"])  # Anthropic's form
        if not is_reasoning_model(client.name):
            return 0
        # A small window or budget must still have room for several replies.
        most = [_REASONING_TOKENS, client.window // 4 - self.sampling.max_tokens]
        most.append(self._limit.tokens // 10)
        if client.price is not None and client.price.output and math.isfinite(self._limit.cost):
            most.append(int(self._limit.cost / 10 * 1e6 / client.price.output))
        return max(0, min(most))
