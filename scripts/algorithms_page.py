"""Write the tables of `docs/algorithms.md` and `docs/objectives.md` from the registries, the
presets and the objectives: `scripts/algorithms_page.py [--check]`.

Each row runs one estimator, loss, correction, KL or reduction on the same small batch and shows the
result. With `--check` nothing is written, and an outdated page is an error. Decides the batch and
the contents of a row; the text around the tables is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ramify.train import PolicySpec, RlSpec, Run
from ramify.train.advantages import ALGORITHMS, fork_estimators, group_estimators
from ramify.train.advantages.base import finish_advantages, needs_of
from ramify.train.advantages.token_loss_weights import ALSO, weights
from ramify.train.config_overrides import override
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.losses import POLICY_LOSSES, PolicyLossInputs
from ramify.train.losses.base import SequenceSums, TokenSelectingLoss, TokenSelectionInputs
from ramify.train.losses.corrections import CORRECTIONS
from ramify.train.losses.critic import CriticLossInputs, ValueLoss
from ramify.train.losses.total_loss import kl_estimate
from ramify.train.named_objectives import OBJECTIVES
from ramify.train.other_trainer_presets import PRESETS, choices_by_field, with_preset
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Group, Stop, Trajectory, Turn

PAGE = Path(__file__).parents[1] / "docs/algorithms.md"
OBJECTIVES_PAGE = PAGE.with_name("objectives.md")

# --- the batch: two items with four and two rollouts of one call each -----------------------------

REWARDS, LENGTHS = ((1.0, 0.5, 0.0, 0.0), (1.0, 1.0)), ((2, 1, 3, 2), (1, 1))
GREEDY, VALUE, MEMORY = 0.25, 0.25, 0.4
"""Reward of the greedy rollouts, the critic's value of every token, and RAE's running mean."""

P_NOW = (0.9, 0.3, 0.5, 0.1, 0.4)
P_OLD = (0.5, 0.5, 0.45, 0.02, 0.4)
P_SAMPLER = (0.6, 0.55, 0.5, 0.02, 0.45)
ADVANTAGES = (1.0, -2.0, 0.5, -1.0, 3.0)
OWNERS = (0, 0, 0, 1, 1)
LAGS = (0.0, 1.0, 3.0, 0.0, 1.0)
OTHERS = ("sft", "hybrid", "by_task")
"""Algorithms without a row: imitation has no advantages, and a wrapper has those of others."""
OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.2, "clip_high": 0.3},
    "clip_cov": {"share": 0.4, "cov_low": 0.0},
    "kl_cov": {"share": 0.4},
    "worst_token_mask": {"low": 0.85},
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "sequence_tis": {"cap": 0.8},
    "opsm": {"delta": 0.0},
    "icepop": {"low": 0.85},
}
"""Bounds that these few tokens reach; the defaults are made for thousands of tokens."""


def groups() -> list[Group]:
    return [
        Group(
            f"item {item}",
            [
                _trajectory(f"{item}{n}", r, k)
                for n, (r, k) in enumerate(zip(rewards, lengths, strict=True))
            ],
            _trajectory(f"{item}greedy", GREEDY, 1),
        )
        for item, rewards, lengths in zip("ab", REWARDS, LENGTHS, strict=True)
    ]


def _trajectory(id: str, reward: float, num: int) -> Trajectory:
    reply = Reply(
        Message("assistant", "…"),
        prompt_ids=(1, 2),
        token_ids=tuple(range(num)),
        logprobs=(-0.5,) * num,
    )
    turn = Turn(0, (Message("user", "…"),), reply)
    call = Call("0", "rlm", "test:m", 0, "?", turns=[turn], stop=Stop.FINAL)
    return Trajectory(id, "?", calls=[call], rewards={"correct": reward})


def advantages_of(name: str) -> list[float]:
    """Return one number per rollout, because all of its tokens have the same advantage here."""
    algorithm = ALGORITHMS.resolve(name)()
    if name == "rae":
        algorithm = msgspec.structs.replace(algorithm, memory={"rlm@0": MEMORY})
    rows = token_sequences(algorithm.assign_advantages(groups(), {}).rollouts)
    if needs_of(algorithm).values:
        for row in rows:
            row.streams["values"] = np.full(len(row), VALUE, np.float32)
    finish_advantages(algorithm, rows)
    advantages = {row.name.partition("/")[0]: float(row.advantages[row.rl != 0][0]) for row in rows}
    return [
        advantages.get(f"{item}{n}", 0.0)
        for item, rewards in zip("ab", REWARDS, strict=True)
        for n in range(len(rewards))
    ]


def tokens(chosen: Any = None) -> PolicyLossInputs:
    now, old, sampler = (
        torch.tensor(p, dtype=torch.float64).log() for p in (P_NOW, P_OLD, P_SAMPLER)
    )
    advantages, lag = (torch.tensor(values, dtype=torch.float64) for values in (ADVANTAGES, LAGS))
    sums = SequenceSums(torch.tensor(OWNERS), 2, torch.ones(5) > 0)
    return PolicyLossInputs(now.requires_grad_(), old, sampler, advantages, sums, chosen, lag)


def loss_of(name: str) -> tuple[list[float], list[float]]:
    """Return (value, derivative by l) of each token."""
    loss, batch = POLICY_LOSSES.resolve(name)(**OPTIONS.get(name, {})), tokens()
    if isinstance(loss, TokenSelectingLoss):
        now, old, advantages = (
            values.detach().numpy() for values in (batch.now, batch.old, batch.advantages)
        )
        chosen = loss.choose(
            TokenSelectionInputs(now, old, advantages, np.arange(5, dtype=np.uint64))
        )
        batch = batch._replace(chosen=torch.from_numpy(chosen))
    value = loss.per_token(batch)
    (slope,) = torch.autograd.grad(value.sum(), batch.now)
    return value.tolist(), slope.tolist()


def factors_of(name: str) -> list[float]:
    factors: list[float] = (
        CORRECTIONS.resolve(name)(**OPTIONS.get(name, {})).factor(tokens()).tolist()
    )
    return factors


# --- tables ---------------------------------------------------------------------------------------


def estimators() -> Iterator[Sequence[str]]:
    yield "name", "advantages: 1, ½, 0, 0 · 1, 1", "what it is"
    for name in ALGORITHMS:
        if name not in OTHERS:
            yield (
                f"`{name}`",
                _numbers(advantages_of(name), 4),
                _first_sentence(_estimator_doc(ALGORITHMS[name])),
            )


def losses() -> Iterator[Sequence[str]]:
    yield "name", "loss of each token", "its derivative by l", "formula", "options"
    for name in POLICY_LOSSES:
        kind, (value, slope) = POLICY_LOSSES.resolve(name), loss_of(name)
        yield (
            f"`{name}`",
            _numbers(value),
            _numbers(slope),
            _summary_and_formula(kind.__doc__),
            _options(kind),
        )


def corrections() -> Iterator[Sequence[str]]:
    yield "name", "factor of each token", "what it does", "options"
    for name in CORRECTIONS:
        kind = CORRECTIONS.resolve(name)
        yield f"`{name}`", _numbers(factors_of(name)), _first_sentence(kind.__doc__), _options(kind)


def kls() -> Iterator[Sequence[str]]:
    yield "name", "estimate of each token", "its derivative by l"
    for name in ("k1", "k2", "k3", "k3+"):
        batch = tokens()
        value = kl_estimate(name, batch.now, batch.old)  # type: ignore[arg-type]
        (slope,) = torch.autograd.grad(value.sum(), batch.now)
        yield f"`{name}`", _numbers(value.tolist()), _numbers(slope.tolist())


def values() -> Iterator[Sequence[str]]:
    yield "V", "V at the step's start", "return", "½ max((V - R)², (clip(V, V_old ± 0.2) - R)²)"
    for now, old, returns in ((0.5, 0.0, 1.0), (0.5, 0.0, 0.0), (0.1, 0.0, 1.0)):
        batch = CriticLossInputs(
            *(torch.tensor([number], dtype=torch.float64) for number in (now, old, returns))
        )
        yield (
            str(now),
            str(old),
            str(returns),
            _numbers(ValueLoss().per_token_loss(batch).tolist(), 4),
        )


def reductions() -> Iterator[Sequence[str]]:
    yield "name", "as others call it", "weight of a token of each rollout", "divided by"
    counts = [[{"0": num} for num in lengths] for lengths in LENGTHS]
    others = {ours: theirs for theirs, ours in ALSO.items()}
    for name in ("rollout", "call", "token", "constant", "group", "prompt", "sum"):
        per_group, denominator = weights(counts, name, rollout_tokens=10)  # type: ignore[arg-type]
        column = [rollout["0"] for group in per_group for rollout in group]
        yield (
            f"`{name}`",
            f"`{others[name]}`" if name in others else "",
            _numbers(column),
            f"{denominator:g}",
        )


# --- presets --------------------------------------------------------------------------------------

WHOLE = ("algorithm", "policy", "corrections", "value")
"""Fields that are shown with their options in one cell."""


def preset_options() -> Iterator[Sequence[str]]:
    """Every option of ``rl`` that a preset sets to another value than its default."""
    run = Run(policy=PolicySpec(path="tiny"), rl=RlSpec())
    columns = [_flat(each.rl) for each in (run, *(with_preset(run, name) for name in PRESETS))]
    yield "option", "default", *(f"`{name}`" for name in PRESETS)
    for option in dict.fromkeys(option for column in columns for option in column):
        cells = [column.get(option, "") for column in columns]
        if any(cell not in ("", cells[0]) for cell in cells):
            yield f"`{option}`", *(f"`{cell}`" if cell else "" for cell in cells)


def preset_names() -> Iterator[Sequence[str]]:
    """What a name that an override chooses stands for, where it differs from its default."""
    yield "chosen by name", "default", *(f"`{name}`" for name in PRESETS)
    for field, registry in (("algorithm", ALGORITHMS), ("loss.policy", POLICY_LOSSES)):
        by_preset = {
            name: preset.algorithms if field == "algorithm" else preset.policies
            for name, preset in PRESETS.items()
        }
        for name in dict.fromkeys(name for names in by_preset.values() for name in names):
            shown = {key for names in by_preset.values() for key in names.get(name, ())}
            chosen = [
                choices_by_field(preset)[f"rl.{field}"].build(name) if name in names else None
                for preset, names in by_preset.items()
            ]
            cells = [_pick(each, shown) for each in (registry.build(name), *chosen)]
            if any(cell not in ("", cells[0]) for cell in cells):
                yield f"`rl.{field}={name}`", *(f"`{cell}`" if cell else "" for cell in cells)


def preset_notes() -> Iterator[Sequence[str]]:
    yield "preset", "the defaults of", "what stays different"
    for name, preset in PRESETS.items():
        yield f"`{name}`", preset.trainer, " ".join(preset.differences)


def _flat(value: Any, path: str = "rl") -> dict[str, str]:
    """Dotted name -> value, of a configuration."""
    if path.endswith("memory"):
        return {}
    if path.rpartition(".")[2] in WHOLE or not isinstance(value, msgspec.Struct):
        own = {path: _shown(value)}
        if path != "rl.algorithm":
            return own
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return own | {
            key: text
            for name, field in fields.items()
            for key, text in _flat(field, f"{path}.{name}").items()
        }
    return {
        key: text
        for name in value.__struct_fields__
        for key, text in _flat(getattr(value, name), f"{path}.{name}").items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if not isinstance(value, msgspec.Struct):
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    name = value.__struct_config__.tag
    if hasattr(value, "memory"):
        return str(name)
    return f"{name or ''}({_pick(value, set(value.__struct_fields__))})"


def _pick(value: Any, options: set[str]) -> str:
    names = [] if value is None else [n for n in value.__struct_fields__ if n in options]
    return ", ".join(f"{name}={_shown(getattr(value, name))}" for name in names)


# --- objectives -----------------------------------------------------------------------------------


def objective_list() -> Iterator[Sequence[str]]:
    """Return a row for each objective, with the presets that have it."""
    yield "objective", "when", *(f"`{name}`" for name in PRESETS)
    for name, objective in OBJECTIVES.items():
        has = ("yes" if name in preset.objectives else "" for preset in PRESETS.values())
        yield f"[`{name}`](#{name})", objective.when.rstrip("."), *has


def objective_sections() -> str:
    """Return a section for each objective: its paper, its formula, its options, and its form in
    each trainer."""
    sections = []
    for name, objective in OBJECTIVES.items():
        lines = [
            f"### {name}",
            f"{objective.title}. {objective.when}",
            "",
            f"- Minimizes: `{objective.formula}`",
            f"- Sets: {_set_by(name, None)}",
        ]
        lines += [f"- Note: {objective.note}"] if objective.note else []
        for preset, theirs in PRESETS.items():
            if name in theirs.objectives:
                cell = theirs.objectives[name]
                note = f" {cell.note}" if cell.note else ""
                trainer = theirs.trainer.partition(" (")[0].partition(",")[0]
                lines.append(
                    f"- {trainer}, `{cell.name}` (`--preset {preset}`): {_set_by(name, preset)}"
                    f"{note and '.'}{note}"
                )
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _set_by(objective: str, preset: str | None) -> str:
    """Return the options of ``rl`` that an objective sets to values other than the defaults, or
    other than those of the preset alone."""
    run = Run(policy=PolicySpec(path="tiny"), rl=RlSpec())
    base = run if preset is None else with_preset(run, preset)
    rl = override(base, [f"rl.objective={objective}"], choices_by_field(preset)).rl
    assert rl is not None
    usual = _flat(RlSpec(algorithm=type(rl.algorithm)())) | (_flat(base.rl) if preset else {})
    names = ("rl.algorithm", "rl.loss.")
    shown = [
        f"`{option}={value}`"
        for option, value in _flat(rl).items()
        if option.startswith(names)
        and (option in ("rl.algorithm", "rl.loss.policy") or usual.get(option) != value)
    ]
    return ", ".join(shown)


TABLES: dict[str, Callable[[], Iterator[Sequence[str]]]] = {
    "estimators": estimators,
    "losses": losses,
    "corrections": corrections,
    "kl": kls,
    "critic": values,
    "reductions": reductions,
}


PRESET_TABLES = {"options": preset_options, "names": preset_names, "notes": preset_notes}
OBJECTIVE_TABLES = {"objectives": objective_list, "sections": objective_sections}
Tables = Mapping[str, Callable[[], Iterator[Sequence[str]] | str]]
"""Map the name of a place in a page to its rows or its text."""
PAGES: Sequence[tuple[Path, Tables]] = (
    (PAGE, TABLES),
    (OBJECTIVES_PAGE, {**OBJECTIVE_TABLES, **PRESET_TABLES}),
)


def written(text: str, tables: Tables = TABLES) -> str:
    """Return ``text`` with current tables."""
    for name, rows in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in text or end not in text:
            raise SystemExit(
                f"a page has no place for the table '{name}': add {begin} and {end} to it"
            )
        head, _, tail = text.partition(begin)
        made = rows()
        content = made if isinstance(made, str) else _table(list(made))
        text = f"{head}{begin}\n{content}\n{end}{tail.partition(end)[2]}"
    return text


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


def _numbers(values: Sequence[float], split_after: int = 0) -> str:
    shown = [f"{round(value, 3) + 0.0:g}" for value in values]
    if split_after and len(shown) > split_after:
        return f"{', '.join(shown[:split_after])} · {', '.join(shown[split_after:])}"
    return ", ".join(shown)


def _options(kind: Any) -> str:
    return ", ".join(f"`{field.name}={field.default!r}`" for field in msgspec.structs.fields(kind))


def _estimator_doc(kind: Any) -> str | None:
    """The docstring of the class in the table of estimators, and otherwise of the file."""
    home = sys.modules[kind.__module__]
    return kind.__doc__ if home in (fork_estimators, group_estimators) else home.__doc__


def _summary_and_formula(doc: str | None) -> str:
    """Return the summary of a loss and, if the next paragraph begins with its formula, that
    formula, escaped for a table."""
    begins = "The loss of a token is "
    summary, *details = (doc or "").strip().split("\n\n")
    formula = _first_sentence(details[0]) if details and begins in details[0] else ""
    return _first_sentence(summary) + (f": {formula.removeprefix(begins)}" if formula else "")


def _first_sentence(doc: str | None) -> str:
    """Return the first sentence of the first paragraph of ``doc``, escaped for a table."""
    paragraph = " ".join((doc or "").strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.])\.(?:\s|$)", paragraph)[0]
    return sentence.replace("``", "`").replace("|", "\\|").rstrip(".:")


def main() -> int:
    outdated = 0
    for page, tables in PAGES:
        text = page.read_text(encoding="utf-8")
        current = written(text, tables)
        if "--check" not in sys.argv[1:]:
            page.write_text(current, encoding="utf-8")
        elif current != text:
            print(f"{page.name} is outdated: run {sys.argv[0]}", file=sys.stderr)
            outdated = 1
    return outdated


if __name__ == "__main__":
    sys.exit(main())
