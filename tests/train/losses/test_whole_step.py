"""Loss inputs computed over a whole step: the tokens that clip_cov and kl_cov choose, and the check
that calls are whole.

Ten tokens with A = ±1 and l = -0.1 or -3, except for the last, whose advantage is 8:

    mean A 0.9, mean l -1.26    cov of the last (8 - 0.9)(-0.1 + 1.26) = 8.236; of A = 1: 0.1 · 1.16 or 0.1 · -1.74; of A = -1:
    -1.9 · 1.16 = -2.204 or -1.9 · -1.74 = 3.306
"""

from __future__ import annotations

import numpy as np
import pytest

from ramify.errors import ConfigError, TrainError
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.losses import POLICY_LOSSES, ClipCov, KlCov
from ramify.train.losses import total_loss as losses
from ramify.train.losses.base import TokenSelectionInputs
from ramify.train.losses.corrections import CORRECTIONS
from ramify.train.losses.covariance_losses import covariance_terms
from ramify.train.losses.total_loss import LossSpec, selects_tokens
from ramify.types.training_sequences import TokenSequence
from tests.train.backends.small import tree

ADVANTAGES = np.array([1, 1, 1, -1, -1, 1, 1, -1, -1, 8.0])
NOW = np.array([-0.1, -3, -0.1, -0.1, -3, -3, -0.1, -3, -0.1, -0.1])
COV = [0.116, -0.174, 0.116, -2.204, 3.306, -0.174, 0.116, 3.306, -2.204, 8.236]


def step(keys: list[int], old: np.ndarray = NOW) -> TokenSelectionInputs:
    return TokenSelectionInputs(NOW, old, ADVANTAGES, np.array(keys, np.uint64))


def test_only_formulas_over_sequences_forbid_to_split_them() -> None:
    losses = {name for name in POLICY_LOSSES if LossSpec(policy=name).is_over_sequences}
    assert losses == {"gspo", "gmpo", "decoupled_gspo", "sequence_clip"}
    corrections = {name for name in CORRECTIONS if LossSpec(corrections=(name,)).is_over_sequences}
    masks = {"sequence_mask", "geometric_mask", "worst_token_mask"}
    assert corrections == {*masks, "sequence_tis", "opsm"}


def test_losses_that_select_tokens_read_every_token_of_the_step() -> None:
    specs = {name: LossSpec(policy=name) for name in POLICY_LOSSES}
    assert {name for name, spec in specs.items() if selects_tokens(spec)} == {"clip_cov", "kl_cov"}
    assert specs["clip_cov"].needs_zero_advantage
    assert not specs["ppo_clip"].needs_zero_advantage


def test_covariance_of_advantage_and_logprob() -> None:
    np.testing.assert_allclose(covariance_terms(step([0] * 10)), COV, atol=1e-9)


def test_clip_cov_draws_by_key_among_tokens_within_its_bounds() -> None:
    low, high = [9, 9, 9, 9, 1, 9, 9, 2, 9, 0], [9, 9, 9, 9, 2, 9, 9, 1, 9, 0]
    assert np.flatnonzero(ClipCov(share=0.1).choose(step(low))).tolist() == [4]
    assert np.flatnonzero(ClipCov(share=0.1).choose(step(high))).tolist() == [7]
    assert np.flatnonzero(ClipCov(share=0.5).choose(step(high))).tolist() == [4, 7]
    assert np.flatnonzero(ClipCov().choose(step(high))).tolist() == [7]  # at least one
    assert not ClipCov(cov_low=4, cov_high=5).choose(step(high)).any()


def test_clip_cov_skips_tokens_that_are_already_clipped() -> None:
    """Token 4 has A < 0 and r = exp(-1), so it has no gradient anyway."""
    old = NOW.copy()
    old[4] += 1
    assert np.flatnonzero(ClipCov(share=0.5).choose(step([0] * 10, old))).tolist() == [7]


def test_kl_cov_chooses_the_largest_covariances() -> None:
    assert np.flatnonzero(KlCov(share=0.1).choose(step([0] * 10))).tolist() == [9]
    assert np.flatnonzero(
        KlCov(share=0.2).choose(step([9, 9, 9, 9, 2, 9, 9, 1, 9, 9]))
    ).tolist() == [7, 9]
    with pytest.raises(ConfigError, match="share=0"):
        KlCov(share=0.0)


def test_clip_cov_would_choose_nothing_if_advantages_were_prescaled() -> None:
    """Weights must be applied after the choice: with A / 10^4 no covariance reaches the bound."""
    folded = step([0] * 10)._replace(advantages=ADVANTAGES / 1e4)
    assert not ClipCov().choose(folded).any()
    assert ClipCov().choose(step([0] * 10)).any()


def chosen_places(rows: list[TokenSequence], packing: PackingSpec) -> set[tuple[str, int]]:
    batches = pack(rows, packing)
    logprobs = [-batch.targets.astype(np.float32) / 7 for batch in batches]
    found = losses.mark_selected_tokens(
        batches, LossSpec(policy=ClipCov(share=0.2, cov_low=0.01)), logprobs
    )
    return {
        (batch.sequences[index], token)
        for batch in found
        for (index, token), flag in zip(batch.owners.tolist(), batch.streams["chosen"], strict=True)
        if flag
    }


def test_chosen_tokens_do_not_depend_on_packing_or_order() -> None:
    rows = tree()
    wanted = chosen_places(rows, PackingSpec())
    assert 3 < len(wanted) < 20
    assert chosen_places(rows[::-1], PackingSpec(max_tokens=50)) == wanted
    assert chosen_places(rows, PackingSpec(share=False, max_tokens=1)) == wanted


def test_paths_of_a_call_stay_together_in_one_batch() -> None:
    rows = tree()
    rows[2].name, rows[8].name = "t/call=0/path=0", "t/call=0/path=1"  # in two trees
    cut = PackingSpec(max_tokens=50)
    with pytest.raises(TrainError, match=r"reads whole calls, and t/call=0 is in 2 batches"):
        losses.check_sequences_unsplit(pack(rows, cut))
    batches = pack(rows, cut, whole="call")
    losses.check_sequences_unsplit(batches)
    assert len(batches) > 3
    (both,) = (batch for batch in batches if {2, 8} <= batch.sequences.keys())
    calls, num = losses.sequence_index_of_entries(both)
    assert num == len(both.sequences) - 1
    assert len(set(calls[np.isin(both.owners[:, 0], [2, 8])].tolist())) == 1
    # With the rollout as the sequence, its other calls belong to it, too.
    rows[5].name = "t/call=0.0"
    together = pack(rows, cut, whole="rollout")
    losses.check_sequences_unsplit(together, "rollout")
    (all_three,) = (batch for batch in together if {2, 5, 8} <= batch.sequences.keys())
    sequences, num = losses.sequence_index_of_entries(all_three, "rollout")
    assert num == len(all_three.sequences) - 2
    assert len(set(sequences[np.isin(all_three.owners[:, 0], [2, 5, 8])].tolist())) == 1
    with pytest.raises(TrainError, match=r"reads whole rollouts, and t is in \d batches"):
        losses.check_sequences_unsplit(pack(rows, cut), "rollout")
    rows[8].rl[:] = 0  # CE only, so the policy loss does not read it
    losses.check_sequences_unsplit(pack(rows, cut))
