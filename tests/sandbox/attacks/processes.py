"""Attacks on other processes: signals, their memory, their limits, and tracing."""

from attacks.base import attack

attack(
    "signals to others",
    "signals",
    """
import os, signal
for name in ('host', 'victim', 'sibling'):
    attempt('kill ' + name, lambda: os.kill(arena[name], 0))
attempt('kill the parent', lambda: os.kill(os.getppid(), 0) if os.getppid() else (_ for _ in ()).throw(Gone()))
attempt('kill everyone', lambda: os.kill(-1, 0))
attempt('kill init', lambda: os.kill(1, 0))
attempt('tgkill', lambda: kernel('tgkill', arena['victim'], arena['victim'], 0) == 0 or (_ for _ in ()).throw(Gone()))
attempt('tkill', lambda: kernel('tkill', arena['victim'], 0) == 0 or (_ for _ in ()).throw(Gone()))
info = (__import__('ctypes').c_char * 128)()
attempt('sigqueue', lambda: kernel('rt_sigqueueinfo', arena['victim'], 18, info) == 0 or (_ for _ in ()).throw(Gone()))
attempt('pidfd', lambda: kernel('pidfd_open', arena['victim'], 0))
""",
    tries=10,
)
attack(
    "the process group",
    "signals",
    "import os\nattempt('killpg', lambda: os.killpg(os.getpgid(os.getppid()) if os.getppid() else "
    "1, 0))\n"
    "attempt('its priority', lambda: os.setpriority(os.PRIO_PGRP, 0, 0))\nattempt('that of the "
    "victim', lambda: os.setpriority(os.PRIO_PROCESS, arena['victim'], 5))",
    tries=3,
)
attack(
    "signals by way of descriptors",
    "signals",
    """
import fcntl, os, socket
for name in ('victim', 'sibling', 'host'):
    def act():
        a, b = socket.socketpair()
        with a, b:
            fcntl.fcntl(a, fcntl.F_SETOWN, arena[name])
            fcntl.fcntl(a, 10, 18)  # F_SETSIG, SIGCONT
            fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)
            b.send(b'x')
            return 'sent'
    attempt(name, act)
def by_ex():
    a, b = socket.socketpair()
    with a, b:
        return fcntl.fcntl(a, 15, (1).to_bytes(4, 'little') + arena['victim'].to_bytes(4, 'little'))
attempt('F_SETOWN_EX', by_ex)
def by_ioctl():
    a, b = socket.socketpair()
    with a, b:
        return fcntl.ioctl(a, 0x8902, arena['victim'].to_bytes(4, 'little'))
attempt('SIOCSPGRP', by_ioctl)
def by_async():
    r, w = os.pipe()
    try: return fcntl.ioctl(r, 0x5452, (1).to_bytes(4, 'little'))
    finally: os.close(r), os.close(w)
attempt('FIOASYNC', by_async)
def by_lease():
    r, w = os.pipe()
    try: return fcntl.fcntl(os.open('/tmp', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE)
    finally: os.close(r), os.close(w)
attempt('F_NOTIFY', by_lease)
""",
    tries=7,
)
attack(
    "timers that signal others",
    "signals",
    """
import ctypes
class Event(ctypes.Structure):
    _fields_ = [('value', ctypes.c_void_p), ('signo', ctypes.c_int), ('notify', ctypes.c_int), ('tid', ctypes.c_int), ('pad', ctypes.c_char * 44)]
event, timer = Event(None, 18, 4, arena['victim']), ctypes.c_int()
def act():
    result = kernel('timer_create', 1, ctypes.byref(event), ctypes.byref(timer))
    if isinstance(result, str): raise Gone(result)
    return result
attempt('timer_create', act)
""",
    without_walls="contained",
)

