"""The guest: the code that runs inside a sandbox.

It executes cells in a live notebook namespace and talks to the host, the process that opened the
session.

This package defines what a cell can rely on, such as a real ``__main__`` module, the display of a
cell's last value, tracebacks and reserved names. It also defines how values and output are sent,
and how code calls the host. Starting and confining the process is done elsewhere. To start a guest,
pass two file descriptors and call ``SandboxGuest(...).serve()``. The package uses the standard
library only, and importing it has no side effects.

In a session, this folder is the package ``ramify_guest`` (see ``host/guest_module_files.py``). Its
modules import each other by relative names only, and this file imports none of them.

    guest.py  answers the host,         ──┬─> notebook.py           names and cells
              calls from code to the host ├─> interpreter_state.py  what each cell must leave intact
                                          ├─> output.py             prints
                                          └─> session_forking.py    forking
    channel.py  frames to and from the host (message_frames.py, value_encoding.py), and the threads
                that wait for them; when KeyboardInterrupt may be raised
    tables.py   tables and arrays of a context; dataframes.py makes them values of pandas or numpy

The protocol; ``message_frames.py`` defines the layout:

    host:   run{id,code}  set{id,name,value}  get{id,name}  install{id,module,source}
            ret{id,value}  err{id,kind,…}  context{id,packages}+blob  seed{id,seed} (no answer)
            fork{id}+[wire, spool, buffers]
    guest:  hello  out{skip,…}  call{id,name,value}  done{id,value,error,…}
            ok{id}  value{id,value}  failed{id,…}

``"blobs"`` in a header lists the lengths of the raw parts that follow it, or, with ``"shelved":
true``, of those in the shared memory buffers (``HostGuestSharedMemory``); ``"got"`` counts how
often these were read. ``"tags": true`` means that ``value`` is not plain JSON. With ``"soon":
true``, the host serves no other session and its next frame may follow at once (``busy_wait.py``).
"""
