"""Arithmetic on the tokens of a step: returns along a call, and statistics over all tokens.

The sampled tokens of a call form one line, whatever lies between them (observations, prompts of
later turns) and however many rows hold them. Discounting goes from one sampled token to the next.

    row a                            . . x x . .
    row b, same call, history cut    . . x            one line of three tokens: x x x

Legend: N tokens of a call or of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.errors import TrainError
from ramify.types.sequence import call_of

if TYPE_CHECKING:
    from ramify.types.sequence import Ints, TokenSequence

Doubles = npt.NDArray[np.float64]

_TINY = 1e-8
"""Added to a variance before taking its square root."""


class CallTokens(NamedTuple):
    """The sampled tokens of one call that carry policy-gradient weight, in order."""

    parts: list[tuple[TokenSequence, Ints]]
    """(row, indices of its sampled tokens)"""

    def read(self, name: str) -> Doubles:
        """[N] the values of a stream or of ``advantages``. Raises TrainError if a row has no such
        stream."""
        return np.concatenate(
            [_column(row, name)[tokens].astype(np.float64) for row, tokens in self.parts]
        )

    def write(self, name: str, values: Doubles) -> None:
        """Write [N] values into the rows; a new stream is 0 on all other tokens."""
        start = 0
        for row, tokens in self.parts:
            if name != "advantages" and name not in row.streams:
                row.streams[name] = np.zeros(len(row), np.float32)
            column = row.advantages if name == "advantages" else row.streams[name]
            column[tokens] = values[start : start + len(tokens)]
            start += len(tokens)


def lines(rows: Sequence[TokenSequence]) -> Iterator[CallTokens]:
    """The tokens of each call, in the order in which the calls first appear."""
    by_call: dict[str, list[tuple[TokenSequence, Ints]]] = {}
    for row in rows:
        tokens = np.flatnonzero(row.rl)
        if len(tokens):
            by_call.setdefault(call_of(row.name), []).append((row, tokens))
    return map(CallTokens, by_call.values())


def to_go(rewards: Doubles, gamma: float) -> Doubles:
    """Discounted returns-to-go: G_t = r_t + γ G_{t+1}.

    rewards 1, 0, 2 with γ = 0.5: returns 1.5, 1, 2"""
    returns = rewards.copy()
    for index in range(len(returns) - 2, -1, -1):
        returns[index] += gamma * returns[index + 1]
    return returns


def gae(rewards: Doubles, values: Doubles, gamma: float, lam: float) -> Doubles:
    """Generalised advantage estimation (1506.02438): Â_t = δ_t + γλ Â_{t+1},
    δ_t = r_t + γ V_{t+1} - V_t. The value after the last token is 0."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return to_go(deltas, gamma * lam)


def whiten(values: Doubles) -> Doubles:
    """(x - mean) / std, with the unbiased std; all 0 if the values do not differ."""
    if len(values) < 2:
        return np.zeros_like(values)
    whitened: Doubles = (values - values.mean()) / np.sqrt(values.var(ddof=1) + _TINY)
    return whitened


def whiten_all(parts: Sequence[list[float]]) -> None:
    """Whiten all numbers of ``parts`` together, in place."""
    if not parts:
        return
    whitened = whiten(np.concatenate([np.asarray(part, np.float64) for part in parts])).tolist()
    start = 0
    for part in parts:
        part[:] = whitened[start : start + len(part)]
        start += len(part)


def add_kl(
    rows: Sequence[TokenSequence], beta: float, gamma: float, *, normalise: bool
) -> dict[str, float]:
    """Subtract β (o - ref) from the advantage of each token and, discounted by γ, of the tokens
    before it in its call; then normalise over the step if asked to. The metric ``reward_kl`` is
    the mean of o - ref."""
    charges: list[Doubles] = []
    calls = list(lines(rows))
    for line in calls:
        charges.append(line.read("old_logprobs") - line.read("ref_logprobs"))
        line.write("advantages", line.read("advantages") + to_go(-beta * charges[-1], gamma))
    if normalise:
        normalise_lines(calls)
    num = sum(map(len, charges))
    return {"reward_kl": sum(float(charge.sum()) for charge in charges) / num if num else 0.0}


def normalise_lines(calls: Sequence[CallTokens]) -> None:
    """Whiten the advantages of all tokens of ``calls`` together."""
    if not calls:
        return
    whitened = whiten(np.concatenate([line.read("advantages") for line in calls]))
    start = 0
    for line in calls:
        num = sum(len(tokens) for _, tokens in line.parts)
        line.write("advantages", whitened[start : start + num])
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
