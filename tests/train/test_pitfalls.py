"""Known silent failures of this kind of training, and the tests that guard against each.

 1  entropy and KL rise while reward falls
    train/test_run_doctor.py::test_each_finding_is_reported_and_can_be_disabled,
    test_kl_and_entropy_limits_stop_or_warn; the clip and the schedule of 2 and 3
 2  an unbounded gap to the teacher
    test_e3_clipped_teacher_gap_through_clipped_loss_and_kl
    train/signals/test_worked_examples.py::test_e3_teacher_hybrid_surrogate_and_kl
 3  a frozen teacher pulls the policy back to where it started
    train/signals/test_compose.py::test_weights_follow_their_schedule_and_signals_with_zero_weight_are_skipped,
    test_route_selects_rollouts_that_a_term_acts_on
    train/signals/test_teacher.py::test_evidence_keeps_only_tokens_that_the_hint_moves
    train/signals/test_teacher.py::test_turns_named_scores_only_the_turn_that_the_hint_is_about
 4  a live teacher erodes                           a warning; use slowly averaged teachers instead
    train/signals/test_teacher.py::test_invalid_teacher_options_are_rejected,
    test_frozen_averaged_live_and_checkpoint_teachers
 5  hints that contain the answer
    train/signals/test_judges.py::test_hint_filter_gives_the_reason_for_rejection,
    test_short_gold_answers_leak_only_as_whole_words
    train/signals/test_judges.py::test_judge_prompt_has_no_gold_answer_and_marks_quoted_text
 6  wrong hints are worse than none                 judges abstain by default
    train/signals/test_judges.py::test_hints_are_parsed_strictly,
    test_rate_limited_judge_is_retried_and_refusal_counts_as_unanswered
    extras/studies/test_program_judges.py::test_shuffled_hints_come_from_another_problem
 7  the longest hint wins
    train/signals/test_judges.py::test_hindsight_picks_one_hint_and_counts_rejected_ones
    train/signals/test_teacher.py::test_overlap_chooses_the_hint_whose_teacher_agrees_most_with_the_policy
 8  rollouts get longer until they are cut off
    train/advantages/test_estimators.py::test_every_estimator_can_mask_cut_replies
    train/test_run_doctor.py::test_each_finding_is_reported_and_can_be_disabled
    train/signals/test_judges.py::test_hindsight_skips_solved_cut_off_and_unscored_rollouts
    train/signals/test_compose.py::test_early_tokens_weigh_more
 9  the policy gets worse after its best step
    train/test_run_doctor.py::test_patience_stops_after_evaluations_without_improvement,
    train/test_loop_algorithms.py::test_patience_stops_the_run_and_keeps_the_best_checkpoint
10  a log-probability of 0 instead of a missing one
    test_10_loss_component_without_its_stream_is_rejected
    train/signals/test_teacher.py::test_unscorable_rollouts_get_no_scores_instead_of_zeros
    train/signals/test_teacher.py::test_engine_with_missing_or_invalid_logprobs_is_rejected
11  text that is tokenised again
    train/signals/test_teacher.py::test_scores_match_the_engine_on_the_hinted_path
    engine/test_tokens.py::test_retokenized_prompt_is_counted_and_splits_the_path
12  teacher and student computed by different code
    test_12_policy_as_its_own_teacher_has_zero_gradient
    train/signals/test_teacher.py::test_policy_as_its_own_teacher_gives_zero_gaps
13  a term that is silently off
    test_13_teacher_gap_metric_shows_whether_the_term_acts
    train/signals/test_compose.py::test_teacher_whose_term_is_zero_everywhere_raises
14  a single rollout keeps its raw reward; an ignored weight; bias towards short rollouts
    test_14_single_rollout_and_length_give_no_advantage
    train/signals/test_worked_examples.py::test_e2_step_buckets
    train/advantages/test_credit.py::test_single_tree_without_siblings_has_zero_advantage
15  "it ran" taken for "it is right"
    train/signals/test_compose.py::test_metrics_show_process_reward_that_contradicts_the_outcome
16  made-up tool output, boxes in boxes, templates applied twice
    engine/test_retool.py::test_invented_interpreter_output_is_dropped,
    test_closing_tag_cut_off_by_a_stop_text_is_restored,
    test_conversation_survives_every_kind_of_failure
    extras/studies/test_toolmath.py::test_nested_boxes_are_whole
    models/test_renderer.py::test_renderer_matches_the_template
17  a sandbox that blocks its loop, shows its host's environment, or changes the code
    sandbox/test_process.py::test_many_sessions_open_at_once,
    test_session_inherits_no_keys_descriptors_or_arguments_of_host
    engine/test_retool.py::test_conversation_survives_every_kind_of_failure

Invalid input:

a judge's malformed reply
    train/signals/test_judges.py::test_votes_are_parsed_strictly, test_hints_are_parsed_strictly,
    test_every_turn_is_judged_and_malformed_votes_are_counted
a hint that contains the answer or is too long
    train/signals/test_judges.py::test_hint_filter_gives_the_reason_for_rejection
a teacher with a different vocabulary
    train/signals/test_teacher.py::test_teacher_with_different_vocabulary_is_rejected_at_the_start
a non-finite or missing reward
    train/advantages/test_estimators.py::test_non_finite_or_missing_reward_is_noted_and_left_out_of_its_group
    train/signals/test_compose.py::test_missing_and_nan_rewards_are_left_out_of_their_group,
    test_non_finite_signal_is_left_out_and_its_rollout_named
a stream of the wrong length
    train/signals/test_compose.py::test_stream_of_wrong_length_is_rejected_with_both_lengths
an unknown loss or estimator
    train/test_registry.py::test_unknown_name_gives_the_nearest_known_one,
    test_overrides_of_a_run_suggest_the_nearest_name

The worked examples E1 to E4 are in train/signals/test_worked_examples.py.
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
from ramify.train.losses.total_loss import BatchLossInputs, LossSpec, compute
from tests.train.backends.small import policy, tree
from tests.train.trees import call, group
from tests.train.trees import tree as rollout


def test_every_test_named_in_the_docstring_exists() -> None:
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


def entries(now: Any, denominators: dict[str, float], **streams: Any) -> BatchLossInputs:
    given = {
        name: torch.tensor(np.asarray(each), dtype=torch.float64) for name, each in streams.items()
    }
    return BatchLossInputs(
        torch.tensor(np.asarray(now), dtype=torch.float64, requires_grad=True), given, denominators
    )


def test_e3_clipped_teacher_gap_through_clipped_loss_and_kl() -> None:
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


def test_e4_forward_kl_over_the_whole_vocabulary() -> None:
    student, teacher = np.array([[0.6, 0.3, 0.1]]), np.array([[0.2, 0.7, 0.1]])
    given = entries(
        [math.log(0.6)], {"kd": 1.0}, kd=[1], teacher_logprobs=np.log(teacher), sampler_logprobs=[0]
    )
    given = given._replace(teacher_ids_logprobs=torch.tensor(np.log(student)))
    assert compute(LossSpec(), given)[0].item() == pytest.approx(0.373386, abs=1e-6)


def test_10_loss_component_without_its_stream_is_rejected() -> None:
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


def test_12_policy_as_its_own_teacher_has_zero_gradient() -> None:
    """Through the real backend: the teacher's log-probabilities come from the trainer's own
    pass."""
    from ramify.train.backends.single_device import SingleBackend
    from ramify.train.data.pack import copy_to_sequences

    rows, backend = tree(), SingleBackend(policy())
    for row in rows:
        row.kd, row.ce, row.rl = (row.rl != 0).astype(np.float32), None, np.zeros_like(row.rl)
    batches = pack(rows)
    (logprobs,) = backend.logprobs(batches)
    copy_to_sequences(rows, batches, "teacher_logprobs", [logprobs])
    for row in rows:
        row.sampler_logprobs = row.streams["teacher_logprobs"].copy()
    measured = backend.forward_backward(pack(rows), LossSpec())
    gradient = max(
        float(each.grad.abs().max()) for each in backend.model.parameters() if each.grad is not None
    )
    assert (measured["loss"], measured["teacher_gap"], gradient) == pytest.approx(
        (0, 0, 0), abs=1e-5
    )


def test_13_teacher_gap_metric_shows_whether_the_term_acts() -> None:
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


def test_14_single_rollout_and_length_give_no_advantage() -> None:
    assert DrGRPO().assign_advantages([group(rollout(call("0", 3), reward=1))], {}).rollouts == []
    batch = [group(rollout(call("0", 2), reward=1), rollout(call("0", 8), reward=0))]

    def masses(**options: Any) -> list[float]:
        found = DrGRPO(**options).assign_advantages(batch, {}).rollouts
        return [sum(credit.rl) for each in found for credit in each.credits.values()]

    assert masses(reduction="rollout") == pytest.approx(
        [1, 1]
    )  # a token of the short rollout weighs four times as much: the bias of a mean
    assert masses(reduction="token") == pytest.approx([2, 8])
    assert masses(rollout_tokens=10) == pytest.approx([0.2, 0.8])
