"""ramify train tinker_rl_basic.py"""

from ramify import Limits, tasks, train


def item(row):
    question = (
        row["question"] + " Provide a numerical answer without units, written inside \\boxed{}."
    )
    return tasks.Item(question, gold=row["answer"].split("#### ")[1].replace(",", ""))


def gsm8k():
    return tasks.dataset("hf:openai/gsm8k:main", item=item, reward="boxed_math")


def run():
    return train.Run(
        name="rl_basic",
        policy=train.PolicySpec(path="Qwen/Qwen3.5-9B-Base", lora=train.LoraSpec(rank=32)),
        task=train.TaskSpec(name=f"{__file__}:gsm8k"),
        rl=train.RlSpec(
            sample=train.RolloutBatchSpec(items=128),
            rollout=train.RolloutOptions(group=16, direct=True),
            optim=train.OptimizerSpec(lr=4e-5),
        ),
        limits=Limits(max_reply_tokens=256),
        schedule=train.Schedule(evaluate_every=None),
    )
