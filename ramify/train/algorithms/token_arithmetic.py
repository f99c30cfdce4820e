"""Arithmetic over the rows of a step: what goes along a call from token to token, and what is taken
over all of them.

A call's sampled tokens are one line, whatever was given between them (observations, prompts of
later turns) and into however many rows they were put: what is discounted is discounted from one
sampled token to the next.

    row a   . . x x . .      row b, the same call, its history cut   . . x      one line of three tokens: x x x

Legend: N tokens of a call or of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.errors import TrainError
from ramify.train.whole_step import call_of

if TYPE_CHECKING:
    from ramify.types.sequence import Ints, TokenSequence

Doubles = npt.NDArray[np.float64]

_TINY = 1e-8
"""Added to a variance before its root is taken."""


class CallTokens(NamedTuple):
    """The sampled tokens of one call that carry policy-gradient weight, in order."""

    parts: list[tuple[TokenSequence, Ints]]
    """(row, which of its tokens)"""

    def read(self, name: str) -> Doubles:
        """[N] a stream, or ``advantages``. TrainError where a row has no such stream."""
        return np.concatenate(
            [_column(row, name)[tokens].astype(np.float64) for row, tokens in self.parts]
        )

    def write(self, name: str, values: Doubles) -> None:
        """Into the rows; 0 where the stream is new and nothing is said."""
        start = 0
        for row, tokens in self.parts:
            if name != "advantages" and name not in row.streams:
                row.streams[name] = np.zeros(len(row), np.float32)
            column = row.advantages if name == "advantages" else row.streams[name]
            column[tokens] = values[start : start + len(tokens)]
            start += len(tokens)


def lines(rows: Sequence[TokenSequence]) -> Iterator[CallTokens]:
    """Of each call, in the order in which calls come first."""
    found: dict[str, list[tuple[TokenSequence, Ints]]] = {}
    for row in rows:
        tokens = np.flatnonzero(row.rl)
        if len(tokens):
            found.setdefault(call_of(row.name), []).append((row, tokens))
    return map(CallTokens, found.values())


def to_go(rewards: Doubles, gamma: float) -> Doubles:
    """G_t = r_t + γ G_{t+1}.   rewards 1, 0, 2 with γ = 0.5: 1.5, 1, 2"""
    found = rewards.copy()
    for index in range(len(found) - 2, -1, -1):
        found[index] += gamma * found[index + 1]
    return found


def gae(rewards: Doubles, values: Doubles, gamma: float, lam: float) -> Doubles:
    """Â_t = δ_t + γλ Â_{t+1}, δ_t = r_t + γ V_{t+1} - V_t; nothing comes after the last token
    (1506.02438)."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return to_go(deltas, gamma * lam)


def whiten(values: Doubles) -> Doubles:
    """(x - mean) / std, unbiased; all 0 where nothing differs."""
    if len(values) < 2:
        return np.zeros_like(values)
    found: Doubles = (values - values.mean()) / np.sqrt(values.var(ddof=1) + _TINY)
    return found


def whiten_all(parts: Sequence[list[float]]) -> None:
    """The same over all numbers of ``parts``, in place."""
    if not parts:
        return
    fresh, start = (
        whiten(np.concatenate([np.asarray(part, np.float64) for part in parts])).tolist(),
        0,
    )
    for part in parts:
        part[:] = fresh[start : start + len(part)]
        start += len(part)


def add_kl(
    rows: Sequence[TokenSequence], beta: float, gamma: float, *, normalise: bool
) -> dict[str, float]:
    """Charge each token β (o - ref), and the tokens before it in its call; then normalise over the
    step. What the mean of o - ref is."""
    charges: list[Doubles] = []
    calls = list(lines(rows))
    for line in calls:
        charges.append(line.read("old_logprobs") - line.read("ref_logprobs"))
        line.write("advantages", line.read("advantages") + to_go(-beta * charges[-1], gamma))
    if normalise:
        normalise_lines(calls)
    num = sum(map(len, charges))
    return {"reward_kl": sum(float(each.sum()) for each in charges) / num if num else 0.0}


def normalise_lines(calls: Sequence[CallTokens]) -> None:
    """Whiten the advantages of all tokens."""
    if not calls:
        return
    fresh = whiten(np.concatenate([line.read("advantages") for line in calls]))
    start = 0
    for line in calls:
        num = sum(len(tokens) for _, tokens in line.parts)
        line.write("advantages", fresh[start : start + num])
        start += num


def _column(row: TokenSequence, name: str) -> npt.NDArray[np.float32]:
    if name == "advantages":
        return row.advantages
    if name not in row.streams:
        raise TrainError(
            f"sequence {row.name} has no stream '{name}', which the algorithm needs to finish its "
            "advantages"
        )
    return row.streams[name]
