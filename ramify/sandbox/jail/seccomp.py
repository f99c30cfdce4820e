"""The allowlist of system calls that a session may make, compiled into a filter for the kernel.

This module contains the list for x86_64 and aarch64 and defines which arguments are checked. The
host is asked before a process is created. All other calls fail with EPERM, so that Python code sees
an exception. The filter is installed by ``confine.py``, and the host's answers come from
``providers/jail_limits.py``. Standard library only.

    number ──search tree over the allowed numbers──> ALLOW | EPERM | steps that check an argument
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramify.sandbox.jail import primitives
    from ramify.sandbox.jail import seccomp_requests as requests
else:
    # In the fork server, where Ramify is not installed: see host/guest_module_files.py.
    requests = sys.modules["ramify_jail_seccomp_requests"]
    primitives = sys.modules["ramify_jail_primitives"]

_ANYWHERE = """
    alarm=37/- arch_prctl=158/- brk=12/214 clock_getres=229/114 clock_gettime=228/113 clock_nanosleep=230/115
    close=3/57 close_range=436/436 copy_file_range=326/285 dup=32/23 dup2=33/- dup3=292/24 epoll_create=213/-
    epoll_create1=291/20 epoll_ctl=233/21 epoll_pwait=281/22 epoll_wait=232/- eventfd=284/- eventfd2=290/19
    exit=60/93 exit_group=231/94 fadvise64=221/223 fdatasync=75/83 fstat=5/80 fsync=74/82 ftruncate=77/46
    futex=202/98 getcpu=309/168 getegid=108/177 geteuid=107/175 getgid=104/176 getgroups=115/158
    getitimer=36/102 getpeername=52/205 getpgrp=111/- getpid=39/172 getppid=110/173 getrandom=318/278
    getresgid=120/150 getresuid=118/148 getrlimit=97/163 getrusage=98/165 getsockname=51/204 gettid=186/178
    gettimeofday=96/169 getuid=102/174 lseek=8/62 madvise=28/233 membarrier=324/283 mprotect=10/226
    mremap=25/216 munmap=11/215 nanosleep=35/101 pause=34/- pipe=22/- pipe2=293/59 poll=7/- ppoll=271/73
    pread64=17/67 preadv=295/69 preadv2=327/286 pselect6=270/72 pwrite64=18/68 pwritev=296/70 pwritev2=328/287
    read=0/63 readv=19/65 restart_syscall=219/128 rseq=334/293 rt_sigaction=13/134 rt_sigpending=127/136
    rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigsuspend=130/133 rt_sigtimedwait=128/137
    sched_get_priority_max=146/125 sched_get_priority_min=147/126 sched_yield=24/124 select=23/-
    set_robust_list=273/99 set_tid_address=218/96 setitimer=38/103 setsid=112/157 shutdown=48/210
    sigaltstack=131/132 sysinfo=99/179 time=201/- timerfd_create=283/85 timerfd_gettime=287/87
    timerfd_settime=286/86 times=100/153 umask=95/166 uname=63/160 wait4=61/260 waitid=247/95 write=1/64
    writev=20/66
"""
_WITH_PATHS = """
    access=21/- chdir=80/49 faccessat=269/48 faccessat2=439/439 fchdir=81/50 fstatfs=138/44 getcwd=79/17 getdents=78/-
    getdents64=217/61 lstat=6/- newfstatat=262/79 readlink=89/- readlinkat=267/78 stat=4/- statfs=137/43 statx=332/291
"""
_WITH_CHANGES = """
    chmod=90/- creat=85/- fchmod=91/52 fchmodat=268/53 fchmodat2=452/452 link=86/- linkat=265/37 mkdir=83/-
    mkdirat=258/34 rename=82/- renameat=264/38 renameat2=316/276 rmdir=84/- symlink=88/- symlinkat=266/36
    truncate=76/45 unlink=87/- unlinkat=263/35 utimensat=280/88
"""
_OPENING = "open=2/- openat=257/56"
_FILTERED = """
    clone3=435/435 clone=56/220 fcntl=72/25 fork=57/- get_robust_list=274/100 getpgid=121/155 getsid=124/156
    getsockopt=55/209 ioctl=16/29 mmap=9/222 prctl=157/167 prlimit64=302/261 readahead=187/213 recvfrom=45/207
    recvmsg=47/212 sched_getaffinity=204/123 sched_getparam=143/121 sched_getscheduler=145/120 sendmsg=46/211
    sendto=44/206 socketpair=53/199 tgkill=234/131
