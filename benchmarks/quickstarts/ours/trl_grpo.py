"""ramify train trl_grpo.py"""

from ramify import train


def run():
    return train.Run(
        policy=train.PolicySpec(path="Qwen/Qwen2.5-0.5B-Instruct"),
        task=train.TaskSpec(name="hf:trl-lib/DeepMath-103K", options={"reward": "math"}),
        rl=train.RlSpec(rollout=train.RolloutOptions(direct=True)),
    )
