"""Every process that a run starts and watches, and the calls between them.

child_process.py      a process of this machine: start, ask, signal, end
process_guard.py      the program that ends a process with everything that it started
"""
