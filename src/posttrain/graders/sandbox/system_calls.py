"""A filter of system calls (seccomp(2)) for bubblewrap: what its namespaces leave open."""

from __future__ import annotations

import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: its number on x86_64 and on aarch64. Refused as not permitted: memory that no limit counts, keys, and what has
# often been a way into the kernel.
_REFUSED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "syslog": (103, 116),
    "name_to_handle_at": (303, 264), "personality": (135, 92), "mbind": (237, 235), "migrate_pages": (256, 238),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "open_tree": (428, 428), "fsopen": (430, 430),
}  # fmt: skip
_SOCKET, _AF_UNIX = (41, 198), 1
_CLONE, _CLONE3, _NEW_NAMESPACES = (56, 220), 435, 0x7E020000
_X32 = 0x40000000  # calls of x86_64 under other numbers
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _NOT_PERMITTED, _NOT_THERE = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data, little-endian


def filter_program(machine: str = platform.machine()) -> bytes:
    """Return the filter as classic BPF instructions (code, jump if true, jump if false, constant).

    It is empty for a machine whose numbers are not known.
    """
    if machine not in _ARCHITECTURES:
        return b""
    column = list(_ARCHITECTURES).index(machine)
    steps = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _NOT_PERMITTED)]
    for numbers in _REFUSED.values():
        steps += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _NOT_PERMITTED)]
    steps += [
        (_EQUAL, 0, 1, _CLONE3),  # its flags stand in memory, where no filter can look: the C library then uses clone
        (_RETURN, 0, 0, _NOT_THERE),
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_ANY_BIT, 0, 5, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _NOT_PERMITTED),
        (_EQUAL, 0, 3, _SOCKET[column]),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _AF_UNIX),
        (_RETURN, 0, 0, _NOT_PERMITTED),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


FILTER = filter_program()
