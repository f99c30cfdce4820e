"""Where the processes of a run stand: one machine or many, by this machine's own means or by Ray.

placement_spec.py      what a recipe says: pools, roles, who shares a seat
placement_slots.py     who sits where, and whether that fits
ray.py       a cluster of Ray that starts processes on those seats
"""
