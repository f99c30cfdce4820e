"""Attacks that exhaust resources: processes, threads, memory, output, files, descriptors."""

from attacks.base import attack

MEMORY = {
    "kind": "memory",
    "without_walls": "contained",
    "ends": ("error", "ran", "died"),
    "host_mb": 100,
    "timeout_s": 60,
}

attack("one string of 10 GB", code="x = 'a' * (10 << 30)", **{**MEMORY, "ends": ("error",)})
attack("a list without an end", code="l = []\nwhile True: l.append('a' * 100_000)", **MEMORY)
attack(
    "many small objects",
    code="l = []\nwhile True: l += [b'%99d' % n for n in range(10_000)]",
    **MEMORY,
)
attack(
    "shared memory of 8 GB",
    "memory",
    "import mmap\ndef act():\n    m = mmap.mmap(-1, 8 << 30)\n    return len(m)\nattempt('map', "
    "act)",
    without_walls="contained",
    ends=("ran", "error"),
)
attack(
    "memory files beyond the limit",
    "memory",
    """
import os
def act():
    fds = []
    for n in range(8):
        fd = os.memfd_create('bomb')
        fds.append(fd)
        os.posix_fallocate(fd, 0, 64 << 20)
    return len(fds)
attempt('memfd', act)
""",
    host_mb=64,
)
attack(
    "System V shared memory",
    "memory",
    "attempt('shmget', lambda: kernel('shmget', 0, 1 << 20, 0o1600))\nattempt('msgget', lambda: "
    "kernel('msgget', 0, 0o1600))\n"
    "attempt('semget', lambda: kernel('semget', 0, 4, 0o1600))\nattempt('mq_open', lambda: "
    "kernel('mq_open', b'ramify', 0o102, 0o600, None))",
    tries=4,
)
attack(
    "pages locked in memory",
    "memory",
    "def act():\n    if libc.mlockall(3): raise OSError('refused')\nattempt('mlockall', act)",
    without_walls="unsafe",
)
attack(
    "the limit of memory raised",
    "memory",
    """
import resource
def act():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return len('a' * (1 << 30))
def other():
    try: return act()
    except ValueError as error: raise OSError(str(error)) from None
attempt('setrlimit', other)
""",
    without_walls="unsafe",
)
attack(
    "a fork bomb",
    "processes",
    """
import os, signal, time
libc.prctl(15, b'by-attack', 0, 0, 0)
def act():
    pid = os.fork()
    if not pid:
        libc.prctl(15, b'by-attack', 0, 0, 0)
        time.sleep(1)
        os._exit(0)
    return pid
for n in range(20):
    attempt('fork', act)
""",
    ends=("ran", "died"),
    tries=20,
)
attack(
    "processes by raw system calls",
    "processes",
    """
import os
def child(name, *args):
    def act():
        result = kernel(name, *args)
        if result == 0:
            libc._exit(0)
        return result
    return act
attempt('clone', child('clone', 17, 0, 0, 0, 0))
if has('fork'):
    attempt('fork', child('fork'))
args = (ctypes.c_uint64 * 11)()
args[4] = 17
attempt('clone3', child('clone3', args, 88))
attempt('clone CLONE_PARENT', child('clone', 17 | 0x8000, 0, 0, 0, 0))
""".replace("ctypes.", "__import__('ctypes')."),
    tries=3,
    ends=("ran", "died"),
)
attack(
    "vfork",
    "processes",
    "def act():\n    import os\n    pid = libc.vfork()\n    if pid == 0: libc._exit(0)\n    if pid "
    "< 0: raise OSError('refused')\n    return pid\nattempt('vfork', act)",
    without_walls="unsafe",
    ends=("ran", "died"),
)
attack(
    "new namespaces",
    "processes",
    """
for name, flag in dict(user=0x10000000, mount=0x20000, pid=0x20000000, net=0x40000000, ipc=0x8000000, uts=0x4000000, cgroup=0x2000000, time=0x80).items():
    attempt('unshare ' + name, lambda: kernel('unshare', flag))
def child():
    pid = kernel('clone', 17 | 0x10000000, 0, 0, 0, 0)
    if pid == 0: libc._exit(0)
    return pid
attempt('clone NEWUSER', child)
""",
    tries=9,
    ends=("ran", "died"),
)
attack(
    "another program",
    "processes",
    """
import os, subprocess, sys
attempt('subprocess', lambda: subprocess.run(['/bin/true']))
attempt('system', lambda: os.system('true') == 0 or (_ for _ in ()).throw(OSError('refused')))
attempt('posix_spawn', lambda: os.posix_spawn('/bin/true', ['true'], {}))
attempt('this Python', lambda: subprocess.run([sys.executable or '/usr/bin/python3', '-c', '1']))
""",
    tries=4,
    ends=("ran", "died"),
)
attack(
    "this process replaced",
    "processes",
    """
def act(name, *args):
    result = kernel(name, *args)
    if result in ('ENOENT', 'EFAULT'): return result
    return result
import ctypes
empty = (ctypes.c_void_p * 1)()
attempt('execve', lambda: act('execve', b'/nowhere', empty, empty))
attempt('execveat', lambda: act('execveat', -1, b'/nowhere', empty, empty, 0))
""",
    tries=2,
)
attack(
    "a thread bomb",
    "processes",
    """
import threading, time
threading.stack_size(65536)
stop, made = threading.Event(), []
try:
    for _ in range(1500):
        t = threading.Thread(target=stop.wait, daemon=True)
        t.start()
        made.append(t)
except (RuntimeError, MemoryError):
    pass
stop.set()
for t in made: t.join()
def act():
    if len(made) < 1100: raise Gone(len(made))
    return len(made)
attempt('threads', act)
""",
    ends=("ran", "error", "died"),
    timeout_s=60,
    open_at=dict.fromkeys(
        "BC", "without a user namespace, threads are bounded for all sessions together"
    ),
)
attack(
    "a multiprocessing pool",
    "processes",
    "import multiprocessing as m\ndef act():\n    with m.get_context('fork').Pool(2) as p: return "
    "p.map(abs, [1, 2])\nattempt('pool', act)",
    timeout_s=3,
    ends=("ran", "error", "interrupted"),
    without_walls="unsafe",
)

