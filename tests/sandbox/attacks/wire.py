"""Code that writes to the socket in the guest's place. It may end its own session and nothing
else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from attacks.base import attack
from attacks.sharing import cell, verdict_line
from ramify.sandbox.base import Session

if TYPE_CHECKING:
    from attacks.arena import Arena

LIE = {
    "kind": "wire",
    "without_walls": "contained",
    "ends": ("died", "ran", "error", "interrupted"),
    "timeout_s": 3,
}
DONE = "{'op': 'done', 'id': %s, 'value': None, 'error': None, 'restored': [], 'note': None, 'chars': 0}"

attack(
    "half a frame, then nothing",
    code="import os, time\nos.write(sock_fd(), b'\\x40\\0\\0\\0\\x01')\ntime.sleep(60)",
    **{**LIE, "timeout_s": 0.5},
)
attack(
    "half a frame, then a loop",
    code="import os\nos.write(sock_fd(), b'\\x40\\0')\nwhile True: pass",
    **{**LIE, "timeout_s": 0.5},
)
attack(
    "a length of 2 GB",
    code="import os\nos.write(sock_fd(), b'\\xff\\xff\\xff\\x7f\\x01')",
    **{**LIE, "ends": ("died",)},
)
attack(
    "a length of 0", code="import os\nos.write(sock_fd(), bytes(64))", **{**LIE, "ends": ("died",)}
)
attack(
    "noise",
    code="import os, random\nos.write(sock_fd(), random.randbytes(1 << 20))",
    **{**LIE, "ends": ("died",)},
)
attack(
    "a frame of almost 256 MB, byte by byte late",
    code="import os, time, struct\nos.write(sock_fd(), struct.pack('<IBI', 250 << 20, 1, 2) + b'{}')\nchunk = b'a' * (1 << 20)\nfor _ in range(40): os.write(sock_fd(), chunk)\ntime.sleep(60)",
    **{**LIE, "timeout_s": 1, "host_mb": 200},
)
attack(
    "deep JSON",
    code='say(b\'{"op":"call","id":1,"name":"x","value":\' + b\'[\' * 1_000_000 + b\']\' * 1_000_000 + b\'}\')',
    **{**LIE, "ends": ("died", "ran")},
)
attack(
    "a deep value",
    code='v = \'{"$":"tuple","v":[\' * 20_000 + \']}\' * 20_000\nsay((\'{"op":"call","id":1,"name":"x","tags":true,"value":\' + v + \'}\').encode())',
    **{**LIE, "ends": ("died", "ran")},
)
attack(
    "a value of 5 million items",
    code='say(b\'{"op":"call","id":1,"name":"x","value":[[\' + b\',\'.join([b\'[]\'] * 5_000_000) + b\'],{}]}\')',
    **{**LIE, "host_mb": 1200},
)
attack(
    "an integer of a million digits",
    code="say({'op': 'call', 'id': 1, 'name': 'x', 'tags': True, 'value': [[{'$': 'int', 'v': '9' * 1_000_000}], {}]})",
    **LIE,
)
attack(
    "an own end, forged",
    code=f"say({DONE % 2})\nsay({DONE % 2})\nimport time\ntime.sleep(60)",
    **LIE,
)
ENDS = {
    "an echo": "{'value': 'x' * 3_000_000}",
    "an error": "{'error': 'x' * 3_000_000}",
    "restored names": "{'restored': ['x'] * 200_000}",
    "one restored name": "{'restored': ['x' * 3_000_000]}",
    "a note of the wrong type": "{'note': [1]}",
}
for what, more in ENDS.items():
    attack(
        f"a forged end with too much: {what}",
        code=f"say({DONE % 2} | {more})\nimport time\ntime.sleep(60)",
        **{**LIE, "ends": ("died",)},
    )
attack(
    "a call with a name of a million characters",
    code="say({'op': 'call', 'id': 1, 'name': 'x' * 1_000_000, 'value': [[], {}]})",
    **{**LIE, "ends": ("died",)},
)
attack(
    "the end of another cell",
    code=f"for id in range(1000): say({DONE % 'id'})",
    **{**LIE, "ends": ("died", "ran")},
)
attack("a flood of ends", code=f"while True: say({DONE % 1})", **LIE)
attack(
    "a second hello",
    code="say({'op': 'hello', 'pid': arena['host']})",
    **{**LIE, "ends": ("died",)},
)
attack(
    "a request that only the host makes",
    code="say({'op': 'run', 'id': 1, 'code': '1'})",
    **{**LIE, "ends": ("died",)},
)
attack("an unknown operation", code="say({'op': 'fork', 'id': 1})", **{**LIE, "ends": ("died",)})
attack(
    "calls of unknown names",
    code="""
