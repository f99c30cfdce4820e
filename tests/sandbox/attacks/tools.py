"""The tools of attacking code in its session: the source of the module that the arena installs
there.

``attempt`` prints the result of an attempt at once, so that it is known even if the session dies of
the next one. ``kernel(name, …)`` makes a raw system call. Only EPERM, EACCES and ENOSYS mean that
it was refused; any other error means that the kernel looked at its arguments.
"""

# name -> number on x86_64, on aarch64 (None: it has none there); one number stands for both
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "cachestat": (451, 451),
    "capset": (126, 91), "chroot": (161, 51), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "execve": (59, 221), "execveat": (322, 281), "fanotify_init": (300, 262),
    "finit_module": (313, 273), "fork": (57, None), "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430),
    "fspick": (433, 433), "init_module": (175, 105), "inotify_init1": (294, 26), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioperm": (173, None), "iopl": (172, None),
    "ioprio_set": (251, 30), "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "kill": (62, 129), "listmount": (458, 458), "lookup_dcookie": (212, 18),
    "map_shadow_stack": (453, None), "mbind": (237, 235), "memfd_secret": (447, 447), "migrate_pages": (256, 238),
    "mknodat": (259, 33), "modify_ldt": (154, None), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "prctl": (157, 167), "prlimit64": (302, 261),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60), "reboot": (169, 142),
    "request_key": (249, 218), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "semget": (64, 190), "set_mempolicy": (238, 237),
    "setdomainname": (171, 162), "setgid": (106, 144), "setgroups": (116, 159), "sethostname": (170, 161),
    "setns": (308, 268), "setpriority": (141, 140), "setresuid": (117, 147), "setsid": (112, 157),
    "settimeofday": (164, 170), "setuid": (105, 146), "shmget": (29, 194), "socket": (41, 198), "statmount": (457, 457),
    "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "tgkill": (234, 131), "timer_create": (222, 107),
    "tkill": (200, 130), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282), "uselib": (134, None),
    "vfork": (58, None), "vmsplice": (278, 75),
}  # fmt: skip

TOOLS = (
    f"NUMBERS = {NUMBERS!r}\n"
    + r'''
__all__ = ["attempt", "kernel", "has", "own_sockets", "say", "sock_fd", "libc", "call_host", "Gone"]
import ctypes
import errno
import gc
import json
import os
import platform
import struct

COLUMN = 1 if platform.machine() == "aarch64" else 0
REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class Gone(Exception):
    """Nothing was there to be reached: as good as refused."""


def attempt(label, act):
    try:
        got = act()
    except (OSError, MemoryError, Gone) as error:
        print(f"!refused {label}: {type(error).__name__} {error}"[:300], flush=True)
        return None
    print(f"!reached {label}: {got!r}"[:300], flush=True)
    return got


def has(name):
    return NUMBERS[name][COLUMN] is not None


def kernel(name, *args):
    """The result of a system call, or its error's name where the kernel looked at the arguments."""
    values = [a if isinstance(a, (bytes, ctypes.Array)) or a is None or hasattr(a, "_obj") else ctypes.c_long(a) for a in args]
    result = libc.syscall(ctypes.c_long(NUMBERS[name][COLUMN]), *values)
    if result == -1:
        number = ctypes.get_errno()
        if number in REFUSALS:
            raise OSError(number, os.strerror(number))
        return errno.errorcode.get(number, number)
    return result


def own_sockets():
    kind, size = ctypes.c_int(), ctypes.c_uint32(4)
    found = [fd for fd in range(1024) if libc.getsockopt(fd, 1, 3, ctypes.byref(kind), ctypes.byref(size)) == 0]
    gc.unfreeze()  # the guest is older than its process
    return found or [o.write_fd for o in gc.get_objects() if type(o).__name__ == "GuestChannel"]


def sock_fd():
    """The guest's end of the wire."""
    return own_sockets()[0]


def say(header, *blobs):
    """Put a frame of our own on the wire."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    rest = 5 + len(text) + sum(map(len, blobs))
    data = memoryview(struct.pack("<IBI", rest, 1, len(text)) + text + b"".join(blobs))
    while data:
        data = data[os.write(sock_fd(), data):]
'''
)