attack(
    "the memory of another process",
    "process reach",
    """
import ctypes
here = ctypes.create_string_buffer(arena['length'])
class Part(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
mine, theirs = Part(ctypes.addressof(here), arena['length']), Part(arena['address'], arena['length'])
def moved(name):
    def act():
        result = kernel(name, arena['victim'], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if result == 'ESRCH': raise Gone(result)
        return result
    return act
attempt('process_vm_readv', moved('process_vm_readv'))
attempt('process_vm_writev of nothing', lambda: kernel('process_vm_writev', arena['victim'], None, 0, None, 0, 0))
def mem():
    with open(f"/proc/{arena['victim']}/mem", 'rb') as f:
        f.seek(arena['address'])
        return len(f.read(arena['length']))
attempt('/proc/PID/mem', mem)
attempt('process_madvise', lambda: kernel('process_madvise', -1, None, 0, 0, 0))
""",
    tries=4,
)
attack(
    "tracing another process",
    "process reach",
    """
import os
for name in ('victim', 'host', 'sibling'):
    def act():
        result = kernel('ptrace', 0x4206, arena[name], 0, 0)
        if result == 'ESRCH' : raise Gone(result)
        if result == 0: kernel('ptrace', 17, arena[name], 0, 0)
        return result
    attempt('seize ' + name, act)
attempt('seize the parent', lambda: kernel('ptrace', 0x4206, os.getppid() or 1, 0, 0))
attempt('be traced', lambda: kernel('ptrace', 0, 0, 0, 0))
""",
    tries=5,
)
attack(
    "descriptors of another process",
    "process reach",
    """
import os
attempt('pidfd_open', lambda: kernel('pidfd_open', arena['victim'], 0))
attempt('pidfd_open of a sibling', lambda: kernel('pidfd_open', arena['sibling'], 0))
attempt('pidfd_getfd', lambda: kernel('pidfd_getfd', -1, 0, 0))
attempt('/proc/PID/fd', lambda: os.listdir(f"/proc/{arena['victim']}/fd"))
attempt('/proc/PID/root', lambda: os.listdir(f"/proc/{arena['victim']}/root"))
attempt('kcmp', lambda: kernel('kcmp', arena['victim'], os.getpid(), 0, 0, 0))
""",
    tries=6,
)
attack(
    "limits and places of another process",
    "process reach",
    """
import os
old = (__import__('ctypes').c_uint64 * 2)()
def limits():
    result = kernel('prlimit64', arena['victim'], 7, None, old)
    if result == 'ESRCH': raise Gone(result)
    return result
attempt('prlimit', limits)
attempt('sched_setaffinity', lambda: kernel('sched_setaffinity', arena['victim'], 8, (__import__('ctypes').c_uint64 * 1)(3)) in (0, 'EINVAL') or (_ for _ in ()).throw(Gone()))
attempt('sched_setscheduler', lambda: kernel('sched_setscheduler', arena['victim'], 3, (__import__('ctypes').c_int * 1)(0)) == 0 or (_ for _ in ()).throw(Gone()))
attempt('ioprio_set', lambda: kernel('ioprio_set', 1, arena['victim'], 0x4004) == 0 or (_ for _ in ()).throw(Gone()))
attempt('migrate_pages', lambda: kernel('migrate_pages', arena['victim'], 0, None, None) in (0, 'EINVAL', 'EFAULT') or (_ for _ in ()).throw(Gone()))
""",
    tries=5,
)
attack(
    "the list of processes",
    "process reach",
    """
import os
attempt('/proc', lambda: [n for n in os.listdir('/proc') if n.isdigit()][:3] or (_ for _ in ()).throw(Gone()))
attempt('the parent group', lambda: os.getpgid(arena['victim']))
attempt('the session', lambda: os.getsid(arena['victim']))
attempt('the affinity', lambda: os.sched_getaffinity(arena['victim']))
attempt('the scheduler', lambda: os.sched_getscheduler(arena['victim']))
""",
    tries=5,
)
attack(
    "secrets of the host in this process's own memory",
    "process reach",
    """
import gc, sys
def act():
    names = [m for m in sys.modules if m.split('.')[0] in ('ramify', 'aiohttp', 'msgspec', 'openai', 'attacks') and m != 'ramify']
    gc.unfreeze()  # what is older than this process
    texts = [o for o in gc.get_objects() if isinstance(o, dict) and arena['secret_name'] in o]
    if not texts: raise Gone()
    return names, len(texts)
attempt('objects', act)
""",
    without_walls="contained",
)
