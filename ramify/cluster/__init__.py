"""Before a run starts on many machines: who would go where, what each process would hold, and how long a step would take.

devices.py   GPUs by name: memory, speed, bandwidth
shape.py     what of a model decides memory and time
memory.py    bytes of each kind of process
steps.py     seconds of each part of a step, from speeds or from a run's measurements
plan.py      all of it for a recipe
"""
