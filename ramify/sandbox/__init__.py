"""Sandboxes for code that models write.

This package starts a separate process for each session, communicates with it and ends it.

The files of each folder run in the process shown, and are imported there under the module name
shown:

    base.py, host/,   this process: the API, one      ramify.sandbox.…
    providers/        session, one kind of sandbox
    ─────────────────────────────────────────────────────────────────────────────────────────────
    server/           the fork server, or the first   ramify_server_…   forks sessions; trusted
                      process in a container
    jail/             the fork server of a jail,      ramify_jail_…     builds the walls; trusted
                      and each session's first steps
    guest/            each session                    ramify_guest      hostile from its first cell

Whatever runs below the line uses the standard library only, and ``guest_module_files.py`` says how
it is loaded. The modules of ``guest/`` are also imported here: both ends speak one protocol with
one codec. So are constants and structures of ``server/`` and ``jail/``.

A session is forked from the fork server. Once it runs cells (pieces of model-written code), they
may change everything in that process, so this process treats each message from a session as
hostile: ``host/session_frame_connection.py`` checks the form and size of the message, and
``host/session.py`` checks whether it may arrive now.

Imports go in one direction: ``providers`` → ``host`` → ``base.py`` → ``guest``; and ``jail`` →
``server`` → ``guest``. Sandboxes of other vendors are in ``ramify/extras/sandboxes/``.
"""
