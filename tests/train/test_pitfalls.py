"""Known silent failures of this kind of training, and the tests that guard against each.

 1  entropy and KL rise while reward falls
    train/test_guards.py::test_each_alarm, test_limits_stop_or_warn; the clip and the schedule of 2 and 3
 2  a gap to the teacher that is not bounded
    test_e3_advantages_with_a_clipped_gap_through_the_clipped_loss_and_the_kl
    train/signals/test_compose.py::test_e3_teacher_hybrid_surrogate_and_kl
 3  a frozen teacher drags back to where it stood
    train/signals/test_compose.py::test_weights_follow_their_schedule_and_at_zero_the_signal_is_not_wanted, test_routes
    train/signals/test_teacher.py::test_only_tokens_that_the_hint_moves_count_where_evidence_is_asked_for
    train/signals/test_teacher.py::test_turns_after_the_one_that_a_hint_is_about_may_be_left_out
 4  a live teacher erodes                           a warning, and slow ones in its place
    train/signals/test_teacher.py::test_options_that_mean_nothing, test_frozen_averaged_live_and_other_teachers
 5  hints that hold the answer
    train/signals/test_judges.py::test_filters, test_short_golds_leak_as_words_of_their_own_only
    train/signals/test_judges.py::test_a_judge_never_sees_the_gold_and_is_told_what_is_quoted
 6  wrong hints are worse than none                 abstaining is what happens by default
    train/signals/test_judges.py::test_hints_are_read_strictly, test_a_judge_that_is_rate_limited_or_refuses_is_an_abstention
    train/signals/test_programs.py::test_shuffled_hints_are_of_another_problem
 7  the longest hint wins
    train/signals/test_judges.py::test_hindsight_takes_one_hint_and_counts_what_it_rejects
    train/signals/test_teacher.py::test_the_hint_whose_teacher_agrees_most_with_the_policy_is_chosen
 8  rollouts grow until they are cut off
    train/advantages/test_estimators.py::test_cut_off_rollouts_can_be_masked_by_every_estimator
    train/test_guards.py::test_each_alarm
    train/signals/test_judges.py::test_hindsight_passes_over_what_tells_nothing
    train/signals/test_compose.py::test_early_tokens_are_trusted_more
 9  it gets worse after its best step
    train/test_guards.py::test_patience, train/test_loop_algorithms.py::test_patience_leaves_the_best_checkpoint
10  a log-probability of 0 instead of a missing one
    test_10_a_component_without_its_stream_is_refused
    train/signals/test_teacher.py::test_what_cannot_be_scored_has_no_reading_and_never_zeros
    train/signals/test_teacher.py::test_an_engine_that_leaves_a_token_out_is_refused
11  text made into ids again
    train/signals/test_teacher.py::test_scores_are_those_of_the_hinted_path_from_its_first_token_on
    engine/test_tokens.py::test_a_client_that_tokenises_anew_is_counted_and_split
12  teacher and student computed by different code
    test_12_a_policy_that_is_its_own_teacher_moves_nothing
    train/signals/test_teacher.py::test_the_policy_as_its_own_teacher_teaches_exactly_nothing
13  a term that is silently off
    test_13_whether_a_term_acts_is_measured
    train/signals/test_compose.py::test_a_teacher_that_is_silently_off_is_said
14  a group of one keeps its raw reward; a weight that is ignored; bias to short ones
    test_14_one_alone_gets_nothing_and_length_buys_nothing
    train/signals/test_compose.py::test_e2_step_buckets
    train/advantages/test_credit.py::test_a_group_of_one_without_siblings_has_no_advantage
15  "it ran" taken for "it is right"
    train/signals/test_compose.py::test_process_reward_that_does_not_go_with_the_outcome_shows
16  made-up tool output, boxes in boxes, templates applied twice
    engine/test_retool.py::test_an_invented_output_is_never_read, test_a_stop_text_belongs_to_the_reply,
    test_a_whole_conversation
    tasks/test_toolmath.py::test_nested_boxes_are_whole
    models/test_renderer.py::test_a_conversation_is_written_as_the_template_writes_it
17  a sandbox that blocks its loop, shows its host's environment, or changes the code
    sandbox/test_process.py::test_many_sessions_open_at_once, test_no_key_no_descriptor_no_argument_of_the_host
    engine/test_retool.py::test_a_whole_conversation

What is wrong with what comes in:

a judge outside its format
    train/signals/test_judges.py::test_votes_are_read_strictly, test_hints_are_read_strictly,
    test_every_turn_is_judged_and_bad_output_is_counted
a hint that holds the answer, or is too long
    train/signals/test_judges.py::test_filters
another vocabulary
    train/signals/test_teacher.py::test_a_teacher_with_another_vocabulary_is_refused_at_the_start
a reward that is none
    train/advantages/test_estimators.py::test_a_reward_that_is_no_number_is_named_and_its_group_goes_on
    train/signals/test_compose.py::test_missing_and_impossible_rewards_are_left_out_of_their_group,
    test_a_number_that_is_none_is_left_out_and_its_rollout_named
a stream of another length
    train/signals/test_compose.py::test_a_stream_of_the_wrong_length_is_refused_with_both
an unknown loss or estimator
    train/test_registry.py::test_an_unknown_name_gets_the_nearest, test_in_a_run_as_well

Of the worked examples E1 to E4 the first two are in train/signals/test_compose.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.errors import ConfigError
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.data.pack import pack
from ramify.train.losses import PpoClip
from ramify.train.losses.loss import LossEntries, LossSpec, compute
from tests.train.backends.small import policy, tree
from tests.train.trees import call, group
from tests.train.trees import tree as rollout


def test_each_test_that_is_named_above_is_there() -> None:
    tests, page = Path(__file__).parents[1], __doc__ or ""
    named = re.findall(r"([\w/]+\.py)::(test_\w+)", page)
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (tests / file).read_text(), (file, name)
    everything = "".join(
        path.read_text() for path in {tests / file for file, _ in named} | {Path(__file__)}
    )
    for name in re.findall(r"(?<![\w/])test_\w+(?![\w.])", page):
        assert f"def {name}(" in everything, name


def entries(now: Any, denominators: dict[str, float], **streams: Any) -> LossEntries:
    given = {
        name: torch.tensor(np.asarray(each), dtype=torch.float64) for name, each in streams.items()
    }
    return LossEntries(
        torch.tensor(np.asarray(now), dtype=torch.float64, requires_grad=True), given, denominators
    )


def test_e3_advantages_with_a_clipped_gap_through_the_clipped_loss_and_the_kl() -> None:
    """A = -0.5 + the gap (0, 1.386, -4.500 clipped to -2): losses 0.5, -1.134, 2.0; k3 0.023,
    0.072, 0.307 with β = 0.01."""
    p_old, p_teacher, p_now = (
        np.array([0.5, 0.2, 0.9]),
        np.array([0.5, 0.8, 0.01]),
        np.array([0.5, 0.3, 0.45]),
    )
    advantages = -0.5 + np.clip(np.log(p_teacher / p_old), -2, 2)
    assert advantages == pytest.approx([-0.5, 0.886294, -2.5], abs=1e-6)
    given = entries(
        np.log(p_now),
        {"rl": 3.0},
        advantages=advantages,
        rl=[1, 1, 1],
        sampler_logprobs=np.log(p_old),
        old_logprobs=np.log(p_old),
        ref_logprobs=np.log([0.4, 0.2, 0.9]),
    )
    alone, _ = compute(LossSpec(policy=PpoClip()), given)
    found, tally = compute(LossSpec(policy=PpoClip(), kl_beta=0.01, kl="k3"), given)
    assert (alone.item(), tally.metrics()["ref_kl"], found.item()) == pytest.approx(
        (0.455181, 0.134043, 0.456521), abs=1e-6
    )


def test_e4_the_forward_kl_over_the_whole_vocabulary() -> None:
    student, teacher = np.array([[0.6, 0.3, 0.1]]), np.array([[0.2, 0.7, 0.1]])
    given = entries(
        [math.log(0.6)], {"kd": 1.0}, kd=[1], teacher_logprobs=np.log(teacher), sampler_logprobs=[0]
    )
    given = given._replace(teacher_ids_logprobs=torch.tensor(np.log(student)))
    assert compute(LossSpec(), given)[0].item() == pytest.approx(0.373386, abs=1e-6)


def test_10_a_component_without_its_stream_is_refused() -> None:
    for loss, columns, missing in [
        (LossSpec(), {"kd": [1.0], "sampler_logprobs": [-1.0]}, "teacher_logprobs"),
        (
            LossSpec(kl_beta=0.1),
            {"rl": [1.0], "advantages": [1.0], "sampler_logprobs": [-1.0]},
            "ref_logprobs",
        ),
    ]:
        with pytest.raises(ConfigError, match=missing):
            compute(
                loss, entries([-1.0], dict.fromkeys({"rl", "kd"} & set(columns), 1.0), **columns)
            )


def test_12_a_policy_that_is_its_own_teacher_moves_nothing() -> None:
    """Through the real backend: the teacher's log-probabilities are those of the trainer's own
    pass, id for id."""
    from ramify.train.backends.single import SingleBackend
    from ramify.train.data.pack import attach

    rows, backend = tree(), SingleBackend(policy())
    for row in rows:
        row.kd, row.ce, row.rl = (row.rl != 0).astype(np.float32), None, np.zeros_like(row.rl)
    batches = pack(rows)
    (logprobs,) = backend.logprobs(batches)
    attach(rows, batches, "teacher_logprobs", [logprobs])
    for row in rows:
        row.sampler_logprobs = row.streams["teacher_logprobs"].copy()
    measured = backend.forward_backward(pack(rows), LossSpec())
    gradient = max(
        float(each.grad.abs().max())
        for each in backend._model.parameters()
        if each.grad is not None
    )
    assert (measured["loss"], measured["teacher_gap"], gradient) == pytest.approx(
        (0, 0, 0), abs=1e-5
    )


def test_13_whether_a_term_acts_is_measured() -> None:
    given = entries(
        [-1.0, -2.0],
        {"kd": 2.0},
        kd=[1, 1],
        teacher_logprobs=[-0.5, -1.0],
        sampler_logprobs=[-1.0, -2.0],
    )
    found, tally = compute(LossSpec(), given)
    assert tally.metrics()["teacher_gap"] == pytest.approx(0.75)
    assert found.item() == pytest.approx(-0.75)


def test_14_one_alone_gets_nothing_and_length_buys_nothing() -> None:
    assert DrGRPO().assign_advantages([group(rollout(call("0", 3), reward=1))], {}).rollouts == []
    batch = [group(rollout(call("0", 2), reward=1), rollout(call("0", 8), reward=0))]

    def masses(**options: Any) -> list[float]:
        found = DrGRPO(**options).assign_advantages(batch, {}).rollouts
        return [sum(credit.rl) for each in found for credit in each.credits.values()]

    assert masses(reduction="rollout") == pytest.approx(
        [1, 1]
    )  # a token of the short one weighs four times as much: the bias of a mean
    assert masses(reduction="token") == pytest.approx([2, 8])
    assert masses(rollout_tokens=10) == pytest.approx([0.2, 0.8])
