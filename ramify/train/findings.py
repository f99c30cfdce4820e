"""Detect faults of a training run, such as divergence or collapse, from its metrics.

Each kind of fault has one small function.

    values of a step, history of its stage  ─> TrainingFault("divergence", "one update moved …: …")

A finding names a cause and the option to change, in one sentence. Since single steps are noisy, a
fault is only reported if it shows in ``num_steps`` consecutive steps. Values are compared with
those of the first steps of the stage. This module defines the signs of each fault, their thresholds
and the sentences; which findings are reported again, and what follows from them, is decided in
``training_guard.py``.

The findings in ``CONSEQUENCES`` usually result from a divergence, so they are not reported in the
steps after one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from ramify.evaluate.evaluation_report import RIGHT
from ramify.train.config_redaction import check_field_bounds, check_none_or_positive

Values = Mapping[str, float]
"""The metrics of one step, by name."""


class CollapseAlarms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Thresholds beyond which the metrics of a training step are reported as signs of collapse.

    A threshold of None disables its report.
    """

    zero_variance: float | None = 0.9
    """Reported if at least this share of groups has the same reward in all rollouts. Almost nothing
    is then learned: the items are too easy or too hard, or the reward is constant."""
    entropy: float | None = 0.1
    """Reported if the entropy falls to this fraction of its value in the first steps. The policy
    then no longer explores."""
    length: float | None = 3.0
    """Reported if the mean length of rollouts grows or shrinks by this factor, compared with the
    first steps."""
    clipped: float | None = 0.3
    """Reported if the gradient of at least this share of tokens is clipped."""
    kl: float | None = 0.3
    """A step counts as a divergence if the KL (nats per token) from the policy before it to the
    policy after it (``post_kl``) reaches this value."""
    mismatch_kl: float | None = 0.05
    """The engine counts as stale if the KL (nats per token) between sampler and trainer reaches
    this value."""
    truncated: float | None = 0.8
    """Reported if at least this share of rollouts is cut by a limit, and at most half as many were
    cut at first. The same threshold applies to children that are cut or fail. It also applies to
    replies that are cut and cells that raise, if their share was as large in the first steps."""
    failed: float | None = 0.5
    """Share of rollouts that failed for reasons other than the policy, and share of answers for
    which the task's score failed. If so many answers have no score, and nothing is learned from the
    others, the run ends with an error (see ``guard.then``)."""
    reward: float | None = 0.25
    """Reported if the mean training reward of two steps falls by more than this share of its peak.
    The same share applies to the best validation reward. A fall within five standard errors, or
    within the confidence interval, counts as noise."""
    length_corr: float | None = 0.9
    """The reward counts as following length if their correlation within groups reaches this value
    in three steps."""
    abstained: float | None = 0.9
    """Reported if a signal abstains on at least this share of rollouts in two consecutive steps.
    Legitimate reasons to abstain are not counted."""
    window: int = 5
    """Number of steps at the start of a stage whose average is compared with later steps. Steps in
    which something was reported are excluded."""

    def __post_init__(self) -> None:
        limits = {name: getattr(self, name) for name in self.__struct_fields__ if name != "window"}
        check_none_or_positive("guard.alarms", "no alarm", **limits)
        check_field_bounds("guard.alarms", least=1, window=self.window)
        if self.length is not None:
            check_field_bounds("guard.alarms", above=1, length=self.length)


class TrainingFault(NamedTuple):
    """A fault that was detected in a run, and a sentence that states its cause and remedy."""

    name: str
    text: str
    """One sentence with the cause, and with the option to change."""
    num_steps: int = 1
    """Number of consecutive steps that must show the fault before it is reported."""
    is_curable: bool = False
    """Whether a rollback to an earlier policy with a smaller learning rate may fix the fault."""


class StageMetricHistory(NamedTuple):
    """Values from earlier steps of the training stage, with which the current step is compared."""

    first: Values
    """Means over the first steps of the stage, together with the highest reward ``peak_reward`` and
    its standard error ``peak_error``. Empty before the first step."""
    recent: Mapping[str, list[float]]
    """Name -> values of the last ``RECENT`` steps before this one, for ``WATCHED``."""


