"""Reinforcement learning on call trees in one file, with the library's functions but without its
training loop.

    python recipes/rl_loop.py CHECKPOINT [STEPS [ITEMS]]

CHECKPOINT is a Hugging Face folder, such as the last one of ``ramify train recipes/tiny.py
rl=null``.

``ramify/train/trainer.py`` has what ``ramify train`` does in addition: checkpoints and
resuming, validation, self-checks, and rollouts that begin before the previous step has ended.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from ramify import RLM, Limits, inference, tasks, train


async def main(checkpoint: str, num_steps: int = 45, num_items: int = 24) -> None:
    torch.set_num_threads(1)
    policy = inference.load_policy(checkpoint)  # model, tokenizer, renderer
    # An engine that shares the policy's weights.
    client = inference.LocalClient(policy, name="local:policy")
    backend = train.SingleBackend(
        policy,
        train.OptimizerSpec(lr=1e-3, schedule="linear", num_steps=num_steps, max_grad_norm=0.5),
    )
    task, algorithm, loss = tasks.task_of("ledger"), train.DrGRPO(), train.LossSpec()
    limits = Limits(max_turns=6, max_reply_tokens=100, max_seconds=86_400, max_concurrency=512)

    # The RLM runs jailed sessions and child calls, and records the tree.
    async with RLM(client, scaffold="tiny", limits=limits) as rlm:
        rollouts = train.TaskRolloutRunner(rlm, task, train.RolloutOptions(group=8))
        for step in range(num_steps):
            # Sample. A rollout is a tree of calls with its rewards and the ids of all prompt and
            # sampled tokens.
            groups = await rollouts.groups(
                task.splits["train"][step * num_items : (step + 1) * num_items], step
            )

            # Assign credit. The rewards of a tree become an advantage and a weight for each
            # sampled token.
            assigned = algorithm.assign_advantages(groups, task.weights)
            if assigned.no_signal:
                print(f"step {step}: nothing to learn, {assigned.no_signal}")
                continue

            # Learn. Trees become sequences, and sequences a forest in which shared tokens occur
            # once.
            batches = train.pack(
                train.token_sequences(assigned.rollouts), backend.packing, assigned.denominators
            )
            measured = backend.forward_backward(batches, loss) | backend.optim_step()

            # Publish. The engine discards what it had cached for the old weights.
            await client.update(policy.model, backend.version)
            print(
                f"step {step}: reward {assigned.metrics['reward']:.3f}  loss {measured['loss']:.4f}"
            )

    await client.close()
    # For requests that do not set a temperature.
    policy.defaults = inference.SamplingDefaults(temperature=0.0)
    inference.save_policy(policy, f"{checkpoint}-rl")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:4])))
