"""What Linux offers to a process that shuts itself in, through the C library alone: no package, no privileges.

Namespaces and mounts (unshare(2), mount(2), mount_setattr(2), pivot_root(2)), capabilities(7), Landlock
(landlock(7)) and seccomp (seccomp(2)). Every function raises ``OSError`` with what the kernel said. Python 3.11 has
none of these calls itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
EVERY_NAMESPACE = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8  # MOUNT_ATTR_*
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_SECUREBITS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 28, 36, 38
_NO_ROOT_LOCKED = 0b11  # SECBIT_NOROOT and its lock: user 0 gets no capabilities by starting a program
_LAST_CAPABILITY = 63
_CAPABILITY_VERSION_3 = 0x20080522

_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446  # on every machine
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    raw = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3]), f"mount {target}")


def restrict_mount(target: str, attributes: int, *, below: bool = True) -> None:
    """Add attributes (``READ_ONLY``, ...) to a mount and, if ``below``, to all mounts below it. Linux 5.12."""
    attr = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _syscall(
        f"mount_setattr {target}",
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(_AT_RECURSIVE if below else 0),
        ctypes.c_char_p(attr),
        ctypes.c_size_t(len(attr)),
    )


def enter_root(folder: str) -> None:
    """Make ``folder``, a mount, the root of this mount namespace; the old root is gone (pivot_root(2))."""
    if MACHINE not in _PIVOT_ROOT:
        raise OSError(f"no number of pivot_root is known for {MACHINE}")
    os.chdir(folder)
    _syscall("pivot_root", _PIVOT_ROOT[MACHINE], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, first: int = 0, second: object = None) -> None:
    none = ctypes.c_ulong(0)
    _check(
        _libc.prctl(option, ctypes.c_ulong(first), none if second is None else second, none, none), f"prctl {option}"
    )


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, 9)


def hide_memory() -> None:
    """No process of this user may trace this one or read its memory."""
    prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Descendants whose parent died become children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_bounding_set() -> None:
    """No program that is started from here on has any capability, whoever starts it; needs CAP_SETPCAP."""
    prctl(_PR_SET_SECUREBITS, _NO_ROOT_LOCKED)
    for number in range(_LAST_CAPABILITY + 1):
        try:
            prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            break  # the kernel knows no more


def drop_capabilities() -> None:
    """Give up the capabilities of this process itself."""
    if MACHINE not in _CAPSET:
        raise OSError(f"no number of capset is known for {MACHINE}")
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _syscall("capset", _CAPSET[MACHINE], ctypes.c_char_p(header), ctypes.c_char_p(nothing))


# --- Landlock: what may be done to which files; and no TCP, no signals or abstract sockets to the outside

_FILES_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}  # how many rights on files each version knows; 16 from 5 on
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # execute, write, read, truncate, ioctl of a device


def landlock_version() -> int:
    """The version of Landlock's interface; 0 where the kernel has none."""
    number: int = _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(number, 0)


def landlock(readable: Sequence[str], writable: Sequence[str]) -> None:
    """From here on only ``readable`` may be read and started, and ``writable`` used in any way. Needs
    ``no_new_privileges``.
    """
    version = landlock_version()
    everything = (1 << _FILES_BY_ABI.get(version, 16)) - 1
    parts = [everything, *([0b11] if version >= 4 else []), *([0b11] if version >= 6 else [])]
    attr = struct.pack(f"={len(parts)}Q", *parts)
    ruleset = _syscall(
        "landlock", _LANDLOCK_CREATE, ctypes.c_char_p(attr), ctypes.c_size_t(len(attr)), ctypes.c_uint(0)
    )
    for paths, rights in ((readable, _READ), (writable, everything)):
        for path in paths:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & _OF_FILES
            rule = struct.pack("=Qi", allowed & everything, place)
            _syscall(
                f"landlock {path}",
                _LANDLOCK_ADD,
                ctypes.c_int(ruleset),
                ctypes.c_int(1),
                ctypes.c_char_p(rule),
                ctypes.c_uint(0),
            )
            os.close(place)
    _syscall("landlock", _LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


# --- seccomp: system calls that code under test has no business with

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: its number on x86_64 and on aarch64 (None: it is not there). Refused, as if not permitted: what looks into or
# changes other processes, namespaces, mounts, keys, modules and clocks; and memory that no limit counts.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
    "personality": (135, 92), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237), "mknod": (133, None),
    "mknodat": (259, 33), "vhangup": (153, 58),
}  # fmt: skip
_SOCKET, _CLONE = (41, 198), (56, 220)
_CLONE3 = 435
_AF_UNIX = 1
_X32 = 0x40000000  # calls of x86_64 under other numbers
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data, little-endian
_FILTER_MODE = 2


def has_seccomp() -> bool:
    """Whether this machine's system calls are known, and the kernel filters them."""
    return MACHINE in _ARCHITECTURES and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def filter_program() -> bytes:
    """The filter as classic BPF instructions (code, jump if true, jump if false, constant)."""
    column = list(_ARCHITECTURES).index(MACHINE)
    namespaces = EVERY_NAMESPACE  # a time namespace is only for clone3 and unshare: the lowest byte is a signal
    steps = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if MACHINE == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    steps += [
        (_EQUAL, 0, 1, _CLONE3),  # its flags stand in memory, where no filter can look: the C library then uses clone
        (_RETURN, 0, 0, _REFUSE | _ENOSYS),
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_ANY_BIT, 0, 5, namespaces),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
        (_EQUAL, 0, 3, _SOCKET[column]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _AF_UNIX),
        (_RETURN, 0, 0, _REFUSE | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def filter_system_calls() -> None:
    """From here on the calls above are refused, to this process and what it starts. Needs ``no_new_privileges``."""
    code = filter_program()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.c_char_p(program))
