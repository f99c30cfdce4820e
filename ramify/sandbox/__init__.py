"""Sandboxes: each session of a model's code lives in a separate process, which this folder starts,
talks to and ends.

A folder says which process runs its files, and under which module name:

    base.py, host/,   this process: the API, one      ramify.sandbox.…
    providers/        session, one kind of sandbox
    ─────────────────────────────────────────────────────────────────────────────────────────────
    server/           the fork server, or the first   ramify_server_…   forks sessions; trusted
                      process in a container
    jail/             the fork server of a jail,      ramify_jail_…     builds the walls; trusted
                      and each session's first steps
    guest/            each session                    ramify_guest      hostile from its first cell

Whatever runs below the line uses the standard library only, and ``host/server_files.py`` says how
it is loaded. The modules of ``guest/`` are also imported here: both ends speak one protocol with
one codec. So are constants and structures of ``server/`` and ``jail/``.

A session is forked from the fork server. Once its guest serves, cells may change everything in that
process, so this process treats each of its frames as hostile: ``host/session_wire.py`` checks its
form and size, and ``host/session.py`` whether it may arrive now.

Imports go one way: ``providers`` → ``host`` → ``base.py`` → ``guest``; and ``jail`` → ``server`` →
``guest``. Sandboxes of other vendors are in ``ramify/extras/sandboxes/``.
"""