"""

_COLUMN = {"x86_64": 0, "aarch64": 1}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _GO, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x05, 0x54, 0x06
_LONGEST_SKIP = 255
Step = tuple[int, int, int, int]
"""One instruction: opcode, steps to skip if true, steps to skip if false, operand."""

ALLOW, KILL, NOTIFY = 0x7FFF0000, 0x80000000, 0x7FC00000
EPERM, ESRCH, EINVAL, ENOTTY, ENOSYS, ENOPROTOOPT, EAFNOSUPPORT = (
    0x50000 | number for number in (1, 3, 22, 25, 38, 92, 97)
)
_DONE = 0x50000
"""Filter result that skips a system call and lets it return 0."""

_THREAD = 0x10000
_FORKS = (17, 0x01200000 | 17, *requests.FORKS_APART)
"""The flags of ``clone`` that are reported to the host. The first two are those of ``fork``, which
the host never allows. The others are those of ``primitives.fork_sibling``."""
_NEW_NAMESPACE = 0x7E020080
_MAP_SHARED, _MAP_ANONYMOUS, _PROT_WRITE = 1, 0x20, 2
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030, 1032, 1034)
"""Allowed ``fcntl`` commands. F_ADD_SEALS is not among them, nor are commands that signal other
processes or take leases."""
_LOCKS, _LOCKS_OF_FILES = (5, 6, 7), (36, 37, 38)
"""``fcntl`` commands that lock files. Locks that belong to a process have no effect, but appear to
succeed. Locks that belong to an open file are refused.

A lock on a library's file would be seen by all sessions. A session is the only process that opens
its own files, and sqlite needs the calls to succeed.
"""
_F_SETFL, _O_ASYNC = 4, 0o20000
_STREAM, _SEQPACKET = 1, 5
_SIGABRT = 6
_O_TRUNC, _O_ACCMODE = 0o1000, 3
_O_OTHER = 0xFFFFFFFF & ~0o6777703
"""All flags of ``open`` that are refused: ASYNC, NOATIME, PATH, TMPFILE, and any that later kernels
add."""
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed ``ioctl`` requests: test for a terminal, get its size, count the bytes to read, and set
blocking mode and close-on-exec."""
_PRCTL_OPTIONS = (15, 16)
"""Allowed ``prctl`` options, which set and read the thread's name."""
_PDEATHSIG, _SIGKILL = 1, 9
_SOL_SOCKET, _SOCKET_OPTIONS = 1, (2, 3, 4, 7, 8, 9, 18, 20, 21, 30, 38, 39)
"""Allowed socket options, such as the type, the error, buffer sizes and timeouts. Options that
identify the process at the other end are not among them."""
_MSG_OOB = 1
_RLIMIT_NOFILE, _RLIMIT_AS = 7, 9
"""Resource limits that the guest itself changes, without exceeding the hard limit."""


def syscall_numbers(table: str, machine: str) -> dict[str, int]:
    """Return a machine architecture's system call numbers, by call name.

    Each word of the table is ``name=x86_64/aarch64``. Calls that the machine does not have are left
    out.
    """
    column, number_of = _COLUMN[machine], {}
    for word in table.split():
        name, _, both = word.partition("=")
        number = both.split("/")[column]
        if number != "-":
            number_of[name] = int(number)
    return number_of


def is_supported_architecture(machine: str) -> bool:
    return machine in _COLUMN


def filter_for(machine: str, *, paths: bool, changes: bool) -> bytes:
    """Compile the system call filter of a session.

    ``paths``: allow calls that name files. ``changes``: also allow calls that change files in ways
    that Landlock does not fully control, such as modes, times and, before Linux 6.2, file lengths.
    """
    allowed = syscall_numbers(
        _ANYWHERE + (_WITH_PATHS if paths else "") + (_WITH_CHANGES if changes else ""), machine
    )
    checked_calls = syscall_numbers(_FILTERED + (_OPENING if paths else ""), machine)
    rules: dict[int, int | list[Step]] = dict.fromkeys(allowed.values(), ALLOW)
    rules |= {number: _STEPS[name] for name, number in checked_calls.items()}
    return assemble(machine, rules, EPERM)


def build_deny_filter(machine: str, calls: set[int]) -> bytes:
    """Compile a filter that denies only the given calls.

    It simulates a less capable kernel.
    """
    return assemble(machine, dict.fromkeys(calls, EPERM), ALLOW)


# ------------------------------------------------------------------------------------------------
# arguments


def _load_argument(index: int, half: int = 0) -> Step:
    """Return a filter step that loads the low or high 32 bits of a system call's argument.

    They are numbered 0 (low) and 1 (high).
    """
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * half)


def _return_step(answer: int) -> Step:
    return (_RETURN, 0, 0, answer)


def _one_of(index: int, values: tuple[int, ...], otherwise: list[Step]) -> list[Step]:
    steps = [_load_argument(index)]
    for value in values:
        steps += [(_EQUAL, 0, 1, value), _return_step(ALLOW)]
    return steps + otherwise