RECENT = 2
WATCHED = ("reward", "reward_length_corr")
BASELINE = ("entropy", "length_mean", "truncated_rollouts", "cut_replies", "cell_errors")
"""Metrics whose first values are kept."""
CONSEQUENCES = frozenset(
    {
        "entropy_collapse", "truncation_spiral", "length", "falling_reward", "too_hard", "clipped",
        "constant_reward", "no_variance", "dead_children", "failing_cells", "length_hacking",
    }
)  # fmt: skip
_MIN_CHILDREN = 4
_WRONG_SIGN = -0.5
_CONTROL = 0.5
"""Threshold for the share of replies with a control token of another chat template."""
_STANDARD_ERRORS = 5.0
_BENIGN = ("solved", "no_error", "no_tool_was_used", "no_demonstration", "rejected", "empty")
"""Prefixes of the legitimate reasons for which a signal may abstain."""


class _FindingRule(NamedTuple):
    """A rule that detects one kind of fault in a training step."""

    says: Callable[[Values, StageMetricHistory, float], str]
    """A function that returns the finding's sentence, or an empty string if the step does not show
    the fault."""
    needs: tuple[str, ...]
    """Metrics that the rule needs. Without them the step cannot be judged."""
    limit: str
    """Field of ``CollapseAlarms`` with the rule's threshold; empty if it has none."""
    num_steps: int
    is_curable: bool


_FINDING_RULES: dict[str, _FindingRule] = {}
"""Map the name of each kind of fault to its rule. Causes come before their consequences."""


def step_findings(
    values: Values, history: StageMetricHistory, alarms: CollapseAlarms
) -> Iterator[tuple[str, TrainingFault | None]]:
    """Check a step for every kind of fault whose metrics are available.

    Yields the name of each kind together with the finding, or with None if ``values`` do not show
    the fault.
    """
    for name, rule in _FINDING_RULES.items():
        limit = getattr(alarms, rule.limit) if rule.limit else 0.0
        if limit is None or any(need not in values for need in rule.needs):
            continue
        text = rule.says(values, history, limit)
        finding = TrainingFault(name, text, rule.num_steps, rule.is_curable) if text else None
        yield name, finding


def finding_metric_names(name: str) -> tuple[str, ...]:
    """Return the names of the metrics from which a kind of finding, such as divergence, is
    detected.

    ``name`` is a kind of finding, or a limit that the user sets (``max_kl`` or ``min_entropy``).
    """
    rule = _FINDING_RULES.get(name)
    return rule.needs if rule is not None else _OTHER_METRICS.get(name, ())


_OTHER_METRICS = {
    "negated_reward": ("validation/reward", "reward"),
    "falling_validation": ("validation/reward",),
    "max_kl": ("approx_kl", "ref_kl"),
    "min_entropy": ("entropy",),
}
"""Metrics behind the findings of evaluations and behind the limits that a user sets."""

_Says = Callable[[Values, StageMetricHistory, float], str]


def _finding(
    name: str, *needs: str, limit: str = "", num_steps: int = 1, is_curable: bool = False
) -> Callable[[_Says], _Says]:
    def add(says: _Says) -> _Says:
        _FINDING_RULES[name] = _FindingRule(says, needs, limit, num_steps, is_curable)
        return says

    return add


@_finding("failing_score", "score_errors", "scored_answers", limit="failed")
def _failing_score(values: Values, history: StageMetricHistory, limit: float) -> str:
    failed, scored = values["score_errors"], values["scored_answers"]
    if not is_mostly_unscored(failed, scored, limit):
        return ""
    return (
        f"the task's score failed for {failed:.0f} of {failed + scored:.0f} rollouts with an "
        "answer, so nothing is learned from them: a score must return a number for every answer, "
        "such as 0 for one that it cannot read"
    )


def is_mostly_unscored(failed: float, scored: float, limit: float | None) -> bool:
    """Return True if scoring failed for at least the fraction ``limit`` of all answers.

    ``failed`` and ``scored`` are numbers of rollouts.
    """
    return limit is not None and failed > 0 and failed >= limit * (failed + scored)


@_finding("failed_rollouts", "failed_share", limit="failed")
def _failed(values: Values, history: StageMetricHistory, limit: float) -> str:
    share = values["failed_share"]
    is_score = is_mostly_unscored(
        values.get("score_errors", 0.0), values.get("scored_answers", 0.0), limit
    )
    if share < limit or is_score:
        return ""
    return (
        f"{share:.0%} of rollouts failed for reasons other than the policy: read their errors in "
        "the log, and check the sandbox (sandbox.provider), the engine and the task's score"
    )


