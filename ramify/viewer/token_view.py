"""Tokens of one turn for its page: ids, texts, log-probabilities, advantages and scores."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ramify.errors import StoreError
from ramify.types.message import Reply
from ramify.viewer.watched_run import WatchedRun


def tokens(run: WatchedRun, id: str, turn: int, tokenizer: Path | None = None) -> dict[str, Any]:
    """Return the prompt ids and the sampled ids of one turn, with the data about each token.

    ``advantages`` exists if a training run recorded them (see train/stages.py). ``scores`` maps the
    name of each signal to its score of each sampled token.
    """
    call = run.whole(id).call
    if not 0 <= turn < len(call.turns):
        raise StoreError(f"call {id} has no turn {turn + 1}")
    reply = call.turns[turn].reply
    prompt_ids, sampled = list(reply.prompt_ids or ()), list(reply.token_ids or ())
    stored = (run.tree.run.metadata.get("advantages") or {}).get(f"{id}/{turn}")
    advantages = (
        stored if isinstance(stored, list) else None if stored is None else [stored] * len(sampled)
    )
    return {
        "reused": call.turns[turn].reused_ids,
        "given": prompt_ids,
        "sampled": sampled,
        "logprobs": list(reply.logprobs) if reply.logprobs else None,
        "versions": _versions(reply),
        "advantages": advantages,
        "scores": _scores(run, id, turn, len(sampled)),
        "texts": _decoded(tokenizer, [*prompt_ids, *sampled]),
    }


def _scores(run: WatchedRun, id: str, turn: int, num: int) -> dict[str, list[float]]:
    """Scores of each sampled token by name, without those whose length differs from the reply."""
    marks = [mark for mark in run.tree.nodes[id].marks if mark.turn == turn]
    return {
        name: values for mark in marks for name, values in mark.tokens.items() if len(values) == num
    }


def _versions(reply: Reply) -> list[int] | None:
    """Policy version that sampled each token; -1 if unknown."""
    if not reply.versions:
        return None
    versions = [-1] * len(reply.token_ids or ())
    for span in reply.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def _decoded(tokenizer: Path | None, ids: Sequence[int]) -> list[str] | None:
    """Text of each id; None without a tokenizer or without the library that reads it."""
    if tokenizer is None:
        return None
    decoder = _tokenizer(tokenizer)
    return (
        None if decoder is None else [decoder.decode([id], skip_special_tokens=False) for id in ids]
    )


@functools.lru_cache(maxsize=8)
def _tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 -- the library raises bare Exceptions for a file that it cannot read
        return None


def tokenizer_of(run: WatchedRun, models: Iterable[str]) -> Path | None:
    """Tokenizer file of the run's policy, from its training folder or its local model."""
    candidates = [
        run.path.parent.parent / "policy",
        *sorted((run.path.parent.parent / "checkpoints").glob("*/policy")),
    ]
    for model in models:
        if model.startswith("local:"):
            candidates.append(Path(model.removeprefix("local:")).expanduser())
        elif model == "tiny":
            candidates.append(Path(__file__).parents[1] / "models" / "tiny")
    for folder in candidates:
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None
