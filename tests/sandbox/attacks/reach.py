"""Attacks that reach for resources of the host: files, environment, network."""

from attacks.base import attack

FOLDERS = [
    "/",
    "/etc",
    "/home",
    "/root",
    "/var",
    "/proc",
    "/sys",
    "/dev",
    "/tmp",
    "/run",
    "/mnt",
    "/opt",
    "/usr/bin",
]

attack(
    "the key file of the host",
    "files",
    """
import os, io, mmap, linecache, shutil, sqlite3 if False else os
path = arena['key_file']
attempt('open', lambda: open(path).read())
attempt('os.open', lambda: os.read(os.open(path, os.O_RDONLY), 100))
attempt('open by libc', lambda: libc.open(path.encode(), 0) if libc.open(path.encode(), 0) >= 0 else (_ for _ in ()).throw(OSError('refused')))
attempt('linecache', lambda: linecache.getline(path, 1) or (_ for _ in ()).throw(Gone()))
attempt('through ..', lambda: open('/usr/lib/../..' + path).read())
attempt('through /proc/self/root', lambda: open('/proc/self/root' + path).read())
attempt('through cwd', lambda: open(os.path.relpath(path, '/')).read())
""".replace(
        "import os, io, mmap, linecache, shutil, sqlite3 if False else os", "import os, linecache"
    ),
    tries=7,
)
attack(
    "writing over files of the host",
    "files",
    """
import os
path, folder = arena['key_file'], arena['folder']
attempt('append', lambda: open(path, 'a').close())
attempt('write', lambda: os.close(os.open(path, os.O_WRONLY)))
attempt('create', lambda: os.close(os.open(folder + '/planted', os.O_CREAT | os.O_WRONLY)))
attempt('mkdir', lambda: os.rmdir(os.mkdir(folder + '/new') or folder + '/new'))
attempt('rename', lambda: os.rename(path, path + '.moved') or os.rename(path + '.moved', path))
attempt('link', lambda: os.unlink(os.link(path, folder + '/link') or folder + '/link'))
attempt('symlink', lambda: os.unlink(os.symlink(path, folder + '/symlink') or folder + '/symlink'))
attempt('chmod', lambda: os.chmod(path, 0o666))
attempt('utime', lambda: os.utime(path))
attempt('truncate', lambda: os.truncate(path, os.stat(path).st_size))
""",
    tries=10,
)
attack(
    "emptying files of the host",
    "files",
    """
import os
path = arena['key_file'].encode()
NUMBER = {'x86_64': {'open': 2, 'openat': 257, 'creat': 85, 'truncate': 76}, 'aarch64': {'openat': 56, 'truncate': 45}}[os.uname().machine]
def call(name, *args):
    number = libc.syscall(ctypes.c_long(NUMBER[name]), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in args))
    if number < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return number
import ctypes
for mode in range(4):  # 3 asks for neither reading nor writing, yet empties
    for extra in (0, os.O_APPEND, os.O_NONBLOCK, 0o100, os.O_NOFOLLOW, 0o40000000000 >> 3):
        flags = mode | os.O_TRUNC | extra
        attempt(f'openat {flags:o}', lambda: call('openat', -100, path, flags, 0o600))
        attempt(f'openat {flags:o} beyond 32 bits', lambda: call('openat', -100, path, flags | 1 << 40, 0o600))
        if 'open' in NUMBER: attempt(f'open {flags:o}', lambda: call('open', path, flags, 0o600))
attempt('openat 3', lambda: call('openat', -100, path, 3, 0))
if 'creat' in NUMBER: attempt('creat', lambda: call('creat', path, 0o600))
attempt('truncate', lambda: call('truncate', path, 0))
attempt('ftruncate', lambda: os.ftruncate(os.open(path, os.O_RDONLY), 0))
attempt('ftruncate of a path', lambda: os.ftruncate(os.open(path, os.O_PATH), 0))
""",
    tries=52,
)
attack(
    "files beside a package that may be imported",
    "files",
    """
import os, of_arena.inner
folder = arena['folder'] + '/checkout/'
for name in ('.env', '.git/config', 'id_rsa', 'settings.toml', 'conftest.py', 'of_arena/.env', 'of_arena/inner/.netrc', 'of_arena/linked'):
    attempt(name, lambda: open(folder + name).read()[:4])
def listed(name):
    names = set(os.listdir(name)) - {'of_arena'}
    if not names: raise Gone()
    return names
attempt('the folder', lambda: listed(folder))
""",
    tries=9,
)
attack(
    "account files of the host",
    "files",
    "for p in ('/etc/passwd', '/etc/group', '/etc/hosts', '/etc/hostname', '/etc/resolv.conf', "
    "'/etc/machine-id'):\n"
    "    attempt(p, lambda: open(p).read(40))",
    tries=6,
)
attack(
    "folders listed",
    "files",
    f"""
import os
EXPECTED = {{'usr', 'lib', 'lib64', 'tmp', 'dev', 'proc', 'etc', 'null', 'home', 'opt', 'work', 'nix', 'var', 'root', 'run', 'mnt', 'srv', 'urandom', 'zero', 'random', 'full'}}
def act(folder):
    def look():
        names = set(os.listdir(folder))
        if names <= EXPECTED: raise Gone(names)
        return sorted(names)[:5]
    return look
for folder in {FOLDERS!r} + [arena['home'], arena['folder']]:
    attempt(folder, act(folder))
""",
    tries=14,
)
attack(
    "existence, size and time of files",
    "files",
    "import os\nfor f in (os.stat, os.lstat, lambda p: os.statvfs(p).f_files, lambda p: "
    "os.access(p, os.R_OK) or (_ for _ in ()).throw(Gone())):\n"
    "    attempt('stat', lambda: f(arena['key_file']))\nattempt('passwd', lambda: "
    "os.stat('/etc/passwd').st_size)",
    tries=5,
    open_at={"B": "Landlock does not hide names, sizes and times of files"},
)
attack(
    "the kernel's own files",
    "files",
    """
import os
for p in ('/proc/1/environ', '/proc/self/environ', '/proc/self/maps', '/proc/self/mem', '/proc/self/cmdline', '/proc/mounts', '/proc/net/tcp', '/proc/kallsyms', '/proc/version',
          '/proc/meminfo', '/proc/sys/kernel/core_pattern', '/sys/class/net/lo/address', '/sys/kernel/mm/transparent_hugepage/enabled', f"/proc/{arena['host']}/environ", f"/proc/{arena['victim']}/mem"):
    attempt(p, lambda: open(p, 'rb').read(1) or (_ for _ in ()).throw(Gone()))
""",
    tries=15,
)
attack(
    "devices",
    "files",
    """
import os
for p in ('/dev/mem', '/dev/kmsg', '/dev/kvm', '/dev/fuse', '/dev/tty', '/dev/ptmx', '/dev/vda', '/dev/loop-control', '/dev/net/tun', '/dev/vsock', '/dev/shm/x', '/dev/userfaultfd'):
    attempt(p, lambda: os.close(os.open(p, os.O_RDWR | os.O_NONBLOCK | os.O_CREAT)))
attempt('mknod', lambda: os.mknod('/tmp/by-attack-null', 0o020666, os.makedev(1, 3)) or os.unlink('/tmp/by-attack-null'))
""",
    tries=13,
)
attack(
    "the library of the host written",
    "files",
    """
import os, json
def touch(path):
    def act():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.close(fd)
        os.path.basename(path) == 'by-attack.pth' and os.unlink(path)
        return path
    return act
folder = os.path.dirname(json.__file__)
attempt('a module', touch(json.__file__))
attempt('a .pth file', touch(os.path.join(os.path.dirname(folder), 'by-attack.pth')))
attempt('a bytecode file', touch(getattr(json, '__cached__', '') or folder + '/x'))
def times():
    s = os.stat(json.__file__)
    os.utime(json.__file__, ns=(s.st_atime_ns, s.st_mtime_ns))
attempt('its times', times)
attempt('its mode', lambda: os.chmod(json.__file__, os.stat(json.__file__).st_mode & 0o7777))
""",
    tries=5,
    without_walls="needs root",
)
attack(
    "old descriptors and folders",
    "files",
    """
import os
def leave(f):
    def act():
        names = f()
        if not names: raise Gone()
        return names
    return act
attempt('the way out of a chroot', leave(lambda: [n for n in os.listdir('/' + '../' * 30) if n in ('etc', 'root', 'boot', 'bin')] if os.path.exists('/' + '../' * 30 + 'etc/passwd') else []))
attempt('a folder that is still open', leave(lambda: [n for n in range(256) if os.path.isdir(n)] ))
attempt('fchdir out', leave(lambda: [n for n in range(256) if not os.fchdir(n)]))
""".replace("os.path.isdir(n)]", "is_folder(n)]").replace(
        "import os\n",
        "import os, stat\ndef is_folder(n):\n    try: return stat.S_ISDIR(os.fstat(n).st_mode)\n   "
        " except OSError: return False\n",
        1,
    ),
    tries=3,
)