def _own_pid(otherwise: int) -> list[Step]:
    """Return filter steps that allow a system call only on the calling process itself.

    The first argument must be 0, which means the calling process.
    """
    return [_load_argument(0), (_EQUAL, 0, 1, 0), _return_step(ALLOW), _return_step(otherwise)]


def _deny_if_bits(index: int, bits: int) -> list[Step]:
    return [_load_argument(index), (_ANY_BIT, 0, 1, bits), _return_step(EPERM), _return_step(ALLOW)]


def _open_call_steps(flags: int) -> list[Step]:
    """Return filter steps that allow files to be opened only for reading or writing.

    ``flags`` is the index of the argument with the open flags.

    Truncating also requires write access, because Landlock before Linux 6.2 does not cover the
    right to truncate. Access mode 3 (neither reading nor writing) and ``O_PATH`` are refused,
    because no version of Landlock denies them.
    """
    return [
        _load_argument(flags),
        (_ANY_BIT, 0, 1, _O_OTHER),
        _return_step(EPERM),
        (_AND, 0, 0, _O_ACCMODE),
        (_EQUAL, 0, 1, _O_ACCMODE),
        _return_step(EPERM),
        (_EQUAL, 1, 0, 0),
        _return_step(ALLOW),
        _load_argument(flags),
        (_ANY_BIT, 0, 1, _O_TRUNC),
        _return_step(EPERM),
        _return_step(ALLOW),
    ]


_STEPS: dict[str, int | list[Step]] = {
    "clone3": ENOSYS,  # its flags are in memory; the C library falls back to clone
    "fork": NOTIFY,
    # Removed from all kernels: both processes of a fork use it to ask the host for their wires.
    "readahead": NOTIFY,
    "clone": [
        _load_argument(0),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE), _return_step(EPERM),
        (_ANY_BIT, 0, 1, _THREAD), _return_step(ALLOW),
        *(step for flags in _FORKS for step in ((_EQUAL, 0, 1, flags), _return_step(NOTIFY))),
        _return_step(EPERM),
    ],
    "ioctl": _one_of(1, _IOCTL_REQUESTS, [_return_step(ENOTTY)]),
    "fcntl": _one_of(
        1, _FCNTL_COMMANDS,
        [
            *(step for lock in _LOCKS for step in ((_EQUAL, 0, 1, lock), _return_step(_DONE))),
            *(step for lock in _LOCKS_OF_FILES for step in ((_EQUAL, 0, 1, lock), _return_step(EINVAL))),
            (_EQUAL, 1, 0, _F_SETFL), _return_step(EPERM),
            _load_argument(2), (_ANY_BIT, 0, 1, _O_ASYNC), _return_step(EPERM), _return_step(ALLOW),
        ],
    ),
    # abort() ends the process with this call.
    "tgkill": [_load_argument(2), (_EQUAL, 0, 1, _SIGABRT), _return_step(NOTIFY), _return_step(EPERM)],
    "prctl": _one_of(
        0, _PRCTL_OPTIONS,
        [  # A branch asks to end with the fork server.
            (_EQUAL, 1, 0, _PDEATHSIG), _return_step(EPERM),
            _load_argument(1), (_EQUAL, 0, 1, _SIGKILL), _return_step(ALLOW), _return_step(EPERM),
        ],
    ),
    "getpgid": _own_pid(ESRCH),
    "getsid": _own_pid(ESRCH),
    "sched_getaffinity": _own_pid(ESRCH),
    "sched_getparam": _own_pid(ESRCH),
    "sched_getscheduler": _own_pid(ESRCH),
    "get_robust_list": _own_pid(ESRCH),
    "getsockopt": [
        _load_argument(1), (_EQUAL, 1, 0, _SOL_SOCKET), _return_step(ENOPROTOOPT),
        *_one_of(2, _SOCKET_OPTIONS, [_return_step(ENOPROTOOPT)]),
    ],
    # Urgent data on a session's connection would make the host wait.
    "sendto": _deny_if_bits(3, _MSG_OOB),
    "recvfrom": _deny_if_bits(3, _MSG_OOB),
    "sendmsg": _deny_if_bits(2, _MSG_OOB),
    "recvmsg": _deny_if_bits(2, _MSG_OOB),
    "socketpair": [  # no datagrams: a datagram socket can send to any other socket of the machine
        _load_argument(0), (_EQUAL, 1, 0, 1), _return_step(EAFNOSUPPORT),
        _load_argument(1), (_AND, 0, 0, 0xF),
        (_EQUAL, 1, 0, _STREAM), (_EQUAL, 0, 1, _SEQPACKET), _return_step(ALLOW), _return_step(EPERM),
    ],
    "open": _open_call_steps(1),
    "openat": _open_call_steps(2),
    "prlimit64": [
        _load_argument(0), (_EQUAL, 1, 0, 0), _return_step(EPERM),
        # Without new limits (both halves of the pointer are 0), it only reads the limits.
        _load_argument(2), (_EQUAL, 0, 3, 0), _load_argument(2, 1), (_EQUAL, 0, 1, 0), _return_step(ALLOW),
        _load_argument(1), (_EQUAL, 0, 1, _RLIMIT_AS), _return_step(ALLOW),
        (_EQUAL, 0, 1, _RLIMIT_NOFILE), _return_step(ALLOW), _return_step(EPERM),
    ],
    # Memory that is shared for writing would remain shared after a fork. Anonymous memory could be
    # made writable later (mprotect); a mapping of a file that was opened for reading could not. For
    # files that are open for writing, see jail_transport.py.
    "mmap": [
        _load_argument(3), (_ANY_BIT, 1, 0, _MAP_SHARED), _return_step(ALLOW),
        (_ANY_BIT, 0, 1, _MAP_ANONYMOUS), _return_step(EPERM),
        _load_argument(2), (_ANY_BIT, 0, 1, _PROT_WRITE), _return_step(EPERM), _return_step(ALLOW),
    ],
}  # fmt: skip


