"""ramify train skyrl_gsm8k.py"""

from ramify import tasks, train


def item(row):
    question = (
        row["question"] + ' Let\'s think step by step and output the final answer after "####".'
    )
    return tasks.Item(question, gold=row["answer"].split("#### ")[1].replace(",", ""))


def gsm8k():
    return tasks.dataset("hf:openai/gsm8k:main", item=item, reward="last_number")


def run():
    return train.Run(
        name="gsm8k_test",
        policy=train.PolicySpec(path="Qwen/Qwen2.5-1.5B-Instruct"),
        task=train.TaskSpec(name=f"{__file__}:gsm8k"),
        rl=train.RlSpec(algorithm=train.GRPO(), rollout=train.RolloutOptions(group=5, direct=True)),
        schedule=train.Schedule(evaluate_every=5, checkpoint_every=10),
        trackers=("wandb",),
    )
