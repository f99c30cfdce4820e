"""The small math agent with a hindsight teacher: outcome reward says whether an attempt was right,
and a teacher with a short hint says how to improve it.

    ramify train recipes/programs_hybrid.py policy.path=runs/programs-sft/policy --out runs/hybrid
    … rl.signals.teacher.hints.judge=ramify.train:OracleJudge
                                                  hints from facts: an upper bound
    … rl.signals.teacher.source=ema               a teacher that follows the policy

After each rollout, a rule reads the errors that the policy saw and states in one sentence what
would have helped. The frozen initial policy reads the same tokens again, with that sentence in the
prompt. If it finds a token likelier than the policy did, the token's advantage rises. The weight of
this term is annealed to zero, because the teacher is limited by what it has learnt itself.
``benchmarks/hybrid.py`` compares this recipe with variants and controls.
"""

from __future__ import annotations

import msgspec
from programs import run as programs

from ramify import tasks, train


def run() -> train.Run:
    outcome = programs()
    assert outcome.rl is not None
    hints = train.HindsightHints(
        judge=train.RuleHintJudge(), filter=train.HintAcceptanceRules(min_chars=5)
    )
    steps = max(1, round(0.8 * outcome.rl.steps))
    return msgspec.structs.replace(
        outcome,
        name="programs-hybrid",
        rl=msgspec.structs.replace(
            outcome.rl,
            signals={
                "teacher": train.TeacherSignal(hints=hints, template=tasks.PROGRAM_HINT + "{hint}")
            },
            algorithm=train.Hybrid(
                outcome=train.GRPO(reduction="rollout"),
                terms=(
                    train.HybridTerm(
                        signal="teacher",
                        weight=train.AnnealSchedule(1.0, 0.0, steps=steps),
                        clip=2.0,
                        route="hinted",
                    ),
                ),
            ),
        ),
    )