for name in ('', 'x' * 1_000_000, '__class__', '\\ud800', 'os.system', '../../etc/passwd'):
    try: print(call_host(name, 1))
    except Exception as error: print(type(error).__name__)
""",
    **{**LIE, "ends": ("ran", "died")},
)
attack(
    "a flood of output",
    code="data = b'x' * 65536\nfor _ in range(1000): say({'op': 'out', 'skip': 0, 'chars': 0, 'upto': 0, 'blobs': [len(data)]}, data)\nprint('done')",
    **LIE,
)
attack(
    "output that counts wrong",
    code="for n in (0, 1 << 61, 1 << 62): say({'op': 'out', 'skip': n, 'chars': n, 'upto': n, 'blobs': [1]}, b'x')\nimport os\nos._exit(1)",
    **LIE,
)
attack(
    "a flood of calls whose answers are never read",
    code="""
import time
for id in range(1, 2000): say({'op': 'call', 'id': id, 'name': 'big', 'value': [[1], {}]})
time.sleep(60)
""",
    **{**LIE, "timeout_s": 2, "host_mb": 700},
)


async def flood_then_interrupt(arena: Arena, session: Session) -> str:
    """More concurrent calls than the host accepts: it stops reading, and yet an interrupt must get
    through."""
    asyncio.get_running_loop().call_later(0.5, session.interrupt, "deadline")
    started = time.monotonic()
    said = await cell(
        session,
        "for id in range(1, 100_000): say({'op': 'call', 'id': id, 'name': 'sleep', 'value': [[9], "
        "{}]})",
    )
    return verdict_line("time past the deadline", time.monotonic() - started > 20, said)


attack("a flood of calls that sleep", act=flood_then_interrupt, **LIE)
attack(
    "calls numbered backwards",
    code="for id in (5, 4, 4, 0): say({'op': 'call', 'id': id, 'name': 'echo', 'value': [[1], {}]})",
    **{**LIE, "ends": ("died",)},
)
attack(
    "the wire closed",
    code="import os\nos.close(sock_fd())\nwhile True: pass",
    **{**LIE, "ends": ("died", "error")},
)
attack(
    "the wire shut down one way",
    code="import socket\nsocket.socket(fileno=sock_fd()).shutdown(socket.SHUT_WR)\nwhile True: pass",
    **{**LIE, "ends": ("died",)},
)
attack(
    "the wire read by the attacker",
    code="import os\nos.set_blocking(sock_fd(), False)\nfor id in range(1, 50): say({'op': 'call', 'id': id, 'name': 'echo', 'value': [['x'], {}]})\nimport time\ntime.sleep(.1)\ntry: os.read(sock_fd(), 7)\nexcept OSError: pass",
    **LIE,
)
SHELF = """
import os
def shelf():
    for fd in range(3, 1024):
        try:
            if os.fstat(fd).st_size == 16 << 20: return fd
        except OSError: pass
    raise Gone()
def shelved(id, *lengths, **more):
    tags = [{'$': 'bytes', 'v': n} for n in range(len(lengths))]
    say({'op': 'call', 'id': id, 'name': 'echo', 'value': [tags, {}], 'tags': True, 'blobs': list(lengths), 'shelved': True, **more})
