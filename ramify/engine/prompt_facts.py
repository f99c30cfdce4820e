"""Collect the facts about a run that a call's prompt states.

They come from the run's settings, models and limits.

    RlmSetup, ModelsByDepth, limits, sandbox, tools, context ─> PromptFacts ─> prompt_text

This module decides how many characters the prompt says a model can read. They must fit the model's
window together with its longest reply. They must also fit half the run's budget, because the
engine reserves the most that a request can cost. The sentences of the prompt are in
``prompt_text.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from ramify.clients.base import Client
from ramify.engine.limits import BudgetAmount, max_request_amount
from ramify.engine.prompt_text import (
    CHARS_PER_TOKEN,
    BudgetFacts,
    ContextFacts,
    MountedPath,
    PromptFacts,
    PromptModelFacts,
    round_down_to_two_digits,
    user_instructions,
)
from ramify.engine.resources import ModelsByDepth, RlmSetup, RunModelDescription
from ramify.engine.tool_set import ToolSet
from ramify.errors import ConfigError
from ramify.sandbox.base import JailSpec, SandboxCapabilities, SandboxSpec

ReplyLimits = Callable[[Client, int, bool], tuple[int, int]]
"""Function that takes a model, a depth and True for a plain call. It returns the maximum reply
tokens and the additional tokens for hidden reasoning."""


def facts_of(
    setup: RlmSetup,
    models: ModelsByDepth,
    limit: BudgetAmount,
    reply_limits: ReplyLimits,
    caps: SandboxCapabilities,
    tools: ToolSet,
    context: ContextFacts,
    depth: int,
    *,
    has_pictures: bool = False,
) -> PromptFacts:
    """Collect the facts that go into the prompt of a call at ``depth``.

    ``limit`` is the budget of the whole run. ``has_pictures`` is True if the session has pictures
    that some model of the run may be able to read.
    """
    limits = setup.limits
    has_children = depth < limits.max_depth
    roles: dict[int, list[str]] = {}
    roles.setdefault(id(models.client_at_depth(depth)), []).append("you")
    roles.setdefault(id(models.plain), []).append("`llm_query`")
    if has_children:
        roles.setdefault(id(models.client_at_depth(depth + 1)), []).append("your children")

    def prompt_model(client: Client) -> PromptModelFacts:
        own, known = roles.get(id(client), ()), models.model_description(client)
        is_plain = list(own) != ["you"]
        text, reasoning = reply_limits(client, depth + is_plain, is_plain)
        chars = _fitting_chars(known, text + reasoning, limit, context.bytes_per_char)
        return PromptModelFacts(known.alias, chars, text, known.price, known.vision, tuple(own))

    spec = setup.sandbox
    return PromptFacts(
        depth=depth,
        context=context,
        has_pictures=has_pictures,
        models=tuple(map(prompt_model, models.all)),
        budget=BudgetFacts(
            setup.max_turns(depth),
            limit.calls,
            limit.tokens,
            limit.cost,
            limits.max_seconds,
            limits.max_depth,
            limits.max_children,
        ),
        children=has_children,
        tools=tools.describe(),
        tool_names=(*tools.functions, *tools.values),
        packages=spec.packages,
        mounts=_mounts(spec),
        has_network=not caps.isolates_network,
        full_python=caps.full_python,
        output_chars=setup.scaffold_at(depth).max_output_chars,
        instructions=setup.instructions,
        examples=setup.examples,
    )


def check_instructions_fit(setup: RlmSetup, models: ModelsByDepth) -> None:
    """Raise ConfigError if the user's instructions are too long or prompts have no place for them.

    Reasons are that they are too long for a model's window, or that the prompt format has no system
    message.
    """
    num = len(user_instructions(setup.instructions, setup.examples))
    if not num:
        return
    for depth in range(min(setup.limits.max_depth, 1) + 1):
        client, scaffold = models.client_at_depth(depth), setup.scaffold_at(depth)
        if not scaffold.system:
            raise ConfigError(
                f"scaffold '{scaffold.name}' has no system message, to which instructions could be "
                "added: put them into the question, or choose another scaffold"
            )
        most = CHARS_PER_TOKEN * (
            client.window - min(client.window // 2, setup.limits.max_reply_tokens)
        )
        if num > most:
            raise ConfigError(
                f"the instructions and examples have {num:,} characters, and {client.name} reads "
                f"about {most:,} at once: shorten them, or put them into the context"
            )


def _mounts(spec: SandboxSpec) -> tuple[MountedPath, ...]:
    mounts = spec.mounts if isinstance(spec, JailSpec) else ()
    return tuple(MountedPath(inside, os.path.isdir(outside)) for outside, inside in mounts)


def _fitting_chars(
    model: RunModelDescription, reply_tokens: int, limit: BudgetAmount, bytes_per_char: float
) -> int:
    """Return the longest prompt, in characters, that fits the model's window and the budget.

    The prompt must fit the window together with its reply, and may cost at most half of the run's
    budget. The engine reserves one token per byte.
    """
    by_window = CHARS_PER_TOKEN * (model.window - reply_tokens)
    by_tokens = limit.tokens // 2 - reply_tokens
    fitting = [by_window, by_tokens]
    if math.isfinite(limit.cost) and model.price is not None:
        per_byte = max_request_amount(1_000_000, 0, model.price).cost / 1e6
        left = limit.cost / 2 - max_request_amount(0, reply_tokens, model.price).cost
        if per_byte:
            fitting.append(int(left / per_byte))
    return round_down_to_two_digits(max(0, int(min(fitting) / bytes_per_char)))
