"""``retool_grpo`` with two more signals: rewards of single turns, and a hindsight teacher.

    ramify train recipes/retool_hybrid.py policy.path=runs/retool-sft/policy \\
        task.options.train=dapo-math-17k.parquet task.options.validation=aime-2025.parquet \\
        task.options.test=aime-2024.parquet --out runs/retool-hybrid
    … rl.signals.process.judge.model=vllm:Qwen/Qwen3-4B@http://127.0.0.1:8001/v1 \\
        rl.signals.teacher.hints.judge.model=vllm:Qwen/Qwen3-4B@http://127.0.0.1:8001/v1
                                                                                   separate judges

One judge grades each turn by the tool's response to it (``process``). Another reads the finished
attempt and says in a sentence what would have helped, or abstains; the frozen initial policy, with
that sentence in its prompt, then scores every token (``teacher``). The policy itself is the judge
unless another model is named. The teacher's gap is clipped at 2, and its weight is annealed to zero
over the first four fifths of the run: a constant weight slowed learning in the small version of
this experiment (``docs/learning.md``).
"""

from __future__ import annotations

import msgspec
from retool_grpo import run as retool_grpo

from ramify import Sampling, train

JUDGING = Sampling(4096, temperature=0.6)


def run() -> train.Run:
    outcome = retool_grpo()
    assert outcome.rl is not None
    judges = {"model": "policy", "votes": 1, "sampling": JUDGING}
    return msgspec.structs.replace(
        outcome,
        name="retool-hybrid",
        rl=msgspec.structs.replace(
            outcome.rl,
            signals={
                **outcome.rl.signals,
                "process": train.ProcessRewardSignal(judge=train.StepJudge(**judges)),
                "teacher": train.TeacherSignal(
                    hints=train.HindsightHints(
                        judge=train.HintWritingJudge(**judges), only="failed"
                    )
                ),
            },
            algorithm=train.Hybrid(
                outcome=train.GRPO(),
                terms=(
                    train.HybridTerm(signal="process", weight=0.3, norm="step_index"),
                    train.HybridTerm(
                        signal="teacher",
                        weight=train.AnnealSchedule(1.0, 0.0, steps=200),
                        clip=2.0,
                        route="hinted",
                    ),
                ),
            ),
        ),
    )
