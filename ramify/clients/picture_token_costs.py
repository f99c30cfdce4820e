"""Look up by name whether a model reads pictures, and how many tokens a picture costs at most.

    picture_tokens_upper_bound("openai:gpt-4o", 1024 × 1024)           ->  85 + 4 × 170 = 765
    picture_tokens_upper_bound("anthropic:claude-sonnet-4-5", …)       ->  1,399

A request reserves these tokens before it is sent, and the usage that the server reports settles
them. The rules are those that the providers publish (2026-11). A name that none of them covers gets
a bound that holds for all known open models: one token for each 28 × 28 pixels, and at least 6,500.
Four tiles of Llama and thirteen tiles of InternVL cost less than that.

The clients load the bytes of pictures and send them in their formats.
"""

from __future__ import annotations

import math
import re

from ramify.lazy_pattern import lazy_pattern
from ramify.types.picture import Picture

_LEAST = 6500

_SEEING = lazy_pattern(
    r"(^|[/:._-])(gpt-4o|gpt-4\.[15]|gpt-4-turbo|gpt-5|chatgpt-4o|o1(?!-mini|-preview)(?=$|[-@])"
    r"|o3(?!-mini)(?=$|[-@])|o4-mini|claude-(3|opus|sonnet|haiku|fable|mythos)|gemini-"
    r"|grok-4|pixtral|llava|llama-?4|llama-?3\.2-(11|90)b-vision|llama3\.2-vision"
    r"|gemma-?3(?![-:](1b|270m))(?=$|[-:])|minicpm-v|internvl|moondream|phi-4-multimodal"
    r"|glm-4\.[1-9]v|[\w.-]*(-vl|vl-|-vision|\dvl)(?=$|[-:@/]))"
)
_BLIND = lazy_pattern(
    r"(^|[/:._-])(gpt-3\.5|gpt-4(?=$|-0|-32k)|gpt-oss|o1-mini|o1-preview|o3-mini|claude-2"
    r"|deepseek-(chat|reasoner|coder|r1|v[23])|codestral|mixtral|llama-?3\.[13](?=$|[-:])"
    r"|qwen-?(2\.5|3)(?!\.5)(?!.*(vl|omni))|qwq|kimi-k2(?!\.5)|glm-4\.[5-7](?!v)|gemma-?3[-:](1b|270m))"
)

_TILES = (
    (r"gpt-4o-mini", 2833, 5667),
    (r"o1|o3", 75, 150),
    (r"computer-use", 65, 129),
    (r"gpt-5(?!\.|-mini|-nano)", 70, 140),
    (r"gpt-4o|gpt-4\.1(?!-mini|-nano)|gpt-4\.5|gpt-4-turbo|chatgpt-4o", 85, 170),
)
"""OpenAI models that count tiles of 512 × 512 pixels: pattern of the name, base tokens, tokens
per tile."""
_PATCHES = (
    (r"gpt-4\.1-mini|gpt-5-mini", 1.62, 1536),
    (r"gpt-4\.1-nano|gpt-5-nano", 2.46, 1536),
    (r"o4-mini", 1.72, 1536),
    (r"gpt-5\.\d+-nano", 2.46, 10_000),
    (r"gpt-5\.\d+-mini", 1.62, 10_000),
    (r"gpt-5\.\d+", 1.2, 10_000),
)
"""OpenAI models that count patches of 32 × 32 pixels: pattern of the name, tokens per patch,
maximum number of patches."""


def can_read_pictures(model: str) -> bool | None:
    """Return True if a model (``provider:model``) is known to read pictures, and False if it is
    known not to.

    Returns None if its name does not show it.
    """
    name = _bare_model_name(model)
    if _SEEING.search(name):
        return True
    return False if _BLIND.search(name) else None


def picture_tokens_upper_bound(model: str, picture: Picture) -> int:
    """Return an upper bound on the number of tokens that a picture costs.

    The cost depends on ``model`` (``provider:model``).
    """
    name, width, height = _bare_model_name(model), picture.width, picture.height
    for pattern, base, tile in _TILES:
        if _is_named(pattern, name):
            return base + tile * _num_tiles(width, height)
    for pattern, factor, most in _PATCHES:
        if _is_named(pattern, name):
            return math.ceil(factor * min(_cells(width, height, 32), most)) + 1
    if _is_named("claude", name):
        # Earlier models divide the pixels by 750, later ones count cells of 28 × 28.
        return min(max(math.ceil(width * height / 750), _cells(width, height, 28)), 4784) + 16
    if _is_named("gemini", name):
        return _gemini_tokens(width, height)
    return max(_LEAST, _cells(width, height, 28) + 16)


def _bare_model_name(model: str) -> str:
    return model.partition("@http")[0].lower()


def _is_named(pattern: str, name: str) -> bool:
    return re.search(rf"(^|[/:._-])({pattern})(?=$|[-:@/.])", name) is not None


def _cells(width: int, height: int, side: int) -> int:
    return math.ceil(width / side) * math.ceil(height / side)


def _num_tiles(width: int, height: int) -> int:
    """Count the tiles into which OpenAI splits a picture to compute its token cost.

    The picture is first shrunk to fit 2048 × 2048 pixels, and then further until its shorter side
    is at most 768 pixels.
    """
    scale = min(1.0, 2048 / max(width, height))
    scale *= min(1.0, 768 / (scale * min(width, height)))
    return _cells(round(width * scale), round(height * scale), 512)


def _gemini_tokens(width: int, height: int) -> int:
    """Return an upper bound on the tokens that a picture costs with a Gemini model.

    Gemini 2 counts 258 tokens per tile. Gemini 3 counts at most 2,240 in its highest resolution.
    """
    tile = max(256, min(768, int(min(width, height) / 1.5)))
    return max(2240, 258 * _cells(width, height, tile))
