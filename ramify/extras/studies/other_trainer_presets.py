"""Default settings of TRL, SkyRL, prime-rl, verl and AReaL, as presets for ``ramify train
--preset``.

    TRL.optim["lr"]                  1e-06
    TRL.objectives["gspo"].policy    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}

All settings are listed in ``docs/objectives.md``, and ``benchmarks/objectives_table.py`` compares
losses and gradients with the code of the other trainers. This module contains only the numbers. How
a preset changes a run is decided in ``train/other_trainer_presets.py``, and the options are defined
in ``train/config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ramify.train.losses.critic import ValueLoss
from ramify.train.named_objectives import Options
from ramify.train.other_trainer_presets import ForeignTrainerObjective, OtherTrainerDefaults

_ADAMW = {"kind": "adamw", "lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "max_grad_norm": 1.0}
_FLAT: Options = {"schedule": "constant", "warmup_steps": 0, "num_steps": None}
_TOKEN_MEAN: Options = {"credit": "root", "reduction": "token", "drop_zero_variance": False}
_EVEN_CLIP: Options = {"clip_low": 0.2, "clip_high": 0.2}
_CLIPPED: Mapping[str, Options] = dict.fromkeys(
    ("ppo_clip", "dual_clip", "gspo", "clip_cov"), _EVEN_CLIP
)
_AREAL_CLIP: Options = {"clip_low": 0.4, "clip_high": 0.4}
_DECOUPLED: Options = {"name": "decoupled", **_AREAL_CLIP, "cap": 5.0, "drop": True}
_GRPO: Options = {"name": "grpo"}
_PER_ROLLOUT: Options = {"reduction": "rollout"}
_PPO_CLIP: Options = {"name": "ppo_clip", **_EVEN_CLIP}
_DUAL_CLIP: Options = {"name": "dual_clip", **_EVEN_CLIP, "bound": 3.0}
_DECAY = "Its weight decay also applies to norms, biases and embeddings; here these do not decay."
_MINIBATCH = (
    "It divides each minibatch by the tokens of that minibatch; here by those of the step over "
    "the number of minibatches."
)

TRL = OtherTrainerDefaults(
    trainer="TRL 1.16.0, GRPOTrainer with vLLM",
    algorithm="grpo",
    policy="ppo_clip",
    each_algorithm=_TOKEN_MEAN,
    algorithms={
        "grpo": {"epsilon": 1e-4},
        "gdpo": {"epsilon": 1e-4},
        "dr_grpo": {"reduction": "constant", "rollout_tokens": 512},
    },
    policies={
        **_CLIPPED,
        "gspo": {**_EVEN_CLIP, "sequence_mean": False},
        "cispo": {"cap": 0.2},
    },
    loss={
        "corrections": [{"name": "sequence_mask", "high": 3.0}],
        "kl": "k3",
        "sequence": "rollout",
    },
    objectives={
        "grpo": ForeignTrainerObjective(
            "loss_type='grpo'", {**_GRPO, "epsilon": 1e-4, **_PER_ROLLOUT}, _PPO_CLIP
        ),
        "dr_grpo": ForeignTrainerObjective(
            "loss_type='dr_grpo', scale_rewards='none'",
            {"name": "dr_grpo", "reduction": "constant", "rollout_tokens": 512},
            _PPO_CLIP,
            note="512 is its max_completion_length.",
        ),
        "dapo": ForeignTrainerObjective(
            "loss_type='dapo'",
            {**_GRPO, "epsilon": 1e-4},
            _PPO_CLIP,
            note="The default. Its help for DAPO also sets epsilon_high=0.28.",
        ),
        "gspo": ForeignTrainerObjective(
            "importance_sampling_level='sequence', loss_type='grpo'",
            {**_GRPO, "epsilon": 1e-4, **_PER_ROLLOUT},
            {"name": "gspo", **_EVEN_CLIP},
            note="Its help for GSPO also sets epsilon=3e-4 and epsilon_high=4e-4.",
        ),
        "cispo": ForeignTrainerObjective(
            "loss_type='cispo'",
            {**_GRPO, "epsilon": 1e-4},
            {"name": "cispo", "cap": 0.2},
            note="Its help recommends epsilon_high=5: `rl.loss.policy.cap=5`.",
        ),
        "sapo": ForeignTrainerObjective(
            "loss_type='sapo'", {**_GRPO, "epsilon": 1e-4, **_PER_ROLLOUT}, {"name": "sapo"}
        ),
        "gmpo": ForeignTrainerObjective(
            "trl.experimental.gmpo.GMPOTrainer",
            {**_GRPO, "epsilon": 1e-4, **_PER_ROLLOUT},
            {"name": "gmpo"},
            {"corrections": ()},
        ),
        "gdpo": ForeignTrainerObjective(
            "multi_objective_aggregation='normalize_then_sum'",
            {"name": "gdpo", "epsilon": 1e-4},
            _PPO_CLIP,
        ),
        "rloo": ForeignTrainerObjective(
            "RLOOTrainer",
            {"name": "rloo", "kl_reward": 0.05, "kl_over": "rollout", **_PER_ROLLOUT},
            {"name": "sequence_clip"},
            {"corrections": (), "old": "pass"},
            note="It keeps a reference policy, and its default group has 2 rollouts.",
        ),
    },
    optim={
        **_ADAMW,
        "weight_decay": 0.0,
        "schedule": "linear",
        "warmup_steps": 0,
        "num_steps": None,
        "final_fraction": 0.0,
    },
    rollout={"group": 8, "temperature": 1.0, "top_p": None, "top_k": None},
    differences=(
        "CISPO has an upper bound alone, which is 0.2 unless it is set: its help recommends "
        "5, here `rl.loss.policy.cap=5`.",
        "A KL penalty, off by default, is multiplied there by the ratio to the old policy "
        "(`use_bias_correction_kl`).",
        "Its default batch is one item per device, and replies have at most 512 tokens; here "
        "the recipe says so (`rl.sample.items`, `limits.max_reply_tokens`).",
    ),
)
"""The defaults of TRL 1.16.0's GRPOTrainer with vLLM."""

