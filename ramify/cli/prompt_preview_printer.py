"""Print a question's prompt and expected cost for ``ramify prompt`` and ``ask --dry-run``.

The options are in ``ask.py``; ``engine/prompt_preview.py`` constructs the prompt.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.loaded_sources_summary import source_table
from ramify.cli.parser import ExitCode
from ramify.engine.limits import DEFAULT_MAX_COST
from ramify.engine.prompt_preview import FirstRequestPreview
from ramify.errors import ConfigError
from ramify.format_quantities import format_dollars

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.sources.loaded_sources import LoadedContext

_SHORT_REPLY = 200
"""Tokens in a short reply, used for the lower end of a cost estimate."""


def show(
    rlm: RLM,
    question: str,
    loaded: LoadedContext | None,
    *,
    answer_type: Any,
    cite: bool,
    as_json: bool,
    depth: int = 0,
    tokenizer: str | None = None,
    as_tokens: bool = False,
    is_dry_run: bool = False,
    is_free: bool = False,
) -> ExitCode:
    """Print the prompt of a call at the given depth, where 0 is the root.

    If ``is_dry_run`` is True, also print what the run would load and cost. ``is_free`` is True if
    no model of the run costs anything.
    """
    context, query = (question, None) if loaded is None else (loaded, question)
    preview = rlm.prompt(context, query, depth=depth, answer_type=answer_type, cite=cite)
    loaded_tokenizer = _tokenizer(tokenizer) if tokenizer is not None else None
    ids = preview.token_ids(loaded_tokenizer) if loaded_tokenizer is not None else None
    num = preview.estimated_tokens if ids is None else len(ids)
    if as_json:
        data = msgspec.to_builtins(preview)
        data |= {"tokens": num, "tokens_are_estimated": ids is None}
        if as_tokens:
            data["token_ids"] = ids
        if is_dry_run:
            data["cost"] = dict(zip(("least", "most"), _first_turn(preview, num), strict=True))
        print(msgspec.json.encode(data).decode())
        return ExitCode.ANSWERED
    if as_tokens and ids is not None:
        print(*ids)
    else:
        print(preview if loaded_tokenizer is None else preview.rendered(loaded_tokenizer))
    about = "about " if ids is None else ""
    size = f"{preview.chars:,} characters, {about}{num:,} tokens of {preview.window:,}"
    print(f"\n{preview.model}: {size}")
    if is_dry_run:
        _show_costs(rlm, preview, num, loaded, is_free)
    return ExitCode.ANSWERED


def _show_costs(
    rlm: RLM,
    preview: FirstRequestPreview,
    num_tokens: int,
    loaded: LoadedContext | None,
    is_free: bool,
) -> None:
    for line in source_table(loaded) if loaded is not None else ["no context"]:
        print(f"would load: {line}")
    how = "one plain call" if preview.is_direct else "a session"
    print(f"would be answered by {how}; nothing was sent")
    if is_free:
        print(f"cost: $0.00, since {preview.model} is free ({num_tokens:,} tokens in)")
        return
    if preview.price is None:
        print("cost: unknown, since the model has no known price (docs/models.md)")
        return
    least, most = _first_turn(preview, num_tokens)
    print(
        f"first turn: {format_dollars(least)} to {format_dollars(most)} ({num_tokens:,} tokens in, "
        f"{preview.max_reply_tokens:,} out at most)"
    )
    limit = rlm.limits.max_cost
    limit = DEFAULT_MAX_COST if limit is None else limit
    if preview.is_direct:
        print(f"whole run: {format_dollars(least)} to {format_dollars(most)}")
    elif math.isfinite(limit):
        print(
            f"whole run: {format_dollars(least)} to {format_dollars(limit)}, which is its "
            "--max-cost"
        )


def _first_turn(preview: FirstRequestPreview, num_tokens: int) -> tuple[float | None, float | None]:
    """Estimate the dollar cost of the first turn of the previewed call.

    Returns the cost with a short reply and with the longest possible reply.
    """
    short = min(_SHORT_REPLY, preview.max_reply_tokens)
    return preview.cost(num_tokens, short), preview.cost(num_tokens, preview.max_reply_tokens)


def _tokenizer(folder: str) -> Any:
    """Load a tokenizer from a folder, or from the local cache by its name.

    Raises ConfigError if it has no chat template.
    """
    from ramify.models.load import load_tokenizer
    from ramify.models.model_config_files import local_model_folder

    # The folder may hold only a tokenizer and no model.
    tokenizer = load_tokenizer(
        Path(folder) if Path(folder).is_dir() else local_model_folder(folder)
    )
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer {folder} has no chat template: give another one")
    return tokenizer