@_finding("wrong_sign", "advantage_reward_corr", num_steps=2)
def _wrong_sign(values: Values, history: StageMetricHistory, limit: float) -> str:
    now = values["advantage_reward_corr"]
    if now > _WRONG_SIGN:
        return ""
    return (
        f"better rollouts get lower advantages (correlation {now:.2f} within groups): the credit "
        "has the wrong sign; check rl.algorithm and the weights of rl.signals"
    )


@_finding("divergence", "post_kl", limit="kl", is_curable=True)
def _divergence(values: Values, history: StageMetricHistory, limit: float) -> str:
    if values["post_kl"] < limit:
        return ""
    return (
        f"one update moved the policy by a KL of {values['post_kl']:.3g} nats per token, so far "
        "that it loses what it had learned: lower rl.optim.lr (now "
        f"{values.get('lr', 0.0):.3g}), or set rl.optim.max_grad_norm"
    )


@_finding("stale_engine", "staleness_max", num_steps=2)
def _stale(values: Values, history: StageMetricHistory, limit: float) -> str:
    age, allowed = values["staleness_max"], values.get("staleness_allowed", math.inf)
    if age <= allowed:
        return ""
    return (
        f"tokens were sampled with weights {age:.0f} steps old, but the limit is {allowed:.0f}: "
        "the engine did not load the newest weights; check inference.weight_sync and the engine log"
    )


@_finding("sampler_mismatch", "mismatch_kl", limit="mismatch_kl", num_steps=2)
def _mismatch(values: Values, history: StageMetricHistory, limit: float) -> str:
    if values["mismatch_kl"] < limit:
        return ""
    return (
        f"sampler and trainer differ by a KL of {values['mismatch_kl']:.3g} nats per token: the "
        "engine is stale, or uses a different precision; check inference.weight_sync, "
        "policy.dtype and compute.precision"
    )


@_finding("wrong_template", "control_tokens", num_steps=2)
def _template(values: Values, history: StageMetricHistory, limit: float) -> str:
    share = values["control_tokens"]
    if share < _CONTROL:
        return ""
    return (
        f"{share:.0%} of replies contain a control token that should have ended them: the "
        "chat template is not the one that the policy was trained with; check "
        "chat_template.jinja and the end token of policy.path"
    )


@_finding("endless_replies", "cut_replies", limit="truncated", num_steps=2)
def _no_end(values: Values, history: StageMetricHistory, limit: float) -> str:
    share = values["cut_replies"]
    # A policy that ended its replies at first has forgotten it: see truncation_spiral.
    if share < limit or history.first.get("cut_replies", 1.0) < limit:
        return ""
    return (
        f"{share:.0%} of replies were cut at their token limit from the first step on: the policy "
        "does not write its end token; check that its demonstrations end with it, or raise "
        "limits.max_reply_tokens"
    )


@_finding("dead_children", "dead_children", limit="truncated", num_steps=2)
def _children(values: Values, history: StageMetricHistory, limit: float) -> str:
    share, num = values["dead_children"], values["num_children"]
    if share < limit or num < _MIN_CHILDREN:
        return ""
    return (
        f"{share:.0%} of {num:.0f} children were cut by a limit or failed, so parents get no "
        "answers: raise limits (max_turns, max_calls, max_tokens), or check the models in depths"
    )


@_finding("judges_abstain", limit="abstained", num_steps=2)
def _abstain(values: Values, history: StageMetricHistory, limit: float) -> str:
    for name in [key.removesuffix("/read") for key in values if key.endswith("/read")]:
        start = f"{name}/abstained/"
        reasons = {
            key.removeprefix(start): value
            for key, value in values.items()
            if key.startswith(start) and not key.removeprefix(start).startswith(_BENIGN)
        }
        num = math.fsum(reasons.values())
        total = num + values[f"{name}/read"]
        if num and num >= limit * total:
            why = max(reasons, key=lambda each: reasons[each]).replace("_", " ")
            return (
                f"signal '{name}' abstained on {num:.0f} of {total:.0f} rollouts ({why}): check "
                f"the model and the prompt of rl.signals.{name}, and the budget rl.judges"
            )
    return ""


