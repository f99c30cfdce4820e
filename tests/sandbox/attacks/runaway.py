"""Code that does not end, and code that ends too much."""

from attacks.base import attack

STOPS = {"kind": "runaway", "timeout_s": 0.3, "without_walls": "contained"}
POLITE = {**STOPS, "ends": ("interrupted", "died")}
"""Python code that does not resist: an interrupt ends it, or a kill if C code swallows the
interrupt. On a busy machine, a guest may also miss its interrupt within the short grace time."""
RUDE = {**STOPS, "ends": ("died", "interrupted")}

attack("an endless loop", code="while True: pass", **POLITE)
attack("a long sleep", code="import time\ntime.sleep(1000)", **POLITE)
attack(
    "a wait for a lock",
    code="import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()",
    **POLITE,
)
attack(
    "a regular expression that explodes",
    code="import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    **POLITE,
)
attack("a huge power", code="x = 7 ** (10 ** 8)", **POLITE)
attack("a sum in C over a huge range", code="sum(range(10 ** 13))", **POLITE)
attack(
    "a huge integer as text",
    code="import sys\nsys.set_int_max_str_digits(0)\nstr(7 ** 3_000_000)",
    **POLITE,
)
attack(
    "a loop that swallows every exception",
    code="import time\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass",
    **RUDE,
)
attack(
    "interrupts ignored",
    code="import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    **RUDE,
)
attack(
    "all signals masked",
    code="import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    **RUDE,
)
attack(
    "every signal handled",
    code="""
import signal
for n in range(1, 65):
    try: signal.signal(n, lambda *a: None)
    except (OSError, ValueError): pass
while True: pass
""",
    **RUDE,
)
attack(
    "recursion without an end",
    code="""
import sys
sys.setrecursionlimit(2 ** 31 - 1)
def f():
    try: f()
    finally: f()
f()
""",
    **{**RUDE, "ends": ("died", "interrupted", "error")},
)
attack(
    "an exception whose text never ends",
    code="class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    **{**RUDE, "ends": ("died", "interrupted", "error")},
)
attack(
    "a finalizer that never ends",
    code="class D:\n    def __del__(self):\n        while True: pass\nD()\nwhile True: pass",
    **{**RUDE, "ends": ("died", "interrupted")},
)
attack(
    "a thread that goes on after the cell",
    code="import threading\nthreading.Thread(target=lambda: sum(range(10 ** 13)), daemon=True).start()\nimport time\nwhile True: pass",
    **RUDE,
)
attack("a process that ends itself", code="import os\nos._exit(0)", **{**RUDE, "ends": ("died",)})
attack("a crash", code="import ctypes\nctypes.string_at(0)", **{**RUDE, "ends": ("died",)})
attack("an abort", code="import os\nos.abort()", **{**RUDE, "ends": ("died",)})
attack(
    "a stop by itself",
    code="import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nimport time\ntime.sleep(99)",
    **{**RUDE, "ends": ("died", "interrupted", "error")},
)
attack("sys.exit", code="import sys\nsys.exit(3)", **{**RUDE, "ends": ("ran", "error")})
attack(
    "time runs out while a trace function spins",
    code="import sys\nsys.settrace(lambda *a: (_ for _ in ()).throw(ValueError) if 0 else sum(range(10 ** 10)))\nf = lambda: 1\nf()",
    **RUDE,
)
attack(
    "the clock of the host held by a call that never ends",
    code="call_host('sleep', 0.01)\nimport time\nfor _ in range(10 ** 9):\n    call_host('echo', 1)",
    **{**STOPS, "ends": ("interrupted", "died"), "timeout_s": 0.5},
)