attack(
    "the environment of the host",
    "environment",
    """
import os
name = arena['secret_name']
def seen(value):
    if not value: raise Gone()
    return len(value)
attempt('os.environ', lambda: seen(os.environ.get(name)))
libc.getenv.restype = __import__('ctypes').c_char_p
attempt('getenv', lambda: seen(libc.getenv(name.encode())))
for who in ('self', arena['host'], os.getppid(), 1, arena['victim']):
    attempt(f'/proc/{who}/environ', lambda: seen(name.encode() in open(f'/proc/{who}/environ', 'rb').read() and b'seen'))
HARMLESS = {'LANG', 'LC_ALL', 'LC_CTYPE', 'HOME', 'PATH', 'TMPDIR', 'TZ', 'PYTHONHASHSEED', 'GLIBC_TUNABLES', 'PYTHONDONTWRITEBYTECODE', 'PYTHONUTF8', 'MALLOC_ARENA_MAX'}
attempt('anything else', lambda: seen(sorted(n for n in os.environ if n not in HARMLESS and not n.endswith('_NUM_THREADS'))))
""",
    tries=8,
)
attack(
    "command line, user and place of the host",
    "environment",
    """
import os, sys
def seen(value):
    if not value: raise Gone()
    return value
attempt('the folder it was started in', lambda: seen([n for n in os.listdir('.')]))
attempt('the command line of the host', lambda: open(f"/proc/{arena['host']}/cmdline").read(1))
attempt('the login', lambda: os.getlogin())
attempt('the terminal', lambda: seen(os.isatty(0) or os.isatty(1) or os.isatty(2)))
attempt('standard input', lambda: seen(os.read(0, 10)))
""",
    tries=5,
)

