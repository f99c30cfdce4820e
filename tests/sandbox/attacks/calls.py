"""System calls that ordinary code never makes. Each must be refused before the kernel looks at its
arguments."""

from attacks.base import attack

GROUPS = {
    "file systems": "mount umount2 pivot_root chroot fsopen fsconfig fsmount fspick open_tree move_mount mount_setattr quotactl statmount listmount",
    "kernel modules and other kernels": "init_module finit_module delete_module kexec_load kexec_file_load",
    "programs in the kernel": "bpf perf_event_open",
    "io_uring": "io_uring_setup io_uring_enter io_uring_register",
    "keys": "add_key request_key keyctl",
    "page faults and hidden memory": "userfaultfd memfd_secret map_shadow_stack",
    "file handles": "name_to_handle_at open_by_handle_at lookup_dcookie",
    "watching files": "fanotify_init inotify_init1",
    "swap and accounts": "swapon swapoff acct",
    "clocks": "settimeofday clock_settime adjtimex",
    "names of the machine": "sethostname setdomainname",
    "the processor": "iopl ioperm modify_ldt personality uselib",
    "memory of other nodes": "mbind set_mempolicy migrate_pages move_pages",
    "namespaces of others": "setns unshare",
    "the kernel's log": "syslog",
    "other processes": "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd pidfd_send_signal kcmp",
    "splicing": "vmsplice",
}
for _kind, _names in GROUPS.items():
    attack(
        f"system calls: {_kind}",
        "system calls",
        f"names = {_names.split()!r}\nfor name in names:\n    if has(name):\n        attempt(name, "
        "lambda: kernel(name, -1, 1, 1, 1, 1, 1))\nattempt('end', lambda: (_ for _ in "
        "()).throw(Gone()))",
        tries=2,
        without_walls="either" if "modules" in _kind else "reached",
    )
attack(
    "system calls: becoming someone else",
    "system calls",
    """
import os
for name, args in {'setuid': (0,), 'setgid': (0,), 'setresuid': (0, 0, 0), 'setgroups': (0, None)}.items():
    attempt(name, lambda: kernel(name, *args))
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
attempt('capset', lambda: kernel('capset', header, data))
def setuid_bit():
    path = arena['folder'] + '/by-attack-setuid'
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.fchmod(fd, 0o4755)
        if not os.stat(path).st_mode & 0o4000: raise Gone()
        return 'set'
    finally:
        os.close(fd)
        os.unlink(path)
attempt('a setuid file', setuid_bit)
""".replace("import os\n", "import ctypes, os\n", 1),
    tries=6,
)
attack(
    "system calls: this process's own walls",
    "system calls",
    """
for name, args in {
    'PR_SET_PTRACER': (0x59616D61, -1), 'PR_SET_MM': (35, 1, 1, 0, 0), 'PR_SET_CHILD_SUBREAPER': (36, 1),
    'PR_CAP_AMBIENT': (47, 2, 21, 0, 0), 'PR_SET_KEEPCAPS': (8, 1), 'PR_SET_SECUREBITS': (28, 1), 'PR_SET_PDEATHSIG': (1, 0),
    'PR_SET_TIMERSLACK': (29, 1), 'PR_SET_DUMPABLE': (4, 1),
}.items():
    attempt(name, lambda: kernel('prctl', *args) if kernel('prctl', *args) != 'EINVAL' else (_ for _ in ()).throw(Gone()))
""",
    tries=9,
)
attack(
    "system calls: numbers of other worlds",
    "system calls",
    """
import os
def act(number):
    def call():
        result = libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0)
        if result == -1 and ctypes.get_errno() in (1, 13, 38): raise OSError(ctypes.get_errno(), 'refused')
        return result, ctypes.get_errno()
    return call
for number in (0x40000000 | 39, 0x40000000 | 520, 400, 420, 999, 470, 471, 5000, -1 & 0x7FFFFFFF):
    attempt(hex(number), act(number))
""".replace("import os\n", "import ctypes, os\n", 1),
    tries=8,
    without_walls="contained",
    ends=("ran", "died"),
)
attack(
    "system calls in 32 bits",
    "system calls",
    """
import ctypes, mmap, platform
def act():
    if platform.machine() != 'x86_64': raise Gone('only x86_64 has them')
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex('53b814000000cd805bc3'))  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    if result in (-1, -38): raise Gone(result)
    return result
attempt('int 0x80', act)
""",
    ends=("ran", "died"),
)
attack(
    "requests to the terminal and to devices",
    "system calls",
    """
import fcntl, os, termios
for name, request in {'TIOCSTI': 0x5412, 'TIOCSCTTY': 0x540E, 'TIOCLINUX': 0x541C, 'TIOCNOTTY': 0x5422, 'FS_IOC_SETFLAGS': 0x40086602, 'FICLONE': 0x40049409}.items():
    def act():
        for fd in range(4):
            try: return fcntl.ioctl(fd, request, b'x' * 8)
            except OSError as error:
                if error.errno not in (1, 13, 25, 38, 9, 22, 95, 18): return error
        raise Gone()
    attempt(name, act)
""",
    tries=6,
    without_walls="contained",
)
