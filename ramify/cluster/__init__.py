"""Estimates for runs on many machines: placement, memory of each process, and time of a step.

Before a run starts:

    devices.py              GPUs by name: memory, speed, bandwidth
    shape.py                the sizes of a model that determine memory and time
    memory.py               bytes of each kind of process
    steps.py                seconds of each part of a step, from device speeds or measurements
    plan.py                 the whole plan of a recipe

From a measured run, a prediction for other devices and settings:

    rollout_shapes.py       a rollout as a workload: tokens, seconds of code, dependencies
    rate.py                 speed of an engine by the number of concurrent sequences
    calibrate.py            the same, measured on a live engine
    simulation_inputs.py    measurements read from a run's folder
    cores.py                CPU cores shared by an embedded engine, the event loop and sessions
    simulated_cache.py      what an engine's slots hold of earlier requests
    simulated_engine.py     an engine in simulated time
    simulated_rollout.py    a rollout in simulated time
    simulated_queue.py      the queue of groups in simulated time
    simulate.py             a whole run in simulated time
    search_settings.py      the settings to simulate, and the best of them
"""
