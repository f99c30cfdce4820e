"""Estimate training runs on many machines: the placement of processes, the memory of each process,
and the time of a step.

Before a run starts:

    model_and_device_specs.py  the sizes of models and of devices (by name) that determine them
    memory_estimates.py        bytes of each kind of process
    step_time_estimate.py      seconds of each part of a step, from device speeds or measurements
    plan.py                    the whole plan of a recipe
    scheduler_job.py           the job that a plan implies, and the script of its nodes
    job_files.py               that job for Slurm, Kubernetes, SkyPilot and Ray

From a measured run, a prediction for other devices and settings:

    rollout_workloads.py     a rollout as a workload: tokens, seconds of code, dependencies
    measured_engine_rate.py  speed of an engine by the number of concurrent sequences, fitted to a
                            run or measured on a live engine; CPU seconds of a run's steps
    simulation_inputs.py    measurements read from a run's folder
    simulated_engine.py     an engine in simulated time, and what its slots hold of requests
    simulated_rollout.py    a rollout in simulated time, and the CPU cores that the parts share
    simulate.py             a whole run in simulated time; the settings to simulate, and the best
"""
