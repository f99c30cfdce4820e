"""The guest: one live notebook namespace and its end of the wire. Runs in anyone's container.

Decides what a cell may count on (a true ``__main__``, echo, tracebacks, reserved names), how values
and output travel, and how code calls the host. Leaves out how the process came to be and what
confines it: whoever starts a guest hands it two file descriptors and calls ``Guest(...).serve()``.
Standard library only, and importing it does nothing.

Where ramify is not, this folder is the package ``ramify_guest`` (``guest_files.py``): its modules
import each other by relative names only, and this file imports none of them.

    guest.py  Guest: answers the host ──┬─> notebook.py     the names, and what a cell is (source.py, shown.py)
                                        ├─> interpreter.py  put back after each cell
                                        ├─> output.py       what is printed (streams.py ─> spools.py; tails.py)
                                        ├─> calls.py        code calls the host, and waits
                                        ├─> branches.py     goes on in two processes
                                        └─> inbox.py        who waits for which frame, and reads ──> channel.py
    channel.py  frames to and from the host (frames.py, values.py, packed.py)    interrupts.py  when one may rise

The wire, of which ``frames.py`` has the layout:

    host:   run{id,code}  set{id,name,value}  get{id,name}  install{id,module,source}  ret{id,value}  err{id,kind,…}
            context{id}+blob  seed{id,seed} (no answer)  fork{id}+[wire, spool, shelf]
    guest:  hello  out{skip,…}  call{id,name,value}  done{id,value,error,…}  ok{id}  value{id,value}  failed{id,…}

``"blobs"`` in a header lists the lengths of the raw parts after it, or where it says ``"shelved":
true``, on the shelf of ``shared_buffers.py``, of which ``"got"`` counts the times it was read;
``"tags": true`` says that ``value`` is not plain JSON.
"""
