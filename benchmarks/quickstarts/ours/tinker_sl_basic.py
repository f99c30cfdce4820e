"""ramify train tinker_sl_basic.py"""

from ramify import train


def run():
    return train.Run(
        name="sl_basic",
        policy=train.PolicySpec(path="Qwen/Qwen3.5-9B-Base", lora=train.LoraSpec(rank=32)),
        sft=train.SftSpec(
            demos="hf:HuggingFaceH4/no_robots",
            optim=train.OptimizerSpec(lr=2e-4, schedule="linear"),
        ),
    )
