"""From stamped rollouts to sequences: one per path of each call that learns.

    call 0     path  1 2 3 7 8 4 9      sampled 7 8 (turn 0), 9 (turn 1)
    call 0.1   path  1 2 5 6            sampled 6
    fork of call 0 after turn 0:  path  1 2 3 7 8 10

Decides where each stamp stands: in the first path that holds its turn whole, and there alone.
Tokens that a second path shares with the first (a fork, a history that was cut) are context in it,
so that a loss over all sequences counts every sampled token once. Leaves out what shares
computation with what (``forest.py``) and what goes into one batch (``pack.py``).

Legend: T tokens of a path, N tokens sampled in one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, chain

import numpy as np

from ramify.train.token_credit import AssignedRollout, TokenCredit
from ramify.types.sequence import Floats, SamplingSupport, TokenSequence
from ramify.types.token_path import TokenPath, TokenSpan

_WEIGHTS = ("rl", "ce", "kd")


def sequences(rollouts: Iterable[AssignedRollout], temperature: float = 1.0) -> list[TokenSequence]:
    """The paths of all calls that carry stamps, in the order of rollouts, calls and turns.

    ``temperature`` is the one that the rollouts were sampled at. ValueError where a stamp does not
    fit its turn: it has another length, the turn has no token ids, or it has policy-gradient
    weights and no sampler's log-probabilities, or was sampled greedily.
    """
    return [sequence for rollout in rollouts for sequence in _of_rollout(rollout, temperature)]


def _of_rollout(rollout: AssignedRollout, temperature: float) -> Iterator[TokenSequence]:
    trajectory = rollout.trajectory
    _check_lengths(rollout)
    waiting = {turn: credit for turn, credit in rollout.credits.items() if len(credit)}
    stamped_calls = {call for call, _ in waiting}
    for call in trajectory.calls:
        if call.id not in stamped_calls:
            continue
        paths = trajectory.paths(call)
        for index, path in enumerate(paths):
            here = [
                (span, waiting.pop((span.call, span.turn)))
                for span in path.spans
                if _is_whole(span, waiting)
            ]
            if here:
                name = f"{trajectory.id}/call={call.id}" + (
                    f"/path={index}" if len(paths) > 1 else ""
                )
                yield _sequence(name, path, here, temperature)
    if waiting:
        call_id, turn = min(waiting)
        raise ValueError(
            f"{len(waiting)} stamps of trajectory {trajectory.id} fit no path, the first that of "
            f"call {call_id}, turn "
            f"{turn}: a stamped turn needs token ids, and a stamp one number for each that was "
            "sampled"
        )


def _check_lengths(rollout: AssignedRollout) -> None:
    """ValueError, with both lengths, where a stamp has another than its turn."""
    turns = {
        (call.id, index): turn
        for call in rollout.trajectory.calls
        for index, turn in enumerate(call.turns)
    }
    for place, credit in rollout.credits.items():
        ids = turns[place].reply.token_ids if place in turns else None
        if ids is not None and len(credit) and len(credit) != len(ids):
            raise ValueError(
                f"trajectory {rollout.trajectory.id}, call {place[0]}, turn {place[1]}: a stream "
                f"of {len(credit)} numbers for "
                f"{len(ids)} sampled tokens; a stamp has one number for each"
            )


def _is_whole(span: TokenSpan, waiting: dict[tuple[str, int], TokenCredit]) -> bool:
    credit = waiting.get((span.call, span.turn))
    return credit is not None and len(credit) == span.end - span.start


def _sequence(
    name: str, path: TokenPath, here: list[tuple[TokenSpan, TokenCredit]], temperature: float
) -> TokenSequence:
    length = len(path)
    if path.logprobs is None and any(credit.rl for _, credit in here):
        raise ValueError(
            f"sequence {name} has policy-gradient weights, but not all its tokens have the "
            "sampler's log-probabilities"
        )
    if temperature <= 0 and any(credit.rl for _, credit in here):
        raise ValueError(
            f"sequence {name} has policy-gradient weights, but was sampled at temperature "
            f"{temperature:g}"
        )
    columns = {name: _column(length, here, name) for name in ("advantages", *_WEIGHTS)}
    columns["ce"] = _observed(columns["ce"], length, here, path)
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
        streams=_named(length, here),
        kept=None if path.kept is None else _kept(path.kept),
        temperature=temperature,
    )


def _column(length: int, here: list[tuple[TokenSpan, TokenCredit]], name: str) -> Floats | None:
    """[T] what the stamps say under ``name``, 0 elsewhere; None where none of them says
    anything."""
    column = None
    for span, credit in here:
        values = getattr(credit, name)
        if len(values):
            column = np.zeros(length, np.float32) if column is None else column
            column[span.start : span.end] = values
    return column


def _observed(
    column: Floats | None, length: int, here: list[tuple[TokenSpan, TokenCredit]], path: TokenPath
) -> Floats | None:
    """[T] the cross-entropy weights, with those of given tokens: the stretch between a stamped turn
    and what was sampled before it. Nothing predicts a path's first token."""
    for span, credit in here:
        if not credit.given:
            continue
        start = span.start
        while start > 1 and not path.sampled[start - 1]:
            start -= 1
        column = np.zeros(length, np.float32) if column is None else column
        column[start : span.start] = credit.given
    return column


def _named(length: int, here: list[tuple[TokenSpan, TokenCredit]]) -> dict[str, Floats]:
    """Further streams by name, [T] or [T, k], 0 where nothing was stamped."""
    found: dict[str, Floats] = {}
    for span, credit in here:
        for name, values in credit.streams.items():
            array = np.asarray(values, np.float32)
            column = found.setdefault(name, np.zeros((length, *array.shape[1:]), np.float32))
            column[span.start : span.end] = array
    return found


def _or_zeros(column: Floats | None, length: int) -> Floats:
    return np.zeros(length, np.float32) if column is None else column


def _kept(kept: tuple[tuple[int, ...], ...]) -> SamplingSupport:
    offsets = np.fromiter(
        accumulate((len(ids) for ids in kept), initial=0), np.int64, len(kept) + 1
    )
    return SamplingSupport(
        offsets, np.fromiter(chain.from_iterable(kept), np.int64, int(offsets[-1]))
    )
