"""Start and supervise the processes of a run, and connect them so that they can call one another.

child_process.py              processes here: children of this process, or one in its place
process_guard.py              the program that ends a process with everything that it started
command_template.py           commands that a user writes with placeholders
output_pipe.py                the output of a process, read while it runs
launcher.py                   slots (shares of a machine); starts processes on them, on this machine
ray_cluster.py                joining a Ray cluster, or starting one here
ray_launcher.py               the launcher of a Ray cluster
run_channel.py                authenticated connections: both sides prove that they have its key
message_encoding.py           the messages on them: declared types, never pickle
connect_back.py               started processes connect to the run, with a ticket from their stdin
rank_key_value_store.py       the store of a process group, over these connections
rank_group_authentication.py  the same proof over the connections that gloo and NCCL open
tcp_peer_user.py              whose process is at the other end of a TCP connection of this machine
restarts.py                   when a lost process is restarted, and when it is given up
rank_group.py                 processes that run the same calls together
rank_monitor.py               which of them is lost, or keeps the others waiting
"""