OUTPUT = {
    "kind": "output",
    "without_walls": "contained",
    "host_mb": 64,
    "ends": ("ran", "interrupted", "died", "error"),
    "timeout_s": 3,
}
attack("100 MB printed", code="print('a' * 100_000_000)", **OUTPUT)
attack("many lines", code="for i in range(60_000): print(i)", **OUTPUT)
attack(
    "100 MB past Python to descriptor 1",
    code="import os\nfor _ in range(1600):\n    try: os.write(1, b'a' * 65536)\n    except OSError: break",
    **OUTPUT,
)
attack(
    "the output's file grown and mapped",
    code="""
import os, mmap
for size in (1 << 40, 1 << 33, 1 << 30):
    for fd in (1, 2):
        try: os.ftruncate(fd, size)
        except OSError: pass
        try: os.posix_fallocate(fd, 0, size >> 4)
        except OSError: pass
print('printed after')
""",
    **OUTPUT,
)
attack(
    "an echo of 1 GB",
    code="class R:\n    def __repr__(self): return 'a' * (1 << 27)\nR()",
    **OUTPUT,
)
attack(
    "an exception with a text of 100 MB",
    code="raise ValueError('a' * 100_000_000)",
    **{**OUTPUT, "host_mb": 64},
)
attack(
    "output while nothing runs",
    code="import threading, time\ndef f():\n    while True: print('late' * 1000)\nthreading.Thread(target=f, daemon=True).start()",
    **OUTPUT,
)
attack(
    "every descriptor taken",
    "output",
    "import os\nn = 0\ntry:\n    while True:\n        os.dup(0 if n % 2 else 1)\n        n += "
    "1\nexcept OSError: pass\nprint(n)",
    without_walls="contained",
)
attack(
    "the disk filled",
    "output",
    """
import os, tempfile
def act(folder):
    def write():
        n = 0
        path = os.path.join(folder, 'big')
        try:
            with open(path, 'wb') as f:
                for _ in range(100):
                    n += f.write(b'a' * (1 << 20))
        except OSError:
            if not n: raise
        finally:
            try: os.unlink(path)
            except OSError: pass
        if n < 80 << 20: raise Gone(n)
        return n
    return write
for folder in ('/tmp', '/dev/shm', '/var/tmp', '.'):
    attempt(folder, act(folder))
""",
    tries=4,
    timeout_s=60,
)
