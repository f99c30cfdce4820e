"""Builds the isolation ("walls") that all sessions of a jail share.

This also determines which tier, or level of isolation, this machine supports.

This module defines what each tier consists of and tries the strongest one first. The further
confinement of each session is added by ``confine.py``. Standard library only.

    A   namespaces: no files of the host, no network, no other processes; also Landlock if available
    B   Landlock: files are visible but cannot be opened; no namespaces
    C   no system call that names a file; no namespaces, no Landlock

All three tiers use the system call filter; the jail does not run without it.

    zygote process ──fork──> tries A ──fork──> first process of its namespaces: becomes the zygote
                   └─ becomes the zygote of tier B or C if A failed
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ramify.sandbox.jail import confine, primitives, seccomp
    from ramify.sandbox.jail import seccomp_requests as requests
else:
    # In the fork server, where Ramify is not installed: see host/guest_module_files.py.
    requests = sys.modules["ramify_jail_seccomp_requests"]
    primitives = sys.modules["ramify_jail_primitives"]
    seccomp = sys.modules["ramify_jail_seccomp"]
    confine = sys.modules["ramify_jail_confine"]

_ROOT = "/tmp"
"""Folder in which the new root is assembled. The host's /tmp is hidden in this namespace only."""
# The zygote's ids in its user namespace. Sessions see 65534, because theirs maps no ids.
_INSIDE = 1000
_NOBODY, _FIRST_UID, _UIDS = 65534, 0x70000000, 0x0FFF0000
_SPACES = (
    primitives.NEWPID
    | primitives.NEWNET
    | primitives.NEWIPC
    | primitives.NEWUTS
    | primitives.NEWCGROUP
)
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime")
"""System folders with shared libraries and time zones."""


class IsolationTierUnavailable(Exception):
    """Raised if none of the requested tiers (levels of isolation) is available.

    ``missing`` says what each tier lacks.
    """

    def __init__(self, missing: dict[str, str]) -> None:
        super().__init__("; ".join(f"tier {tier}: {why}" for tier, why in missing.items()))
        self.missing = missing


class ReachedIsolation(NamedTuple):
    """The isolation level that a jail's fork server (zygote) has reached, with its details.

    It consists of a tier (level of isolation) and the reasons why stronger tiers are unavailable.
    """

    tier: str
    missing: dict[str, str]
    """Stronger tier -> why it is not available."""
    proc: int
    """A descriptor of /proc that sessions do not get, or -1 if there is none."""
    landlock: int
    """Version of Landlock in use; 0 for none."""
    confinement: Any
    outer: bool
    """True if the zygote has no separate process namespace, so that it must end all processes
    itself."""


def isolate_zygote(config: dict[str, Any], let_go: Any, preload: Any) -> ReachedIsolation:
    """Isolate this process so that it can be the zygote, which forks all sessions.

    ``config["tiers"]`` lists the levels of isolation to try, strongest first.

    The zygote may have to be a new process. In that case, this function returns only in the new
    process; the calling process calls ``let_go``, waits for the zygote's end, and exits.

    ``preload`` imports what sessions will need, if they could not read it from inside. Raises
    IsolationTierUnavailable, and any error that ``preload`` raises.
    """
    missing: dict[str, str] = {}
    # Every tier needs the system call filter.
    if not seccomp.is_supported_architecture(os.uname().machine):
        raise IsolationTierUnavailable({"A": f"no table of system calls for {os.uname().machine}"})
    is_kept = False
    for tier in config["tiers"]:
        try:
            if tier != "A":  # without a process namespace, a parent ends what the zygote leaves
                is_kept = is_kept or _continue_kept(let_go)
                return _no_spaces(config, missing, tier, preload)
            return _build_namespaces(config, missing, let_go)
        except OSError as error:
            missing[tier] = _describe_cause(error)
    raise IsolationTierUnavailable(missing)


