"""ramify eval verifiers_env.py:task --model openai:gpt-5-nano
ramify train recipes/rlvr.py task.name=verifiers_env.py:task"""

from ramify import tasks


def correct_answer(answer, item):
    return float(answer == item.gold)


def task(rows="hf:openai/gsm8k:main"):
    return tasks.dataset(rows, reward=correct_answer)