# ------------------------------------------------------------------------------------------------
# the filter


def assemble(machine: str, rules: dict[int, int | list[Step]], otherwise: int) -> bytes:
    """Compile the rules for all system calls into a filter program that the kernel can run.

    ``rules`` gives the answer or the filter steps for each system call number. ``otherwise`` is the
    answer for all other numbers.
    """
    bodies: list[list[Step]] = []
    head = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        _return_step(KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _X32),
        _return_step(KILL),
    ]
    steps = head + _binary_search_steps(_ranges(rules, otherwise), bodies)
    starts = []
    for body in bodies:
        starts.append(len(steps))
        steps += body
    for at, step in enumerate(steps):
        if step[0] == _GO and step[3] < 0:
            steps[at] = (_GO, 0, 0, starts[-step[3] - 1] - at - 1)
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _ranges(
    rules: dict[int, int | list[Step]], otherwise: int
) -> list[tuple[int, int | list[Step]]]:
    """Group system call numbers into ranges that follow the same rule.

    Returns the first number of each range with its rule.
    """
    ranges: list[tuple[int, int | list[Step]]] = [(0, otherwise)]
    for number in sorted(rules):
        for start, rule in ((number, rules[number]), (number + 1, otherwise)):
            if ranges[-1][0] == start:
                ranges.pop()
            if not ranges or (ranges[-1][1] is not rule and ranges[-1][1] != rule):
                ranges.append((start, rule))
    return ranges


def _binary_search_steps(
    ranges: list[tuple[int, int | list[Step]]], bodies: list[list[Step]]
) -> list[Step]:
    """Return filter steps that find the rule for a system call by a binary search on its number.

    A jump to the steps of a rule holds their negative index until ``assemble`` replaces it.
    """
    if len(ranges) == 1:
        rule = ranges[0][1]
        if isinstance(rule, int):
            return [_return_step(rule)]
        if rule not in bodies:
            bodies.append(rule)
        return [(_GO, 0, 0, -bodies.index(rule) - 1)]
    middle = len(ranges) // 2
    below, above = (
        _binary_search_steps(ranges[:middle], bodies),
        _binary_search_steps(ranges[middle:], bodies),
    )
    first = ranges[middle][0]
    if len(below) > _LONGEST_SKIP:
        return [(_AT_LEAST, 0, 1, first), (_GO, 0, 0, len(below)), *below, *above]
    return [(_AT_LEAST, len(below), 0, first), *below, *above]


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("steps", ctypes.c_void_p))


class SeccompFilter:
    """A compiled filter for the system calls that a process may make.

    Any number of processes can install it.
    """

    def __init__(self, steps: bytes) -> None:
        self._steps = ctypes.create_string_buffer(steps, len(steps))
        self._program = _Program(len(steps) // 8, ctypes.addressof(self._steps))
        self._number = _SECCOMP[os.uname().machine]

    def install(self, *, listener: bool) -> int:
        """Install the filter on this process permanently.

        This requires the flag no_new_privs. With ``listener``, return the descriptor at which calls
        that need an answer arrive.
        """
        # SECCOMP_FILTER_FLAG_NEW_LISTENER
        flags = 8 if listener else 0
        return primitives.syscall(
            self._number,
            1,
            flags,
            ctypes.byref(self._program),
            what="seccomp filter (CONFIG_SECCOMP_FILTER)",
        )
