"""Where a run's processes are placed: on one machine or many, started directly or by Ray.

placement_spec.py       the recipe's part: pools, roles, and which roles share a slot
placement_slots.py      which process gets which slot, and whether the slots fit the pools
launcher.py             the interface that starts processes on their slots
local_launcher.py       the launcher of this machine
ray_launcher.py         the launcher of a Ray cluster
node_agent.py           the process on a slot that starts the others
rollout_worker.py       a process that samples rollouts
rollout_workers.py      the pool of these processes, as the run sees it
services.py             servers of judges and rewards
"""
