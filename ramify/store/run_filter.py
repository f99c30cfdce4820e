"""The filter language for lists of stored runs, as in ``ramify runs 'when:yesterday stop:error'``.

    cost>0.1 stop:error when:yesterday model:qwen reward:0 -label:odd "two words" sort:cost

A run is listed if all conditions hold. ``sort:FIELD`` puts the largest or newest first, or sorts a
text from A to Z; ``sort:-FIELD`` does the opposite; ``group:FIELD`` puts rows with the same text
together. A condition that cannot be read is an error and is never ignored. The web page implements
the same language in ``viewer/static/filter.js``, and ``tests/store/filter_cases.json`` lists what
both must do. Runs are printed by ramify/cli/runs_command.py.
"""

from __future__ import annotations

import re
import time
from calendar import monthrange
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import cmp_to_key
from math import inf
from typing import NamedTuple

from ramify.errors import ConfigError, did_you_mean
from ramify.nearest_name import nearest_name
from ramify.store.run_summary import RunSummary

Number = Callable[[RunSummary], float | None]
Text = Callable[[RunSummary], str]
Condition = Callable[[RunSummary], bool]


class RunFilter(NamedTuple):
    """A filter for a list of runs, with the sort order and grouping of the list."""

    conditions: tuple[Condition, ...] = ()
    sort: str = ""
    """Field to sort by. If empty, the runs stay in the given order."""
    is_descending: bool = False
    group: str = ""
    """Field to group by. If empty, the runs are not grouped."""
    values: tuple[tuple[str, str], ...] = ()
    """(field, value) of each condition on a field in ``_SHORT``, used to explain that no run has
    the value."""

    @property
    def has_conditions(self) -> bool:
        """Return True if the filter has any condition that could exclude a run."""
        return bool(self.conditions)

    def apply(self, runs: Iterable[RunSummary]) -> list[RunSummary]:
        """Return the matching runs, in the order that the filter requests."""
        found = [run for run in runs if all(holds(run) for holds in self.conditions)]
        if not self.sort:
            return found
        value = _TEXTS.get(self.sort) or _NUMBERS.get(self.sort) or _TIMES[self.sort]
        sign = -1 if self.is_descending else 1

        def compare(a: RunSummary, b: RunSummary) -> int:
            x, y = value(a), value(b)
            if isinstance(x, str) or isinstance(y, str):
                x, y = str(x).lower() or None, str(y).lower() or None
            if x is None or y is None:  # runs without a value come last
                return (x is None) - (y is None)
            return -sign if x < y else sign if x > y else 0  # type: ignore[operator]

        return sorted(found, key=cmp_to_key(compare))

    def unknown_values(self, runs: Iterable[RunSummary]) -> list[str]:
        """Return a message for each value in the filter that no run has.

        It suggests other values. An example is ``no run has stop:eror: did you mean 'error'? known:
        error, final``.
        """
        runs = list(runs)
        said = []
        for name, value in self.values:
            known = {each for run in runs for each in _TEXTS[name](run).lower().split("\n") if each}
            named = value.replace(" ", "_")
            if known and not any(value in each or named in each for each in known):
                said.append(f"no run has {name}:{value}: {did_you_mean(value, known)}")
        return said

    def groups(self, runs: Iterable[RunSummary]) -> list[tuple[str, list[RunSummary]]]:
        """Group runs by the field that the filter names, such as the model.

        Returns pairs of a value and its runs, with the most frequent value first.
        """
        found: dict[str, list[RunSummary]] = {}
        for run in runs:
            found.setdefault(_TEXTS[self.group](run).replace("\n", ", "), []).append(run)
        return sorted(found.items(), key=lambda each: -len(each[1]))


