"""Before a run starts on many machines: who would go where, what each process would hold, and how
long a step would take.

devices.py   GPUs by name: memory, speed, bandwidth
shape.py     what of a model decides memory and time
memory.py    bytes of each kind of process
steps.py     seconds of each part of a step, from speeds or from a run's measurements
plan.py      all of it for a recipe

and of a run that was measured: how it would do on other devices.

rollout_shapes.py      what a rollout asks for: tokens, seconds of code, what waits for what rate.py
how fast an engine is, by how many sequences it decodes at once; calibrate.py asks the engine itself
simulation_inputs.py   all that a run's folder says cores.py      processors that engine, loop and
sessions share, where the engine is in the trainer's process simulated_cache.py       what an
engine's slots still hold of earlier requests simulated_engine.py, simulated_rollout.py, simulate.py
an engine, a rollout and a whole run in simulated time search_settings.py     which settings are
tried, and the best of them
"""
