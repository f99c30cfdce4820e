"""Every process that a run starts and watches, and the calls between them.

child_process.py      a process of this machine, beside this one or in its place
process_guard.py      the program that ends a process with everything that it started
launcher.py           slots (shares of a machine); starts processes on them, on this machine
ray_launcher.py       the launcher of a Ray cluster
connect_back.py       connections of started processes, which prove that they have a key
restarts.py           when a lost process is restarted, and when it is given up
rank_group.py         processes that run the same calls together
rank_watch.py         which of them is lost, or keeps the others waiting
"""