def parse_run_filter(text: str, now: float | None = None) -> RunFilter:
    """Parse the text of a run filter.

    Dates are in local time and relative to ``now``, a Unix time that defaults to the current time.

    Raises ConfigError for a part that cannot be parsed. The error says what to write instead.
    """
    clock = time.time() if now is None else now
    _check_spaces(text)
    conditions: list[Condition] = []
    values: list[tuple[str, str]] = []
    sort, is_descending, group = "", False, ""
    for match in _PART.finditer(text):
        part, (minus, name, sign, raw) = match[0], match.groups("")
        name, value = name.lower(), raw.removeprefix('"').removesuffix('"').lower()
        if _OPEN.fullmatch(part):
            bare = part.strip('"')
            raise _filter_error(part, f"{bare} needs a value", _complete_example(bare))
        if name == "group":
            if value not in GROUPS:
                raise _filter_error(
                    part, f"rows can only be grouped by {_join_with_or(GROUPS)}", "group:origin"
                )
            group = value
        elif name == "sort":
            sort = value.removeprefix("-")
            if sort not in FIELDS:
                fix = f"sort:{_nearest_field(sort)}"
                raise _filter_error(
                    part, f"rows can only be sorted by {_join_with_or(FIELDS)}", fix
                )
            # Numbers sort from high to low, texts from A to Z. A minus reverses both.
            is_descending = (sort not in _TEXTS) == (sort == value)
        else:
            holds = _condition(part, name, sign, value, clock) if name else _has_words(value)
            conditions.append(_negate_condition(holds) if minus else holds)
            # If no run has the value, the user gets a hint.
            if name in _SHORT and value != "none" and not minus:
                values.append((name, value))
    return RunFilter(tuple(conditions), sort, is_descending, group, tuple(values))


# --- fields of runs


def corrected_reward(run: RunSummary) -> float | None:
    """Return a run's first reward, including corrections by people, or None if it was not
    scored."""
    corrected = run.review.rewards if run.review else {}
    return next(iter({**run.rewards, **corrected}.values()), None)


def origin_of(run: RunSummary) -> str:
    """Return the origin of a run, which is ``"evaluation"`` or ``"asked"``."""
    return "evaluation" if run.task else "asked"


def run_status(run: RunSummary) -> str:
    """Return the reason why a run stopped, or ``"unreadable"``, ``"running"`` or
    ``"interrupted"``.
    """
    if run.problem:
        return "unreadable"
    return str(run.stop or ("running" if run.alive else "interrupted"))


_NUMBERS: Mapping[str, Number] = {
    "cost": lambda run: run.cost,
    "tokens": lambda run: run.usage.total_tokens,
    "calls": lambda run: run.num_calls,
    "seconds": lambda run: run.seconds,
    "depth": lambda run: run.depth,
    "reward": corrected_reward,
}
_TIMES: Mapping[str, Number] = {"when": lambda run: run.started_at}
_TEXTS: Mapping[str, Text] = {
    "stop": run_status,
    "model": lambda run: run.model,
    "task": lambda run: run.task,
    "question": lambda run: run.question,
    "answer": lambda run: run.answer or "",
    "label": lambda run: "\n".join(run.review.labels_and_verdict) if run.review else "",
    "note": lambda run: run.review.note if run.review else "",
    "corrected": lambda run: "\n".join(run.review.rewards) if run.review else "",
    "id": lambda run: run.id,
    "origin": origin_of,
}
FIELDS = (*_NUMBERS, *_TIMES, *_TEXTS)
"""Names of all fields that a filter can use."""
_SHORT = ("origin", "task", "model", "stop", "label")
"""Text fields with few distinct values. If no run has a requested value, the explanation can list
the known ones."""
GROUPS = ("origin", "task", "model", "stop", "label", "question")
"""Fields by which runs can be grouped."""


def _words_of(run: RunSummary) -> str:
    stop = run_status(run)
    review = [*run.review.labels_and_verdict, run.review.note] if run.review else []
    parts = [run.question, run.model, stop, stop.replace("_", " "), run.id, run.task]
    return " ".join([*parts, run.answer or "", *review, run.problem or ""]).lower()


# --- parts of the text

_PART = re.compile(r'(-?)(?:([a-z_]+)(>=|<=|[:=<>]))?("[^"]*"?|\S+)', re.I)
_OPEN = re.compile(r'-?[a-z_]+(>=|<=|[:=<>])(?:""?)?', re.I)
_SPACED = re.compile(r"(?:(?<=^)|(?<=[\s-]))([a-z_]+)(\s*)(>=|<=|[<>=])(\s*)(\$?\d\S*)", re.I)
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ":": lambda a, b: a == b,
    "=": lambda a, b: a == b,
}


def _filter_error(part: str, why: str, fix: str) -> ConfigError:
    return ConfigError(f"filter {part!r}: {why}; use {fix}")


def _check_spaces(text: str) -> None:
    for match in _SPACED.finditer(text):
        name, before, sign, after, value = match.groups()
        if (before or after) and name.lower() in FIELDS:
            raise _filter_error(
                match[0], "a comparison must not contain spaces", f"{name}{sign}{value}"
            )