SKYRL = OtherTrainerDefaults(
    trainer="SkyRL at a956457 (2026-08-21)",
    algorithm="grpo",
    policy="ppo_clip",
    each_algorithm={**_TOKEN_MEAN, "kl_reduction": "rollout"},
    policies={
        **_CLIPPED,
        "gspo": {**_EVEN_CLIP, "sequence_mean": False},
        "sapo": {"sequence_mean": False},
        "rollout_is": _EVEN_CLIP,
        "cispo": {"clip_low": 1.0, "clip_high": 4.0},
        "dppo_tv": {"pull": 0.0},
        "dppo_kl": {"delta": 0.2},
        "kl_cov": {"share": 0.2},
    },
    objectives={
        "grpo": ForeignTrainerObjective(
            "advantage_estimator=grpo", _GRPO, _PPO_CLIP, note="The default."
        ),
        "dr_grpo": ForeignTrainerObjective(
            "grpo_norm_by_std=false, loss_reduction=seq_mean_token_sum_norm",
            {"name": "dr_grpo", "reduction": "constant"},
            _PPO_CLIP,
            note="It has no default of max_seq_len: set `rl.algorithm.rollout_tokens`.",
        ),
        "dapo": ForeignTrainerObjective(
            "examples/train/algorithms/dapo",
            {"name": "dapo", "drop_zero_variance": True},
            {"name": "dual_clip", "clip_low": 0.2, "clip_high": 0.28, "bound": 10.0},
            {"kl_beta": 0.0},
        ),
        "gspo": ForeignTrainerObjective(
            "policy_loss_type=gspo, loss_reduction=sequence_mean",
            {**_GRPO, **_PER_ROLLOUT},
            {"name": "gspo", **_EVEN_CLIP},
        ),
        "cispo": ForeignTrainerObjective(
            "policy_loss_type=cispo",
            _GRPO,
            {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        ),
        "ppo": ForeignTrainerObjective(
            "advantage_estimator=gae",
            {"name": "ppo", "value_reduction": "rollout"},
            _PPO_CLIP,
        ),
        "rloo": ForeignTrainerObjective("advantage_estimator=rloo", {"name": "rloo"}, _PPO_CLIP),
        "reinforce_pp": ForeignTrainerObjective(
            "advantage_estimator=reinforce++", {"name": "reinforce_pp"}, _PPO_CLIP
        ),
        "maxrl": ForeignTrainerObjective("advantage_estimator=maxrl", {"name": "maxrl"}, _PPO_CLIP),
        "sapo": ForeignTrainerObjective(
            "policy_loss_type=sapo, loss_reduction=sequence_mean",
            {**_GRPO, **_PER_ROLLOUT},
            {"name": "sapo"},
        ),
        "dppo": ForeignTrainerObjective(
            "policy_loss_type=dppo", _GRPO, {"name": "dppo_tv", "pull": 0.0}
        ),
        "dppo_kl": ForeignTrainerObjective(
            "policy_loss_type=dppo, dppo_type=binary_kl",
            _GRPO,
            {"name": "dppo_kl", "delta": 0.2},
            note="Its help recommends thresholds of 0.05.",
        ),
        "rollout_is": ForeignTrainerObjective(
            "policy_loss_type=rollout_is", _GRPO, {"name": "rollout_is", **_EVEN_CLIP}
        ),
    },
    loss={
        "sequence": "rollout",
        "corrections": (),
        "old": "pass",
        "kl_beta": 1e-3,
        "kl": "k3",
        "value": ValueLoss(weight=1.0),
    },
    optim={**_ADAMW, **_FLAT, "weight_decay": 0.01},
    critic={"lr": 5e-6},
    rollout={"group": 5, "temperature": 1.0, "top_p": None, "top_k": None},
    minibatches=4,
    differences=(
        _MINIBATCH,
        _DECAY,
        "Its default batch is 1,024 items, in minibatches of 256; here the recipe says how "
        "many (`rl.sample.items`).",
        "With a critic, it averages the value loss by rollout: here with "
        "`rl.algorithm.value_reduction=rollout`, as its objective `ppo` has it.",
    ),
)
"""The defaults of SkyRL at commit a956457 (2026-08-21)."""

PRIME = OtherTrainerDefaults(
    trainer="prime-rl at 559b447 (2026-08-21)",
    algorithm="dr_grpo",
    policy="dppo_tv",
    each_algorithm={**_TOKEN_MEAN, "drop_zero_variance": "calls"},
    algorithms={"maxrl": {"epsilon": 0.0}, "rae": {"update": "rollout"}},
    policies={"dppo_tv": {"delta": 0.2, "pull": 1e-3}},
    loss={"corrections": (), "sequence": "rollout"},
    objectives={
        "grpo": ForeignTrainerObjective(
            "algo.type=grpo",
            {"name": "dr_grpo"},
            {"name": "dppo_tv"},
            note="The default. Its GRPO does not divide by the standard deviation.",
        ),
        "maxrl": ForeignTrainerObjective(
            "algo.type=max_rl", {"name": "maxrl", "epsilon": 0.0}, {"name": "dppo_tv"}
        ),
        "rae": ForeignTrainerObjective(
            "algo.type=rae", {"name": "rae", "update": "rollout"}, {"name": "dppo_tv"}
        ),
        "dppo": ForeignTrainerObjective(
            "loss.type=default", {"name": "dr_grpo"}, {"name": "dppo_tv"}
        ),
    },
    optim={**_ADAMW, **_FLAT, "weight_decay": 0.01},
    rollout={"temperature": 1.0, "top_p": None, "top_k": None},
    differences=(
        "Its default group of one rollout has nothing to compare; here the recipe says how "
        "many (`rl.rollout.group`).",
        "It is always asynchronous and drops rollouts of weights more than 8 steps old; here "
        "`rl.sample.max_staleness` says how far rollouts run ahead.",
        "In a conversation that branches, each trace counts in the mean of its group there; "
        "here each rollout.",
        _DECAY,
    ),
)
"""The defaults of prime-rl at commit 559b447 (2026-08-21)."""

VERL = OtherTrainerDefaults(
    trainer="verl at 1dda039 (0.10.0.dev, 2026-08-22)",
    algorithm="ppo",
    policy="dual_clip",
    each_algorithm=_TOKEN_MEAN,
    algorithms={"gdpo": {"over": "tokens"}},
    policies={
        **_CLIPPED,
        "dual_clip": {**_EVEN_CLIP, "bound": 3.0},
        "cispo": _EVEN_CLIP,
        "gmpo": _EVEN_CLIP,
        "dppo_tv": {"pull": 0.0},
        "dppo_kl": {"delta": 0.2},
        "dppo_capped": {"cap": 3.0},
        "kl_cov": {"beta": 0.1},
    },
    objectives={
        "grpo": ForeignTrainerObjective("adv_estimator=grpo", _GRPO, _DUAL_CLIP),
        "dr_grpo": ForeignTrainerObjective(
            "norm_adv_by_std_in_grpo=false, loss_agg_mode=seq-mean-token-sum-norm",
            {"name": "dr_grpo", "reduction": "constant"},
            _DUAL_CLIP,
            note=(
                "It divides by data.max_response_length unless loss_scale_factor is set: set "
                "`rl.algorithm.rollout_tokens`."
            ),
        ),
        "dapo": ForeignTrainerObjective(
            "adv_estimator=grpo, clip_ratio_high=0.28",
            _GRPO,
            {**_DUAL_CLIP, "clip_high": 0.28},
            note="From its docs/algo/dapo.md; its reward manager scores overlong replies.",
        ),
        "gspo": ForeignTrainerObjective(
            "adv_estimator=grpo, policy_loss.loss_mode=gspo",
            {**_GRPO, **_PER_ROLLOUT, "kl_reduction": "token"},
            {"name": "gspo", **_EVEN_CLIP},
            note="Its example scripts set 3e-4 and 4e-4.",
        ),
        "cispo": ForeignTrainerObjective(
            "adv_estimator=grpo, policy_loss.loss_mode=cispo",
            _GRPO,
            {"name": "cispo", **_EVEN_CLIP},
        ),
        "ppo": ForeignTrainerObjective(
            "adv_estimator=gae", {"name": "ppo"}, _DUAL_CLIP, note="The default."
        ),
        "rloo": ForeignTrainerObjective("adv_estimator=rloo", {"name": "rloo"}, _DUAL_CLIP),
        "reinforce_pp": ForeignTrainerObjective(
            "adv_estimator=reinforce_plus_plus", {"name": "reinforce_pp"}, _DUAL_CLIP
        ),
        "reinforce_pp_baseline": ForeignTrainerObjective(
            "adv_estimator=reinforce_plus_plus_baseline",
            {"name": "reinforce_pp_baseline"},
            _DUAL_CLIP,
        ),
        "remax": ForeignTrainerObjective("adv_estimator=remax", {"name": "remax"}, _DUAL_CLIP),
        "opo": ForeignTrainerObjective("adv_estimator=opo", {"name": "opo"}, _DUAL_CLIP),
        "gdpo": ForeignTrainerObjective(
            "adv_estimator=gdpo", {"name": "gdpo", "over": "tokens"}, _DUAL_CLIP
        ),
        "sapo": ForeignTrainerObjective(
            "adv_estimator=grpo, policy_loss.loss_mode=sapo",
            {**_GRPO, **_PER_ROLLOUT, "kl_reduction": "token"},
            {"name": "sapo"},
        ),
        "gmpo": ForeignTrainerObjective(
            "adv_estimator=grpo, policy_loss.loss_mode=geo_mean",
            {**_GRPO, **_PER_ROLLOUT, "kl_reduction": "token"},
            {"name": "gmpo", **_EVEN_CLIP},
        ),
        "dppo": ForeignTrainerObjective(
            "adv_estimator=grpo, policy_loss.loss_mode=dppo_tv",
            _GRPO,
            {"name": "dppo_capped", "cap": 3.0},
            note="Its default clip_ratio_c=3 bounds the ratio; its code recommends 20.",
        ),
        "dppo_kl": ForeignTrainerObjective(
            "adv_estimator=grpo, policy_loss.loss_mode=dppo_kl",
            _GRPO,
            {"name": "dppo_capped", "cap": 3.0, "divergence": "kl"},
            note="Its default clip_ratio_c=3 bounds the ratio; its code recommends 20.",
        ),
    },
    loss={
        "sequence": "rollout",
        "corrections": (),
        "old": "pass",
        "kl": "k3",
        "value": ValueLoss(weight=1.0, clip=0.5),
    },
    optim={**_ADAMW, **_FLAT, "weight_decay": 0.01},
    critic={"lr": 1e-5},
    rollout={"group": 1, "temperature": 1.0, "top_p": None, "top_k": None},
    minibatches=4,
    differences=(
        "Its configuration begins with PPO and a critic; for GRPO with its options: "
        "`rl.algorithm=grpo rl.rollout.group=8`.",
        _MINIBATCH,
        _DECAY,
        "Its default batch is 1,024 items, in minibatches of 256; here the recipe says how "
        "many (`rl.sample.items`).",
    ),
)
"""The defaults of verl at commit 1dda039 (0.10.0.dev, 2026-08-22)."""

AREAL = OtherTrainerDefaults(
    trainer="AReaL at 4aef98d (2026-05-21), its examples/math",
    algorithm="grpo",
    policy="decoupled",
    each_algorithm={**_TOKEN_MEAN, "normalise": True, "normalise_epsilon": 1e-5},
    algorithms={
        "dr_grpo": {"normalise_epsilon": 1e-6},
        "rloo": {"normalise_epsilon": 1e-6},
    },
    policies={
        **dict.fromkeys(("ppo_clip", "decoupled_gspo"), _AREAL_CLIP),
        "gspo": {**_AREAL_CLIP, "sequence_mean": False},
        "decoupled": {**_AREAL_CLIP, "cap": 5.0, "drop": True},
        "decoupled_gspo": {**_AREAL_CLIP, "cap": 5.0, "drop": True},
        "prox_approx": _AREAL_CLIP,
        "sapo": {"sequence_mean": False},
    },
    objectives={
        "grpo": ForeignTrainerObjective("gsm8k_grpo.yaml", _GRPO, _DECOUPLED),
        "dr_grpo": ForeignTrainerObjective(
            "gsm8k_drgrpo.yaml",
            {"name": "dr_grpo", "normalise_epsilon": 1e-6},
            _DECOUPLED,
        ),
        "dapo": ForeignTrainerObjective(
            "gsm8k_dapo_dynamic_bs.yaml",
            _GRPO,
            {**_DECOUPLED, "clip_low": 0.2, "clip_high": 0.28},
            note=(
                "It punishes the last 512 tokens: `rl.algorithm.overlong_buffer=512` and "
                "`max_rollout_tokens`."
            ),
        ),
        "gspo": ForeignTrainerObjective(
            "gsm8k_gspo.yaml", _GRPO, {**_DECOUPLED, "name": "decoupled_gspo"}
        ),
        "ppo": ForeignTrainerObjective("gsm8k_ppo.yaml", {"name": "ppo"}, _DECOUPLED),
        "rloo": ForeignTrainerObjective(
            "gsm8k_rloo.yaml", {"name": "rloo", "normalise_epsilon": 1e-6}, _DECOUPLED
        ),
        "sapo": ForeignTrainerObjective(
            "gsm8k_sapo.yaml",
            _GRPO,
            {"name": "sapo", "sequence_mean": False},
            {"old": "sampler"},
            note="It averages over tokens.",
        ),
        "decoupled": ForeignTrainerObjective(
            "use_decoupled_loss", _GRPO, _DECOUPLED, note="All of its examples but sapo use it."
        ),
    },
    loss={
        "corrections": (),
        "old": "pass",
        "kl": "k3",
        "sequence": "rollout",
        "value": ValueLoss(weight=1.0, clip=0.5),
    },
    optim={**_ADAMW, **_FLAT, "lr": 1.7e-5, "weight_decay": 0.017},
    critic={"lr": 1.7e-5},
    rollout={"group": 4, "temperature": 1.0, "top_p": None, "top_k": None},
    differences=(
        "Its examples shift rewards by -0.5 and multiply them by 10 before they are compared; "
        "only the epsilons beside standard deviations depend on that, and have it here.",
        "It is asynchronous: `rl.sample.max_staleness=2`.",
        _DECAY,
    ),
)
"""The defaults of AReaL at 4aef98d (2026-05-21), taken from its examples/math."""
