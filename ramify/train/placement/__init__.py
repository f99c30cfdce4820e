"""Decide where a run's processes are placed: on one machine or many, started directly or by Ray.

placement_spec.py       the recipe's section: pools, roles, and which roles share a slot
placement_slots.py      which process gets which slot, and whether the slots fit the pools
rollout_worker.py       a process that samples rollouts
rollout_workers.py      the pool of these processes, as the run sees it
reward_services.py      servers of judges and rewards
"""