@_finding("length_hacking", "reward_length_corr", limit="length_corr")
def _by_length(values: Values, history: StageMetricHistory, limit: float) -> str:
    last = [*history.recent.get("reward_length_corr", []), values["reward_length_corr"]]
    if len(last) <= RECENT or min(last) < limit:
        return ""
    return (
        f"within groups, the reward tracks the length (correlation {last[-1]:.2f}): rollouts are "
        "rewarded for being long; check the task's score, or set "
        "rl.algorithm.length_weight"
    )


def _is_mostly_scored(values: Values, limit: float) -> bool:
    """Return True if at least the fraction ``limit`` of all answers has a score.

    Otherwise equal rewards say nothing about the items, since answers without a score, which may be
    all wrong ones, are in no group.
    """
    failed, scored = values.get("score_errors", 0.0), values.get("scored_answers", 0.0)
    return not failed or scored >= limit * (failed + scored)


@_finding("constant_reward", "reward_min", "reward_max", limit="zero_variance", num_steps=2)
def _constant(values: Values, history: StageMetricHistory, limit: float) -> str:
    value = values["reward_max"]
    if value > values["reward_min"] or value == 0 or value >= RIGHT:
        return ""
    if not _is_mostly_scored(values, limit):
        return ""
    return (
        f"all rollouts of the step have the reward {value:.3g}, whatever they did: the task's "
        "score does not depend on the rollout; check task.name and its score"
    )


_SAME = ("zero_variance", "solve_all", "solve_none", "reward_min", "reward_max")


@_finding("too_easy", *_SAME, limit="zero_variance", num_steps=2)
def _too_easy(values: Values, history: StageMetricHistory, limit: float) -> str:
    if values["zero_variance"] < limit or values["solve_all"] < limit:
        return ""
    if not _is_mostly_scored(values, limit):
        return ""
    return (
        f"in {values['solve_all']:.0%} of groups every attempt is right: the items are too easy; "
        "give harder ones, or set rl.sample.settled_share"
    )


@_finding("too_hard", *_SAME, limit="zero_variance", num_steps=2)
def _too_hard(values: Values, history: StageMetricHistory, limit: float) -> str:
    if values["zero_variance"] < limit or values["solve_none"] < limit or values["reward_max"] > 0:
        return ""
    if not _is_mostly_scored(values, limit):
        return ""
    return (
        f"in {values['solve_none']:.0%} of groups no attempt is right: the items are too hard; "
        "give easier ones, partial reward, demonstrations (sft), or a larger rl.rollout.group"
    )


@_finding("no_variance", *_SAME, limit="zero_variance", num_steps=2)
def _no_variance(values: Values, history: StageMetricHistory, limit: float) -> str:
    is_constant = values["reward_max"] == values["reward_min"]
    if values["zero_variance"] < limit or is_constant or values["solve_all"] >= limit:
        return ""
    if not _is_mostly_scored(values, limit):
        return ""
    return (
        f"in {values['zero_variance']:.0%} of groups all attempts have the same reward, so next to "
        "nothing is learned: set rl.sample.max_items or rl.sample.settled_share, or raise "
        "rl.rollout.group"
    )


@_finding("failing_cells", "cell_errors", limit="truncated", num_steps=2)
def _cells(values: Values, history: StageMetricHistory, limit: float) -> str:
    share = values["cell_errors"]
    if share < limit or history.first.get("cell_errors", 1.0) < limit:
        return ""
    return (
        f"{share:.0%} of root cells raised an error from the first step on: the policy does not "
        "write code that runs, or its session lacks something; look at rollouts "
        "(schedule.save_rollouts_every) and at sandbox"
    )


@_finding("entropy_collapse", "entropy", limit="entropy", is_curable=True)
def _entropy(values: Values, history: StageMetricHistory, limit: float) -> str:
    now, before = values["entropy"], history.first.get("entropy", 0.0)
    if before <= 0 or now > limit * before:
        return ""
    return (
        f"the entropy is {now:.3g}, down from {before:.3g} at first: the policy no longer "
        "explores; lower rl.optim.lr, or set rl.loss.entropy or rl.loss.kl_beta"
    )


@_finding(
    "truncation_spiral", "truncated_rollouts", limit="truncated", num_steps=2, is_curable=True
)
def _spiral(values: Values, history: StageMetricHistory, limit: float) -> str:
    now, before = values["truncated_rollouts"], history.first.get("truncated_rollouts", 1.0)
    if now < limit or before > now / 2:
        return ""
    return (
        f"limits cut {now:.0%} of rollouts, up from {before:.0%} at first: the policy is learning "
        "not to stop; set rl.algorithm.overlong=punish, lower rl.optim.lr, or raise limits"
    )


