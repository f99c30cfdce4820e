"""Evaluate other question-answering systems on a task under the same conditions as Ramify.

All systems get the same questions, model, price and limits.

    base.py                  what a system is, and the seat at a meter where it asks the model
    attempt.py               one item answered by a system, and scored: an ``AttemptOutcome``
    program_runner.py        a program that answers one item, in a separate process
    command.py               a command of the user as a system
    peer_libraries.py        rlms, droste and dspy, each in its own environment
    peer_library_program.py  the program that runs in the environment of a peer

The meter, through which all systems ask the model, is in ``serve/metering_proxy.py``. Which systems
answer which items is decided by the caller.
"""
