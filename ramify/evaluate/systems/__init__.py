"""Other systems that answer the items of a task: the same questions, the same model, the same
price and the same limit for each.

    base.py            what a system is, and the seat at a meter that it asks the model through
    attempt.py         one item answered by a system, and scored: an ``AttemptOutcome``
    program_runner.py  a program that answers one item, in a separate process
    command.py         a command of the user as a system
    peers.py           rlms, droste and dspy, each in its own environment
    peer_program.py    the program that runs in the environment of a peer

Not here: the meter itself (``serve/meter.py``), and which systems answer which items.
"""