@_finding("length", "length_mean", limit="length", is_curable=True)
def _length(values: Values, history: StageMetricHistory, limit: float) -> str:
    now, before = values["length_mean"], history.first.get("length_mean", 0.0)
    if before <= 0 or 1 / limit < now / before < limit:
        return ""
    return (
        f"rollouts have {now:.4g} tokens, compared with {before:.4g} at first: check whether the "
        "reward should cause that; rl.algorithm.length_weight and max_rollout_tokens limit it"
    )


@_finding("falling_reward", "reward", limit="reward", num_steps=2, is_curable=True)
def _falling(values: Values, history: StageMetricHistory, limit: float) -> str:
    now, peak = values["reward"], history.first.get("peak_reward")
    noise = _STANDARD_ERRORS * history.first.get("peak_error", 0.0)
    if peak is None or peak - now < max(noise, limit * abs(peak)) or peak == now:
        return ""
    return (
        f"the reward fell from {peak:.3g} to {now:.3g}: lower rl.optim.lr, or go back to the best "
        "checkpoint (guard.then=rollback)"
    )


@_finding("clipped", "clip_fraction", limit="clipped", is_curable=True)
def _clipped(values: Values, history: StageMetricHistory, limit: float) -> str:
    if values["clip_fraction"] < limit:
        return ""
    return (
        f"the gradient of {values['clip_fraction']:.0%} of tokens was clipped: lower rl.optim.lr, "
        "or use fewer rl.sample.minibatches"
    )


# --- of an evaluation


class ValidationScore(NamedTuple):
    """A validation reward with its 95 % interval, and the training reward of the preceding step."""

    reward: float
    low: float
    high: float
    trained: float | None
    error: float = 0.0
    """Standard error of the training reward ``trained``."""

    @classmethod
    def from_metrics(
        cls, values: Values, trained: float | None, error: float
    ) -> ValidationScore | None:
        """Read the score from the metrics of an evaluation.

        Returns None if the metrics contain no score.
        """
        reward = values.get("validation/reward")
        if reward is None:
            return None
        low, high = (values.get(f"validation/reward_{end}", reward) for end in ("low", "high"))
        return cls(reward, low, high, trained, error)


_CLEAR = 3.0
"""Number of standard errors by which a training reward must differ from another value to count as
different."""


def evaluation_findings(
    now: ValidationScore, best: ValidationScore | None, alarms: CollapseAlarms
) -> Iterator[TrainingFault]:
    """Yield the findings of an evaluation, such as a falling validation reward.

    Another finding is a training reward at odds with the validation reward. ``best`` is the earlier
    evaluation with the highest reward.
    """
    trained, before = now.trained, None if best is None else best.trained
    noise = _CLEAR * now.error
    # An interval without width is that of a single item, which proves nothing.
    if trained is not None and trained * now.reward < 0 and abs(trained) > noise:
        if now.low < now.high and not now.low <= 0 <= now.high:
            yield TrainingFault(
                "negated_reward",
                f"rollouts are rewarded with {trained:.3g} on average, and the same policy's "
                f"validation reward is {now.reward:.3g}: the training reward has the wrong sign; "
                "check the task's score and its weights",
            )
    elif best is not None and _has_fallen(now, best, alarms.reward):
        fell = f"the validation reward fell from {best.reward:.3g} to {now.reward:.3g}"
        if trained is not None and before is not None and trained - before > noise:
            yield TrainingFault(
                "negated_reward",
                f"{fell}, while the training reward rose from {before:.3g} to "
                f"{trained:.3g}: the two rewards disagree; check the task's score on training "
                "items",
            )
        else:
            yield TrainingFault(
                "falling_validation",
                f"{fell}: lower rl.optim.lr, or go back to the best checkpoint "
                "(guard.then=rollback)",
                is_curable=True,
            )


def _has_fallen(now: ValidationScore, best: ValidationScore, limit: float | None) -> bool:
    has_width = now.low < now.high and best.low < best.high
    fall = best.reward - now.reward
    return (
        limit is not None and has_width and now.high < best.low and fall >= limit * abs(best.reward)
    )
