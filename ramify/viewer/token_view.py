"""The token ids of one turn as its page shows them, with what is known of each: text,
log-probability, advantage, scores."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ramify.errors import StoreError
from ramify.types.message import Reply
from ramify.viewer.watched_run import WatchedRun


def tokens(run: WatchedRun, id: str, turn: int, tokenizer: Path | None = None) -> dict[str, Any]:
    """The ids of one turn: first those that it was given, then those that it sampled, each with
    what is known of it.

    ``advantages`` are where a training run noted them (``train/stages.py``): one number for the
    whole turn, or a list. ``scores`` are what signals found of each sampled token, by name."""
    call = run.whole(id).call
    if not 0 <= turn < len(call.turns):
        raise StoreError(f"call {id} has no turn {turn + 1}")
    reply = call.turns[turn].reply
    given, sampled = list(reply.prompt_ids or ()), list(reply.token_ids or ())
    noted = (run.tree.run.metadata.get("advantages") or {}).get(f"{id}/{turn}")
    advantages = (
        noted if isinstance(noted, list) else None if noted is None else [noted] * len(sampled)
    )
    return {
        "reused": call.turns[turn].reused_ids,
        "given": given,
        "sampled": sampled,
        "logprobs": list(reply.logprobs) if reply.logprobs else None,
        "versions": _versions(reply),
        "advantages": advantages,
        "scores": _scores(run, id, turn, len(sampled)),
        "texts": _decoded(tokenizer, [*given, *sampled]),
    }


def _scores(run: WatchedRun, id: str, turn: int, num: int) -> dict[str, list[float]]:
    """What was scored of each token; what has another length than the reply is left out."""
    marks = [mark for mark in run.tree.nodes[id].marks if mark.turn == turn]
    return {
        name: values for mark in marks for name, values in mark.tokens.items() if len(values) == num
    }


def _versions(reply: Reply) -> list[int] | None:
    """The policy's version that sampled each token; -1 where it is not known."""
    if not reply.versions:
        return None
    versions = [-1] * len(reply.token_ids or ())
    for span in reply.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def _decoded(tokenizer: Path | None, ids: Sequence[int]) -> list[str] | None:
    """The text of each id, where the model's tokenizer is at hand and the library that reads it is
    installed."""
    if tokenizer is None:
        return None
    known = _tokenizer(tokenizer)
    return None if known is None else [known.decode([id], skip_special_tokens=False) for id in ids]


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
    """The tokenizer's file of the policy that the run was asked: of a training's folder, or of a
    local model."""
    near = [
        run.path.parent.parent / "policy",
        *sorted((run.path.parent.parent / "checkpoints").glob("*/policy")),
    ]
    for model in models:
        if model.startswith("local:"):
            near.append(Path(model.removeprefix("local:")).expanduser())
        elif model == "tiny":
            near.append(Path(__file__).parents[1] / "policy" / "tiny")
    for folder in near:
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None
