"""Convert rollouts with advantages into token sequences for training.

Each path through a trained call becomes one sequence. A call has several paths if it forked or if
its history was cut.

    call 0     path  1 2 3 7 8 4 9      sampled 7 8 (turn 0), 9 (turn 1)
    call 0.1   path  1 2 5 6            sampled 6
    fork of call 0 after turn 0:  path  1 2 3 7 8 10

The credit of a turn goes only into the first path that holds the whole turn. Tokens that a second
path shares with the first are context there, so that a loss over all sequences counts every sampled
token once. Which sequences share computation is decided by ``prefix_forest.py``, and which ones go
into a batch by ``pack.py``.

Legend: T tokens of a path, N tokens sampled in one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain

import numpy as np

from ramify.train.advantages.base import RolloutAdvantages, TokenCredit
from ramify.types.call_token_ids import CallTokenIds, SampledTokenSpan
from ramify.types.training_sequences import Floats, Ints, SamplingMask, TokenSequence
from ramify.types.trajectory import Call

_WEIGHTS = ("rl", "ce", "kd")


def token_sequences(
    rollouts: Iterable[RolloutAdvantages], temperature: float | Callable[[Call], float] = 1.0
) -> list[TokenSequence]:
    """Convert rollouts into the token sequences to train on.

    Each path with turns that have advantages or weights becomes one sequence. The order is that of
    rollouts, calls and turns.

    ``temperature`` is the sampling temperature of the rollouts, or of a call. Raises ValueError if
    a turn's credit does not fit it: its length differs, the turn has no token ids, or it has
    policy-gradient weights but no sampler log-probabilities, or was sampled greedily.
    """
    of = temperature if callable(temperature) else lambda call: temperature
    return [sequence for rollout in rollouts for sequence in _of_rollout(rollout, of)]


def _of_rollout(
    rollout: RolloutAdvantages, temperature: Callable[[Call], float]
) -> Iterator[TokenSequence]:
    trajectory = rollout.trajectory
    _check_lengths(rollout)
    remaining = {turn: credit for turn, credit in rollout.credits.items() if len(credit)}
    calls_with_credit = {call for call, _ in remaining}
    for call in trajectory.calls:
        if call.id not in calls_with_credit:
            continue
        paths = trajectory.paths(call)
        for index, path in enumerate(paths):
            credits = [
                (span, remaining.pop((span.call, span.turn)))
                for span in path.spans
                if _is_whole(span, remaining)
            ]
            if credits:
                name = f"{trajectory.id}/call={call.id}" + (
                    f"/path={index}" if len(paths) > 1 else ""
                )
                yield _sequence(name, trajectory.task, path, credits, temperature(call))
    if remaining:
        call_id, turn = min(remaining)
        raise ValueError(
            f"{len(remaining)} turns with credit in trajectory {trajectory.id} are in no token "
            f"sequence, the first being call {call_id}, turn {turn}: such a turn needs token ids, "
            "and its credit one number per sampled token"
        )


def _check_lengths(rollout: RolloutAdvantages) -> None:
    """Raise ValueError if a turn's per-token values differ in number from its sampled tokens.

    The error shows both lengths.
    """
    turns = {
        (call.id, index): turn
        for call in rollout.trajectory.calls
        for index, turn in enumerate(call.turns)
    }
    for place, credit in rollout.credits.items():
        ids = turns[place].reply.token_ids if place in turns else None
        if ids is not None and len(credit) and len(credit) != len(ids):
            raise ValueError(
                f"trajectory {rollout.trajectory.id}, call {place[0]}, turn {place[1]}: a credit "
                f"stream of {len(credit)} numbers for {len(ids)} sampled tokens; it must have one "
                "number per token"
            )


def _is_whole(span: SampledTokenSpan, remaining: dict[tuple[str, int], TokenCredit]) -> bool:
    credit = remaining.get((span.call, span.turn))
    return credit is not None and len(credit) == span.end - span.start


def _sequence(
    name: str,
    item: str,
    path: CallTokenIds,
    credits: list[tuple[SampledTokenSpan, TokenCredit]],
    temperature: float,
) -> TokenSequence:
    length = len(path)
    if path.logprobs is None and any(credit.rl for _, credit in credits):
        raise ValueError(
            f"sequence {name} has policy-gradient weights, but not all its tokens have the "
            "sampler's log-probabilities"
        )
    if temperature <= 0 and any(credit.rl for _, credit in credits):
        raise ValueError(
            f"sequence {name} has policy-gradient weights, but was sampled at temperature "
            f"{temperature:g}, which must be above 0"
        )
    columns = {name: _column(length, credits, name) for name in ("advantages", *_WEIGHTS)}
    columns["ce"] = _add_observed_weights(columns["ce"], length, credits, path)
    for weight in _WEIGHTS:
        values = columns[weight]
        if values is not None and length and values[0]:
            raise ValueError(
                f"sequence {name} has a weight '{weight}' on its first token, which nothing "
                "predicts"
            )
    return TokenSequence(
        name=name,
        token_ids=np.array(path.ids, np.int64),
        mask=np.array(path.sampled, np.bool_),
        sampler_logprobs=np.zeros(length, np.float32)
        if path.logprobs is None
        else np.array(path.logprobs, np.float32),
        advantages=_or_zeros(columns["advantages"], length),
        rl=_or_zeros(columns["rl"], length),
        ce=columns["ce"],
        kd=columns["kd"],
        versions=np.array(path.versions, np.int64),
        streams=_named_columns(length, credits),
        kept=None if path.kept is None else _build_sampling_mask(path.kept),
        routes=None if path.routes is None else _routes(path.routes),
        temperature=temperature,
        item=item,
    )


def _column(
    length: int, credits: list[tuple[SampledTokenSpan, TokenCredit]], name: str
) -> Floats | None:
    """Build a per-token array [T], such as ``advantages``, for a sequence of T tokens.

    It has the turns' numbers at their tokens and 0 elsewhere. Returns None if no turn has such
    numbers.
    """
    column = None
    for span, credit in credits:
        values = getattr(credit, name)
        if len(values):
            column = np.zeros(length, np.float32) if column is None else column
            column[span.start : span.end] = values
    return column


def _add_observed_weights(
    column: Floats | None,
    length: int,
    credits: list[tuple[SampledTokenSpan, TokenCredit]],
    path: CallTokenIds,
) -> Floats | None:
    """Add the cross-entropy weights of observed tokens to ``column``, an array [T] of weights.

    Observed tokens are those that were not sampled, such as prompts and tool output. A turn with
    such a weight (``credit.given``) applies it to the tokens between the previously sampled token
    and its own first token. The first token of a path gets none, since nothing predicts it. Returns
    None if no token has a weight.
    """
    for span, credit in credits:
        if not credit.given:
            continue
        start = span.start
        while start > 1 and not path.sampled[start - 1]:
            start -= 1
        column = np.zeros(length, np.float32) if column is None else column
        column[start : span.start] = credit.given
    return column


def _named_columns(
    length: int, credits: list[tuple[SampledTokenSpan, TokenCredit]]
) -> dict[str, Floats]:
    """Return the named per-token arrays (streams) of a token path, each of shape [T] or [T, k].

    Tokens outside the given turns have 0.
    """
    columns: dict[str, Floats] = {}
    for span, credit in credits:
        for name, values in credit.streams.items():
            array = np.asarray(values, np.float32)
            column = columns.setdefault(name, np.zeros((length, *array.shape[1:]), np.float32))
            column[span.start : span.end] = array
    return columns


def _or_zeros(column: Floats | None, length: int) -> Floats:
    return np.zeros(length, np.float32) if column is None else column


def _routes(routes: tuple[tuple[int, ...], ...]) -> Ints:
    table = np.full((len(routes), max(map(len, routes))), -1, np.int64)
    for index, experts in enumerate(routes):
        if experts:
            table[index] = experts
    return table


def _build_sampling_mask(kept: tuple[tuple[int, ...], ...]) -> SamplingMask:
    offsets = np.fromiter(
        accumulate((len(ids) for ids in kept), initial=0), np.int64, len(kept) + 1
    )
    return SamplingMask(offsets, np.fromiter(chain.from_iterable(kept), np.int64, int(offsets[-1])))