def _describe_cause(error: BaseException) -> str:
    """Return a short description of which operation failed and why, for an exception."""
    why = str(getattr(error, "strerror", None) or error)
    if not isinstance(error, OSError) or not error.errno or hasattr(error, "what"):
        return why
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.line or f'a system call of {place.name}'}: {why}"


# ------------------------------------------------------------------------------------------------
# tier A


def _build_namespaces(
    config: dict[str, Any], missing: dict[str, str], let_go: Any
) -> ReachedIsolation:
    """Isolate a child process with Linux namespaces, and let the child continue in place of this
    process.

    This is tier A of the jail. A child is needed because isolation that was built only in part
    cannot be undone. Returns only in the child; raises OSError in this process if the child fails.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read_end)
        try:
            walls = _enter_spaces(config, missing)
        except BaseException as error:  # noqa: BLE001  (reported to the process that continues without it)
            # An empty message would mean success.
            os.write(write_end, _describe_cause(error).encode()[:4000] or b"unknown")
            os._exit(1)
        os.close(write_end)
        return walls
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        why = file.read().decode("utf-8", "replace")
    if why:
        os.waitpid(pid, 0)
        raise OSError(0, why)
    let_go()
    _wait_out(pid)
    raise AssertionError


def _wait_out(pid: int) -> None:
    """Wait for a child process to end, kill the processes that it has left behind, and then exit.

    The exit status is that of the child.
    """
    # Open copies would hide the end of the zygote's streams from the host and the parent.
    os.closerange(3, 1 << 20)
    primitives.prctl(primitives.PR_SET_CHILD_SUBREAPER, 1)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        while True:  # until no child is left
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for orphan in map(int, file.read().split()):
                    os.kill(orphan, signal.SIGKILL)
            os.waitpid(-1, 0)
    os._exit(max(os.waitstatus_to_exitcode(status), 0))


def _enter_spaces(config: dict[str, Any], missing: dict[str, str]) -> ReachedIsolation:
    _die_with_parent()
    # The new root has no /proc. Later steps map ids and measure memory through this one.
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    is_root = os.geteuid() == 0
    # The user that root becomes later may not be able to read the folders that are mounted.
    if is_root:
        primitives.unshare(primitives.NEWNS, "mount namespace as root (CAP_SYS_ADMIN)")
    else:
        _own_user(proc)
        primitives.unshare(primitives.NEWNS, "mount namespace in a user namespace")
    readable, mounts = readable_paths(config), dict(config["mounts"])
    _build_root(readable, mounts)
    primitives.unshare(_SPACES, "namespaces of processes, network and names")
    primitives.set_host_name("sandbox")
    _continue_as_first()
    primitives.pivot_root(_ROOT)
    if is_root:
        _become_nobody(proc)
    # Again, because a change of the user clears it.
    _die_with_parent()
    readable += ["/dev/null", *mounts]
    return _finish_isolation("A", missing, config, proc, readable, own_user=True, outer=False)


def _own_user(proc: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    primitives.unshare(primitives.NEWUSER, "user namespace")
    primitives.prctl(primitives.PR_SET_DUMPABLE, 1)
    primitives.map_ids(proc, _INSIDE, uid, gid)


def _become_nobody(proc: int) -> None:
    """Give up the rights of the root user permanently, and continue as an ordinary user.

    The limit on the number of processes does not apply to root, not even in a user namespace.
    """
    _drop_root()
    primitives.prctl(
        primitives.PR_SET_DUMPABLE, 1
    )  # otherwise its own files in /proc belong to root
    _own_user(proc)
    primitives.unshare(primitives.NEWNS, "mount namespace of an ordinary user")


def _drop_root() -> None:
    """Switch to a user id that owns no files and runs no other process.

    If this machine does not support such ids, use the traditional unprivileged user with id 65534.
    """
    uid = _FIRST_UID + int.from_bytes(os.urandom(4), "little") % _UIDS
    try:
        primitives.switch_user(uid)
    except OSError:
        primitives.switch_user(_NOBODY)


def _continue_as_first() -> None:
    """Fork, and continue in the child as the first process (init) of the new PID namespace.

    When process 1 ends, the kernel ends all others there.
    """
    pid = os.fork()
    if pid:
        _wait_out(pid)
    _die_with_parent()


def _die_with_parent() -> None:
    primitives.prctl(primitives.PR_SET_PDEATHSIG, signal.SIGKILL)


def _build_root(readable: list[str], mounts: dict[str, str]) -> None:
    """Build an in-memory file system with read-only views of the files that sessions may see.

    ``mounts`` maps paths in it to files or folders of the host.
    """
    places = {path: path for path in readable} | mounts
    # Opened before /tmp is covered, where some may be. Sorted, so that parents are mounted first.
    sources = {
        place: (os.open(path, os.O_PATH | os.O_CLOEXEC), os.path.isdir(path))
        for place, path in sorted(places.items())
    }
    # Otherwise the mounts below could spread to the host's namespace.
    primitives.mount(None, "/", None, primitives.MS_REC | primitives.MS_PRIVATE)
    # Not among the sources: make_read_only would make this device unusable.
    null = os.open("/dev/null", os.O_PATH | os.O_CLOEXEC)
    flags = primitives.MS_NOSUID | primitives.MS_NODEV
    primitives.mount("tmpfs", _ROOT, "tmpfs", flags, "size=4m,mode=755")
    for place, (fd, is_folder) in sources.items():
        _bind_mount(fd, _ROOT + place, is_folder)
        primitives.make_read_only(_ROOT + place)
        os.close(fd)
    for link in _system_symlinks():
        _link(link)
    for folder in (scratch_folder_path([*readable, *mounts]), "/tmp", "/dev"):
        os.makedirs(_ROOT + folder, exist_ok=True)
    _bind_mount(null, _ROOT + "/dev/null", False)
    os.close(null)
    # 0x20: MS_REMOUNT. For this mount alone: make_read_only would include that of /dev/null.
    primitives.mount(None, _ROOT, None, 0x20 | primitives.MS_BIND | primitives.MS_RDONLY | flags)


def _bind_mount(fd: int, target: str, is_folder: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder and not os.path.exists(target):
        with open(target, "w"):
            pass
    primitives.mount(f"/proc/self/fd/{fd}", target, None, primitives.MS_BIND | primitives.MS_REC)


def _system_symlinks() -> list[str]:
    """Return the system folders that are symbolic links, such as /lib if /usr is merged."""
    return [path for path in _SYSTEM if os.path.islink(path)]


def _link(path: str) -> None:
    if not os.path.lexists(_ROOT + path):
        os.makedirs(os.path.dirname(_ROOT + path), exist_ok=True)
        os.symlink(os.readlink(path), _ROOT + path)


def scratch_folder_path(shown: list[str]) -> str:
    """Return the path of a session's private folder as seen inside the jail.

    It is /tmp, unless that would hide a path below /tmp that sessions should see.
    """
    return "/scratch" if any(path.startswith("/tmp/") for path in shown) else "/tmp"


def readable_paths(config: dict[str, Any]) -> list[str]:
    """Return the real paths that must be readable for Python and the requested packages.

    Paths inside another returned path are left out.
    """
    # The search path of a process without ``site`` is the standard library.
    candidates = [path for path in sys.path if path.startswith("/")]
    # This folder has libpython, if Python is not the system's own.
    candidates += [os.path.join(sys.base_prefix, "lib"), *config["shown"]]
    candidates += _SYSTEM
    paths = sorted({os.path.realpath(path) for path in candidates if path and os.path.exists(path)})
    return [path for path in paths if not any(path.startswith(other + "/") for other in paths)]


# ------------------------------------------------------------------------------------------------
# tiers B and C


def _continue_kept(let_go: Any) -> bool:
    """Fork, continue in the child, and let the parent wait to clean up after the child.

    The parent waits, and ends all processes that the child leaves behind.
    """
    pid = os.fork()
    if pid:
        let_go()
        _wait_out(pid)
    return True


def _no_spaces(
    config: dict[str, Any], missing: dict[str, str], tier: str, preload: Any
) -> ReachedIsolation:
    if tier == "B" and not _usable_landlock_version(config):
        raise OSError(
            0, "no Landlock, which needs Linux 5.13, and 'landlock' in /sys/kernel/security/lsm"
        )
    if config["mounts"] and tier == "C":
        raise OSError(0, "no files can be read at this tier, so nothing can be mounted")
    proc = (
        os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if os.path.isdir("/proc/self")
        else -1
    )
    # Before preload, which adds folders to sys.path that sessions may read only in part.
    readable = [*readable_paths(config), *dict(config["mounts"]).values(), "/dev/null"]
    # Root becomes another user below, who may not be able to read the standard library.
    preload(tier == "C" or os.geteuid() == 0)
    if os.geteuid() == 0:
        _drop_root()
    _die_with_parent()
    os.chdir("/")
    return _finish_isolation(tier, missing, config, proc, readable, own_user=False, outer=True)


# ------------------------------------------------------------------------------------------------
# all tiers


def _finish_isolation(
    tier: str,
    missing: dict[str, str],
    config: dict[str, Any],
    proc: int,
    readable: list[str],
    *,
    own_user: bool,
    outer: bool,
) -> ReachedIsolation:
    primitives.prctl(primitives.PR_SET_NO_NEW_PRIVS, 1)
    # Tier C is used where Landlock is missing, or did not work at tier B.
    version = _usable_landlock_version(config) if tier in "AB" else 0
    bounds = confine.JailLimits(
        config["cpu_s"], config["files_bytes"] if tier == "A" else 0, scratch_folder_path(readable)
    )
    confinement = confine.JailSessionConfiner(
        bounds,
        own_user=own_user,
        paths=tier != "C",
        # A process has all capabilities in its separate user namespace.
        drops=own_user,
        landlock=primitives.LandlockRules(readable, config["listed"], version) if version else None,
    )
    walls = ReachedIsolation(tier, missing, proc, version, confinement, outer)
    _try_out(walls)
    return walls


def _usable_landlock_version(config: dict[str, Any]) -> int:
    """Return the newest Landlock version that both the kernel and the configuration allow.

    It is 0 if Landlock is disabled.
    """
    newest: int = config["landlock"]
    return min(primitives.landlock_version(), newest)


def _try_out(walls: ReachedIsolation) -> None:
    """Test the jail's isolation by running known attacks in a trial session.

    The session first does what normal sessions do, and then runs known attacks. Raises OSError if
    its normal work fails, or if an attack succeeds.
    """
    prepared = walls.confinement.prepare_session()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        os._exit(_try_known_attacks(walls, prepared, theirs))
    theirs.close()
    with ours:
        trouble = _serve_trial(ours, pid)
    # This machine must be able to do it, because a session's folder is frozen before it forks.
    if trouble is None and prepared.scratch >= 0:
        primitives.freeze_filesystem(prepared.scratch)
    prepared.close_rules_descriptor()
    prepared.drop_scratch()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if trouble is not None:
        raise trouble
    if status:
        names = [
            name
            for number, name in enumerate(_ATTACKS)
            if 0 < status < _NOT_STARTED and status >> number & 1  # the bit of this attack
        ]
        raise OSError(
            0,
            f"a trial session could {', '.join(names)}"
            if names
            else f"a trial session did not start (status {status})",
        )


def _try_known_attacks(
    walls: ReachedIsolation, prepared: confine.JailFolderDescriptors, wire: socket.socket
) -> int:
    """Confine this process like a session's, then try to break out with known attacks.

    Returns a bit mask of the attacks that succeeded, or ``_NOT_STARTED`` if the process could not
    be confined.
    """
    fd = wire.detach()
    try:
        walls.confinement.set_up_session_process(prepared)
        fd = os.dup2(fd, 3, inheritable=False)
        os.closerange(fd + 1, 1 << 20)
        walls.confinement.apply_resource_limits()
        walls.confinement.finish(fd)
        found = sum(1 << n for n, attack in enumerate(_ATTACKS.values()) if _succeeds(attack))
        # No attack: this shows whether the kernel can insert descriptors, as after a fork.
        primitives.replace_descriptors_with_connection(3)
        os.close(3)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(fd, _describe_cause(error).encode())
        return _NOT_STARTED
    return found


def _serve_trial(wire: socket.socket, pid: int) -> OSError | None:
    """Play the host's role for a trial session, and check the kernel features that the host needs.

    Returns an error if one is missing, otherwise None.
    """
    listener = -1
    try:
        wire.settimeout(_TRIAL_S)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, _call_required("pidfd_open (Linux 5.3)", os.pidfd_open, pid))
            file = _call_required("memfd_create", os.memfd_create, "trial", _MEMFD_FLAGS)
            stack.callback(os.close, file)
            _call_required(
                "sealing of memory files", fcntl.fcntl, file, _F_ADD_SEALS, _F_SEAL_WRITE
            )
            data, ancillary, _, _ = wire.recvmsg(4096, socket.CMSG_SPACE(4))
            for _, _, packed in ancillary:
                listener = array.array("i", packed)[0]
                stack.callback(os.close, listener)
            if listener < 0:
                why = data.decode("utf-8", "replace") or "it ended at once"
                return OSError(0, f"a trial session did not start: {why}")
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            while poll.poll(_TRIAL_END_S * 1000):
                if not _answer_trial(listener, file):
                    return None
            raise OSError(0, f"a trial session did not end within {_TRIAL_END_S:g} s")
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        return error


def _answer_trial(listener: int, file: int) -> bool:
    """Answer one system call that the kernel submits to the host on behalf of the trial session.

    A request to create a process is refused; a request for a file descriptor is granted. Returns
    False if that was the last request or the session has ended.
    """
    try:
        request = requests.receive_seccomp_notification(listener)
    except OSError as error:
        if error.errno == errno.ENOENT:  # the session ended before its request was read
            return False
        raise OSError(
            0, f"seccomp notifications, which need Linux 5.0, failed: {error.strerror}"
        ) from None
    is_last = requests.is_branch_connection_request(request)
    if is_last:
        try:
            # 3 is the number that the trial session asks for.
            requests.insert_descriptor(listener, request.id, file, 3)
        except OSError as error:
            raise OSError(
                0, f"seccomp descriptors, which need Linux 5.9, failed: {error.strerror}"
            ) from None
    requests.answer_seccomp_notification(listener, request.id, error=0 if is_last else errno.EPERM)
    return not is_last


def _call_required(what: str, call: Any, *arguments: Any) -> int:
    try:
        result: int = call(*arguments)
    except (OSError, AttributeError) as error:
        raise OSError(0, f"{what}: {getattr(error, 'strerror', error)}") from None
    return result


def _succeeds(attack: Any) -> bool:
    try:
        attack()
    except OSError:
        return False
    return True


# The highest bit of an exit status; the lower seven are those of the attacks.
_NOT_STARTED = 1 << 7
_TRIAL_S, _TRIAL_END_S = 10.0, 60.0
_MEMFD_FLAGS = getattr(os, "MFD_CLOEXEC", 1) | getattr(os, "MFD_ALLOW_SEALING", 2)
_F_ADD_SEALS, _F_SEAL_WRITE = 1033, 0x8
_ATTACKS = {
    "read a file": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "create a process": os.fork,
    "signal another": lambda: os.kill(os.getppid(), 0),
    "write to a file": lambda: os.close(os.open(os.__file__, os.O_WRONLY)),
    # Access mode 3, for neither reading nor writing, which no version of Landlock denies.
    "empty a file": lambda: os.close(os.open(os.devnull, os.O_TRUNC | os.O_ACCMODE)),
    "rename a file": lambda: os.rename(os.__file__, os.__file__),
}
"""Name -> a forbidden action that a trial session attempts, to check that it is confined. Each is
harmless even if it succeeds."""