attack(
    "TCP and UDP",
    "network",
    """
import socket
def connect(kind, port, family=socket.AF_INET, address='127.0.0.1'):
    def act():
        s = socket.socket(family, kind)
        s.settimeout(1)
        with s:
            if kind == socket.SOCK_DGRAM: return s.sendto(b'hello', (address, port))
            s.connect((address, port))
            return s.getpeername()
    return act
attempt('TCP', connect(socket.SOCK_STREAM, arena['tcp']))
attempt('UDP', connect(socket.SOCK_DGRAM, arena['udp']))
attempt('UDP to a name server', connect(socket.SOCK_DGRAM, 53, address='192.0.2.1'))
attempt('TCP over IPv6', connect(socket.SOCK_STREAM, arena['tcp'], socket.AF_INET6, '::1'))
""",
    tries=4,
)
attack(
    "listening",
    "network",
    """
import socket
def act():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        return s.getsockname()
attempt('listen', act)
""",
)
attack(
    "unix sockets of the host",
    "network",
    """
import socket
def to(address, kind=socket.SOCK_STREAM):
    def act():
        with socket.socket(socket.AF_UNIX, kind) as s:
            s.connect(address)
            return 'connected'
    return act
attempt('abstract', to('\\0' + arena['abstract']))
attempt('by path', to(arena['unix']))
pair = None
def bind():
    with socket.socket(socket.AF_UNIX) as s:
        s.bind('\\0by-attack-' + str(id(s)))
        return 'bound'
attempt('bind', bind)
def through_a_pair(kind, call, address):
    def act():
        a, b = socket.socketpair(socket.AF_UNIX, kind)
        with a, b:
            if call == 'connect': a.connect(address)
            return a.sendto(b'x', address) if call == 'sendto' else a.sendmsg([b'x'], [], 0, *([address] if call == 'sendmsg' else []))
    return act
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    for call in ('sendto', 'sendmsg', 'connect'):
        for address in ('\\0' + arena['abstract'] + '-datagram', arena['unix'] + '-datagram'):
            attempt(f'a pair of kind {kind}, {call} {address[:1]!r}', through_a_pair(kind, call, address))
def stream_pair():
    a, b = socket.socketpair()
    with a, b:
        a.connect('\\0' + arena['abstract'])
        return 'connected'
attempt('a pair connected anew', stream_pair)
""",
    tries=16,
)
attack(
    "sockets of every family",
    "network",
    """
families = dict(inet=2, inet6=10, netlink=16, packet=17, alg=38, vsock=40, bluetooth=31, can=29, tipc=30, qipcrtr=42, xdp=44, kcm=41, smc=43, rds=21, ax25=3, phonet=35, mctp=45)
def act(number, kind):
    def open_one():
        result = kernel('socket', number, kind, 0)
        if isinstance(result, str): raise Gone(result)
        return result
    return open_one
for name, number in families.items():
    for kind in (1, 2, 3, 5):
        attempt(f'{name} {kind}', act(number, kind))
""",
    tries=68,
)
attack(
    "names of the network",
    "network",
    """
import socket
attempt('interfaces', lambda: [n for n in socket.if_nameindex() if n[1] != 'lo'] or (_ for _ in ()).throw(Gone()))
attempt('hostname', lambda: socket.gethostname() if socket.gethostname() == open('/etc/hostname').read().strip() else (_ for _ in ()).throw(Gone()))
attempt('lookup', lambda: socket.getaddrinfo('localhost', 80))
""",
    tries=3,
)
