"""Hybrid runs end to end through the real loop: rollouts, judges, a teacher, and a policy that is
trained on all of them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.extras.studies.hindsight_hints import HindsightHints
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.models import folder_file_checksums
from ramify.models.weights import load_weights
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.build_trainer import model_to_train, teachers_of
from ramify.train.call_depth_models import FrozenModelBudget, ModelsByCallDepth
from ramify.train.config import Schedule, SftSpec
from ramify.train.config_overrides import override
from ramify.train.data.sft_data import read as trajectories
from ramify.train.engine_consistency_checks import TokenIdHashingClient
from ramify.train.execute import train
from ramify.train.learner import PolicyWeightTransfer
from ramify.train.losses.total_loss import LossSpec
from ramify.train.metrics import read_metrics
from ramify.train.preflight import check_teacher_top_p
from ramify.train.recipe import load_stored_run
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.signals.base import TokenScoringRequest
from ramify.train.signals.judge import ProcessRewardSignal, StepJudge
from ramify.train.signals.outcome import ToolErrorSignal
from ramify.train.signals.signal_composition import Hybrid
from ramify.train.signals.signal_term import AnnealSchedule, HybridTerm
from ramify.train.signals.teacher import TeacherSignal
from ramify.train.signals.teacher_logprobs import LocalTokenScorer
from ramify.train.start_rollout_resources import RolloutResources, client_of
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.training_and_evaluation_pages import rollout_files, saved_rollouts
from ramify.viewer.transcript import call_transcript, tokens
from ramify.viewer.watched_run import WatchedRun
from tests.train.small import assemble, small, weights_of

TEACHER = HybridTerm(
    signal="teacher", weight=AnnealSchedule(1.0, 0.0, steps=50), clip=2.0, route="hinted"
)


def hybrid(tmp_path: Path, **fields: Any) -> Any:
    script = tmp_path / "judge.json"
    script.write_text(
        json.dumps(
            [
                {"match": "Judge step 0", "reply": r"fine \boxed{1}"},
                {"match": "Judge", "reply": "hm"},
            ]
        )
    )
    options: dict[str, Any] = {
        "steps": 2,
        "sample": RolloutBatchSpec(items=2),
        "rollout": RolloutOptions(group=3, concurrency=8),
        "algorithm": Hybrid(
            outcome=DrGRPO(),
            observe=0.1,
            terms=(
                HybridTerm(signal="process", weight=0.3, norm="step_index"),
                HybridTerm(signal="rule", weight=0.1),
                TEACHER,
            ),
        ),
        "signals": {
            "process": ProcessRewardSignal(judge=StepJudge(model=f"scripted:{script}", votes=2)),
            "rule": ProcessRewardSignal(judge="tests.train.signals.rules:Steps"),
            "teacher": TeacherSignal(
                hints=HindsightHints(judge="tests.train.signals.rules:Hints", cut_off=True),
                cut_off=True,
            ),
            "tools": ToolErrorSignal(),
        },
        "judge_cache": str(tmp_path / "judges"),
        "loss": LossSpec(kl_beta=0.01, kl="k3"),
    }
    rl = msgspec.structs.replace(small().rl, **(options | fields))
    return small(rl=rl, warmup=None, schedule=Schedule(evaluate_every=None, save_rollouts_every=1))


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 8}])
def test_teacher_is_rejected_with_truncated_sampling(cut: Any, tmp_path: Path) -> None:
    """The teacher scores over the whole vocabulary; other signals are allowed."""
    run = hybrid(tmp_path, rollout=RolloutOptions(group=3, **cut))
    with pytest.raises(
        ConfigError,
        match=r"cannot be combined with the teacher rl\.signals\.teacher: it scores over the whole",
    ):
        train(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    others = {name: each for name, each in run.rl.signals.items() if name != "teacher"}
    check_teacher_top_p(
        msgspec.structs.replace(
            run, rl=msgspec.structs.replace(run.rl, signals=others, algorithm=Hybrid())
        )
    )
    check_teacher_top_p(hybrid(tmp_path, rollout=RolloutOptions(group=3, top_p=1.0)))


def test_judge_without_any_valid_verdict_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mute.json").write_text(json.dumps([{"match": "Judge", "reply": "11 of 10!"}]))
    judge = StepJudge(model=f"scripted:{tmp_path / 'mute.json'}")
    run = hybrid(
        tmp_path,
        steps=1,
        signals={"process": ProcessRewardSignal(judge=judge)},
        algorithm=Hybrid(terms=(HybridTerm(signal="process", weight=0.3),)),
    )
    train(run, tmp_path / "out")
    assert (
        "signal 'process' has no verdict for any of 6 rollouts; replies: outside the format"
        in (tmp_path / "out" / "run.log").read_text()
    )


def test_run_with_every_signal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = hybrid(tmp_path)
    train(run, out)
    rows = [
        row.values for row in read_metrics(out) if row.stage == "rl" and "learn_s" in row.values
    ]
    assert len(rows) == 2
    for row in rows:
        assert row["process/votes"] == row["process/invalid"]  # turn 0 has both votes, turn 1 none
        assert row["process/acts_on"] == 1
        assert 0 < row["teacher/hint_rate"] < 1
        assert 0 < row["teacher/mean_abs"] <= 2
        assert row["ce_loss"] > 0
        assert row["teacher_s"] > 0
        assert row["teacher_plain_tokens"] > 0
        assert row["signals_wait_s"] >= 0
        assert 0 < row["signal_share/teacher"] < 1
        assert row["judge_calls"] <= row["process/votes"] * 2
    assert (
        rows[0]["ref_kl"] < 1e-6 < rows[1]["ref_kl"]
    )  # at the first step the policy equals the reference
    assert rows[1]["teacher/weight"] == pytest.approx(0.98)
    kept = list(trajectories(out / "rollouts"))
    assert len(kept) == 12
    judged = [each for each in kept if any(call.kind == "judge" for call in each.calls)]
    assert len(judged) == 12
    one = judged[0]
    asked = [call for call in one.calls if call.kind == "judge"]
    assert {call.parent.call for call in asked if call.parent} == {"0"}
    assert asked[0].answer == r"fine \boxed{1}"
    assert len({call.id for call in one.calls}) == len(one.calls)
    check_viewer_shows_scores(out)
    assert (out / "reference/model.safetensors").is_file()
    check_rejection_sampling(out, tmp_path)
    again = load_stored_run(out)
    assert again.rl is not None
    assert again.rl.algorithm == run.rl.algorithm
    assert again.rl.signals == run.rl.signals


def check_viewer_shows_scores(out: Path) -> None:
    """Check what the viewer reads from saved rollouts: votes on the turns, hints, and the teacher's
    score per token."""
    library = RunCatalog([out])
    step, path = max(rollout_files(out).items())
    keys = [row["key"] for row in saved_rollouts(out, step, f"p0/rollouts/{path.name}")["rows"]]
    assert len(keys) == 6
    hints = []
    for key in keys:
        run = WatchedRun(library.find(key))
        run.refresh()
        turns = call_transcript(run, "0")["turns"]
        marks = {mark["by"]: mark for mark in turns[0]["marks"]}
        assert marks["process"]["values"] == {"process": 1.0}
        assert marks["rule"]["values"]
        hints += [mark["text"] for turn in turns for mark in turn["marks"] if mark["text"]]
        token_view = tokens(run, "0", 0)
        assert len(token_view["scores"].get("teacher", token_view["sampled"])) == len(
            token_view["sampled"]
        )
        assert ("teacher" in token_view["scores"]) == ("teacher" in marks)
        assert call_transcript(run, "0.0")["kind"] == "judge"
    assert 0 < len(hints) < 6
    assert {*hints} == {"say even things, and few of them"}


def check_rejection_sampling(out: Path, tmp_path: Path) -> None:
    """Rejection sampling from a run's rollouts trains on the better ones only, and on no judge
    call."""
    rewards = sorted(each.rewards["correct"] for each in trajectories(out / "rollouts"))
    spec = SftSpec(
        trajectories=str(out / "rollouts"),
        algorithm=msgspec.structs.replace(
            small().sft.algorithm, min_reward=rewards[-4], llm_calls=True
        ),
    )
    made = assemble(
        small(
            policy=msgspec.structs.replace(small().policy, path=str(out / "policy"), shape={}),
            sft=spec,
            rl=None,
            warmup=None,
        )
    )
    names = {row.name.partition("/call")[0] for row in made.rows if row.name.startswith("step=")}
    assert len(names) == sum(reward >= rewards[-4] for reward in rewards)
    assert all(row.name.endswith("call=0") for row in made.rows if row.name.startswith("step="))


@pytest.mark.parametrize(
    ("top", "support", "loss"),
    [
        (5, "teacher", LossSpec(kd="reverse")),
        (4, "student", LossSpec(kd="surrogate", kd_clip=2.0)),
        (-1, "teacher", LossSpec(kd="forward")),
        (None, "teacher", LossSpec()),
    ],
)
def test_on_policy_distillation_into_the_loss(
    tmp_path: Path, top: int | None, support: Any, loss: LossSpec
) -> None:
    """On-policy distillation from a checkpoint needs no hints; the outcome may have weight 0."""
    run = hybrid(
        tmp_path,
        steps=1,
        loss=loss,
        algorithm=Hybrid(w_rl=0.0, terms=(HybridTerm(signal="teacher", into="loss"),)),
        signals={"teacher": TeacherSignal(source="random", top=top, support=support, cut_off=True)},
    )
    train(
        msgspec.structs.replace(run, sft=msgspec.structs.replace(run.sft, num=4)),
        tmp_path / "out",
    )
    row = next(row.values for row in read_metrics(tmp_path / "out") if "kd_loss" in row.values)
    assert row["kd_loss"] != 0
    assert row["grad_norm"] > 0
    assert row["rl_loss"] == pytest.approx(0, abs=1e-9)


def run_with_ema_teacher(tmp_path: Path) -> Any:
    """A run with an averaged (EMA) policy as its teacher and a KL to the initial policy."""
    run = hybrid(
        tmp_path,
        steps=3,
        loss=LossSpec(kl_beta=0.1),
        algorithm=Hybrid(w_rl=0.5, terms=(HybridTerm(signal="teacher", into="loss"),)),
        signals={"teacher": TeacherSignal(source="ema", ema_decay=0.5, cut_off=True)},
        optim=OptimizerSpec(lr=0.01),
        sample=RolloutBatchSpec(items=1),
        rollout=RolloutOptions(group=3, concurrency=1),
    )
    schedule = Schedule(evaluate_every=None, checkpoint_every=1, keep_last=9)
    return msgspec.structs.replace(
        run, sft=msgspec.structs.replace(run.sft, num=4), schedule=schedule
    )


def test_run_with_ema_teacher_resumes_bit_identically_in_another_folder(
    tmp_path: Path,
) -> None:
    run = run_with_ema_teacher(tmp_path)
    whole, other = tmp_path / "whole", tmp_path / "other"
    step = train(run, whole).step
    ended = weights_of(whole / f"checkpoints/step-{step:06d}")
    train(run, other, resume=whole / f"checkpoints/step-{step - 1:06d}")
    resumed = weights_of(other / f"checkpoints/step-{step:06d}")
    assert max(float((ended[name] - resumed[name]).abs().max()) for name in ended) == 0
    shutil.rmtree(whole / f"checkpoints/step-{step - 1:06d}/teachers")
    folder_file_checksums.write(
        whole / f"checkpoints/step-{step - 1:06d}"
    )  # as of a run without teachers
    with pytest.raises(
        ConfigError, match="start a new run, or resume from a checkpoint that holds"
    ):
        train(run, tmp_path / "third", resume=whole / f"checkpoints/step-{step - 1:06d}")


def test_teachers_use_weights_of_the_ranks_with_remote_engines(
    tmp_path: Path,
) -> None:
    """Teachers follow the weights on the ranks, not this process's policy, which is neither sampled
    from nor trained."""
    run = hybrid(
        tmp_path,
        algorithm=Hybrid(outcome=DrGRPO(), observe=0.1),
        signals={
            source: TeacherSignal(source=source, ema_decay=0.5)
            for source in ("live", "ema", "reference")
        },
    )
    run = msgspec.structs.replace(
        run,
        compute=TrainerComputeSpec(backend="fsdp", precision="fp32", shard=FsdpSpec(ranks=1)),
        inference=InferenceSpec(urls=("http://127.0.0.1:9",)),
        sft=msgspec.structs.replace(run.sft, num=4),
    )
    made = assemble(run)
    client = client_of(made)
    audited = TokenIdHashingClient(client)
    rlm = RLM(audited, limits=run.limits, scaffold=made.scaffold, sandbox=run.sandbox)
    depths = ModelsByCallDepth((), FrozenModelBudget(), audited)
    parts = RolloutResources(client, audited, rlm, None, depths)
    trained = model_to_train(made, tmp_path / "out")
    weights = PolicyWeightTransfer(made.policy, made.serving, client, trained)
    teachers = teachers_of(made, parts, tmp_path / "out", trained, weights)
    assert teachers is not None
    try:
        backend = trained.backend(OptimizerSpec())
        row = TokenScoringRequest([5, 6, 7, 8], [(1, 4)])
        names = ("live", "ema", "reference")

        def moved(step: int) -> list[dict[str, list[float]]]:
            """Change the weights on the ranks; return the teachers' scores and those of the new
            weights."""
            noise = torch.Generator().manual_seed(step)
            changed = {
                name: each + 0.05 * torch.randn(each.shape, generator=noise)
                for name, each in backend.weights()
            }
            backend.load_weights(changed)
            policy = dataclasses.replace(made.policy, model=copy.deepcopy(made.policy.model))
            load_weights(policy.model, changed)
            (wanted,) = LocalTokenScorer(
                SingleBackend(policy), 512, policy.config.vocab_size, client.close
            ).compute([row])
            scorers = asyncio.run(teachers.teachers_at_step(step))
            return [
                {name: scorers[name].compute([row])[0].logprobs for name in names},
                {"now": wanted.logprobs},
            ]

        first, now = moved(0)
        assert first == dict.fromkeys(names, pytest.approx(now["now"], abs=1e-6))
        second, now = moved(1)
        assert second["live"] == pytest.approx(now["now"], abs=1e-6)
        assert second["live"] != pytest.approx(first["live"], abs=1e-3)
        assert second["reference"] == first["reference"]
        assert second["ema"] not in (first["ema"], second["live"])
    finally:
        teachers.close()
        trained.close()
        asyncio.run(client.close())


def test_invalid_signals_are_rejected_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown signal 'teachr': did you mean 'teacher'"):
        hybrid(tmp_path, signals={"t": "teachr"})
    with pytest.raises(ConfigError, match="unknown signal 'process' in a term"):
        hybrid(
            tmp_path,
            signals={"proces": ProcessRewardSignal(judge="tests.train.signals.rules:Steps")},
        )
    with pytest.raises(ConfigError, match="need an algorithm that weighs them"):
        hybrid(tmp_path, algorithm=DrGRPO())
    with pytest.raises(ConfigError, match="which has no `async read"):
        hybrid(tmp_path, signals={"t": 3})
    run = override(
        small(),
        ["rl.algorithm=hybrid"],
        {"rl.algorithm": ALGORITHMS},
    )
    assert run.rl is not None
    assert run.rl.algorithm == Hybrid()