def _complete_example(part: str) -> str:
    """Add an example value to a filter condition that lacks one.

    The result is an example for an error message.
    """
    name = part.strip("-:=<>").lower()
    values = {"sort": FIELDS[0], "group": GROUPS[0], **dict.fromkeys(_NUMBERS, "0")}
    return part + {**values, **dict.fromkeys(_TIMES, "today")}.get(name, "none")


def _condition(part: str, name: str, sign: str, value: str, now: float) -> Condition:
    is_equal = sign in ":="
    if number := _NUMBERS.get(name):
        if value == "none" and is_equal:
            return lambda run: number(run) is None
        try:
            bound = float(value.removeprefix("$").replace(",", ""))
        except ValueError:
            why = f"{name} needs a number, not {value}"
            raise _filter_error(part, why, f"{name}{sign}0.1") from None
        return lambda run: (found := number(run)) is not None and _COMPARE[sign](found, bound)
    if moment := _TIMES.get(name):
        span = _parse_period(value, now)
        if span is None:
            fix = f"{name}{sign}{'today' if is_equal else '7d'}"
            why = (
                f"{name} must be today, yesterday, an age such as 7d, 12h or 30m, or a date such "
                f"as 2026-11-20, not {value}"
            )
            raise _filter_error(part, why, fix)
        return lambda run: _is_in(moment(run) or 0.0, sign, *span)
    text = _TEXTS.get(name)
    if text is None:
        why = f"unknown field {name}: use one of {', '.join(FIELDS)}, or put the text in quotes"
        raise _filter_error(part, why, f"{_nearest_field(name)}{sign}{value}")
    if not is_equal:
        raise _filter_error(part, f"{name} is text, which has no order", f"{name}:{value}")
    if value == "none":
        return lambda run: not text(run)
    if sign == "=":
        return lambda run: value in text(run).lower().split("\n")
    named = value.replace(" ", "_")  # "max turns" is stored as max_turns
    return lambda run: value in text(run).lower() or named in text(run).lower()


def _has_words(value: str) -> Condition:
    return lambda run: value in _words_of(run)


def _negate_condition(holds: Condition) -> Condition:
    return lambda run: not holds(run)


def _join_with_or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _nearest_field(name: str) -> str:
    close = nearest_name(name, FIELDS, cutoff=0)
    assert close is not None  # any field is alike enough
    return close


# --- times

_AGES_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")
_DATE = re.compile(r"(\d{4})(?:-(\d\d)(?:-(\d\d)(?:t(\d\d):(\d\d))?)?)?")


def _parse_period(value: str, now: float) -> tuple[float, float] | None:
    """Parse a period, and return its start and its exclusive end as Unix times.

    Returns None if ``value`` is invalid.

    The period is a minute, day, month or year in local time. It can also be an age such as ``2h``,
    a period that began two hours ago and has no end.
    """
    today = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)
    if value in ("today", "yesterday"):
        first = today - timedelta(days=value == "yesterday")
        return first.timestamp(), (first + timedelta(days=1)).timestamp()
    if age := _AGE.fullmatch(value):
        return now - float(age[1]) * _AGES_S[age[2]], inf
    date = _DATE.fullmatch(value)
    if date is None:
        return None
    year, month, day, hour, minute = (None if part is None else int(part) for part in date.groups())
    try:
        first = datetime(year or 1, month or 1, day or 1, hour or 0, minute or 0)
        if hour is not None:
            after = first + timedelta(minutes=1)
        elif day is not None:
            after = first + timedelta(days=1)
        elif month is not None:
            after = first + timedelta(days=monthrange(first.year, month)[1])
        else:
            after = first.replace(year=first.year + 1)
        return first.timestamp(), after.timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _is_in(at: float, sign: str, first: float, after: float) -> bool:
    """Return True if a time relates to a period as the operator ``sign``, such as ``>``, requires.

    The period begins at ``first`` and ends before ``after``. A period without an end, which comes
    from an age such as ``2h``, is compared as the moment ``first``.
    """
    last = first if after == inf else after
    match sign:
        case ">":
            return at >= last
        case ">=":
            return at >= first
        case "<":
            return at < first
        case "<=":
            return at < last
        case _:
            return first <= at < after