"""
attack(
    "more on the shelf than it holds",
    code=SHELF + "shelved(1, (8 << 20) + 1)\nimport time\ntime.sleep(60)",
    **{**LIE, "ends": ("died",)},
)
attack(
    "the shelf emptied under the host's hands",
    code=SHELF
    + """
for act in (lambda: os.ftruncate(shelf(), 0), lambda: os.ftruncate(shelf(), 1 << 40), lambda: os.posix_fallocate(shelf(), 0, 1 << 34)):
    attempt('a shelf of another size', act)
""",
    kind="wire",
    tries=3,
    without_walls="contained",
)
attack(
    "the shelf written while the host reads",
    code=SHELF
    + """
import threading
data = [bytes([n]) * (4 << 20) for n in (0, 255)]
def scribble():
    while True:
        for part in data: os.pwrite(shelf(), part, 0); os.pwrite(shelf(), part, 8 << 20)
threading.Thread(target=scribble, daemon=True).start()
def answered(id):
    os.read(sock_fd(), 65536)
for id in range(1, 100): shelved(id, 4 << 20); answered(id)
""",
    **{**LIE, "host_mb": 128},
)
attack(
    "the shelf announced again and again",
    code=SHELF + "for id in range(1, 2000): shelved(id, 8 << 20)",
    **{**LIE, "ends": ("died",)},
)
attack(
    "a shelf read more often than it was filled",
    code=SHELF
    + "for id in range(1, 500): shelved(id, 100, got=1 << 61)\nfor id in range(500, 900): shelved(id, 100, got=1)",
    **LIE,
)
attack(
    "what others had on the shelf",
    code=SHELF
    + """
def act():
    if any(os.pread(shelf(), 16 << 20, 0)): return 'text of another'
    raise Gone()
attempt('what others had on it', act)
""",
    kind="siblings",
    without_walls="contained",
)

attack(
    "descriptors sent to the host",
    code="""
import array, json, os, socket, struct
sock = socket.socket(fileno=os.dup(sock_fd()))
text = json.dumps({'op': 'out', 'skip': 0, 'chars': 0, 'upto': 0, 'blobs': [1]}).encode()
data = struct.pack('<IBI', 6 + len(text), 1, len(text)) + text + b'x'
sent = 0
for _ in range(500):
    try: sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2] * 10))])
    except OSError: break
    sent += 1
sock.detach()
print(sent)
""",
    **{**LIE, "kind": "descriptors"},
)
attack(
    "forged identity on the wire",
    code="""
import array, socket, struct, os
sock = socket.socket(fileno=os.dup(sock_fd()))
def act():
    return sock.sendmsg([b''], [(socket.SOL_SOCKET, 2, struct.pack('3i', arena['host'], 0, 0))])
attempt('SCM_CREDENTIALS of the host', act)
""",
    kind="descriptors",
    without_walls="needs root",
    ends=("ran", "died"),
)
attack(
    "descriptors that were inherited",
    code="""
import os, stat, fcntl
def kind(fd):
    try: mode = os.fstat(fd).st_mode
    except OSError: return None
    return stat.S_IFMT(mode)
found = {fd: kind(fd) for fd in range(3, 1024) if kind(fd) is not None}
odd = {fd: oct(mode) for fd, mode in found.items() if mode not in (stat.S_IFSOCK, stat.S_IFREG)}
def many():
    if len(found) <= 4 and not odd: raise Gone(found)
    return found, odd
attempt('open ones', many)
def folder():
    for fd in range(1024):
        try: return os.listdir(fd)
        except OSError: pass
    raise Gone()
attempt('a folder', folder)
""",
    kind="descriptors",
    tries=2,
    without_walls="contained",
)
attack(
    "descriptors passed between sessions",
    code="""
import socket, array
def act():
    socks = own_sockets()
    if len(socks) > 1: return socks
    raise Gone()
attempt('a second wire', act)
""",
    kind="descriptors",
    without_walls="contained",
)
