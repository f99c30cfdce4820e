"""ramify train trl_sft.py"""

from ramify import train


def run():
    return train.Run(
        policy=train.PolicySpec(path="Qwen/Qwen2.5-0.5B"),
        sft=train.SftSpec(demos="hf:trl-lib/Capybara"),
    )
