"""What stands between this program and a process that runs a stranger's code: the starter, and one supervisor each.

``main`` is the starter: a fresh interpreter without environment that forks a supervisor for every sandbox, so that one
costs forks and mounts but no start of Python. At the level ``namespaces`` the supervisor is process 1 of its own
namespaces, in which nothing is to be seen but Python, the system's libraries and a folder of limited size; a process
that it starts has no capabilities, another user where that can be had, and Landlock and seccomp where the kernel has
them. At the level ``process`` it shares the machine, and only limits and a process group hold what it starts.

Messages are JSON with a length in front, both ways, over one socket per sandbox; descriptors travel beside them. The
supervisor trusts its parent and nothing that it starts: it reads from no pipe of theirs, and what it says of them is
what the kernel told it. It ends, and with it all that it started, when the parent closes the socket.
"""

from __future__ import annotations

import array
import base64
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any

try:
    import resource
except ImportError:  # Windows, where no supervisor is ever started
    resource = None  # type: ignore[assignment]

from posttrain.graders.sandbox import kernel

HEADER = struct.Struct(">I")
MAX_DESCRIPTORS = 3
BOX = "/box"  # the working folder, inside
NOBODY = 65534
MAX_KILL_ROUNDS = 500
_DEVICES = ("null", "zero", "random", "urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_PACKAGES = ("site-packages", "dist-packages")


def main() -> None:
    """Fork a supervisor for every request, until the parent closes the socket on descriptor 0."""
    requests = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    while (request := receive(requests)) is not None:
        settings, (control,) = request
        child = os.fork()
        if child == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _be_supervisor(socket.socket(fileno=control), settings)
        os.close(control)
        try:
            handle = os.pidfd_open(child)
        except ProcessLookupError:  # it has ended already, and said why on its own socket
            send(requests, {})
            continue
        send(requests, {}, [handle])
        os.close(handle)


def _be_supervisor(control: socket.socket, settings: dict[str, Any]) -> None:
    """Never returns."""
    code = 1
    try:
        kernel.die_with_parent()
        os.setsid()
        if settings["level"] == "namespaces":
            _enter_namespaces()
            if (first := os.fork()) != 0:
                control.close()
                os.waitpid(first, 0)
                os._exit(0)
            kernel.die_with_parent()
            layers = _build_root(settings)
        else:
            kernel.adopt_orphans()
            os.chdir(settings["folder"])
            layers = []
        kernel.hide_memory()
        send(control, {"layers": layers})
        Supervisor(control, settings, layers).serve()
        code = 0
    except OSError as error:
        _try_to_tell(control, {"failed": error.strerror or str(error)})
    finally:
        os._exit(code)


def _try_to_tell(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        send(control, message)
    except OSError:
        return  # the parent is gone


# --- namespaces


def _enter_namespaces() -> None:
    """New namespaces of every kind for this process's children; its own user is 0 in there.

    The map of users must be written from outside. A superuser maps a second user, nobody, for what will be started:
    the kernel counts no processes of the machine's own user 0.
    """
    me, (hear, speak) = os.getpid(), os.pipe()
    if (helper := os.fork()) == 0:
        code = 1
        try:
            os.close(speak)
            os.read(hear, 1)
            _map_users(me)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    os.close(hear)
    try:
        kernel.unshare(kernel.EVERY_NAMESPACE)
    finally:
        os.close(speak)
        _, status = os.waitpid(helper, 0)
    number = os.waitstatus_to_exitcode(status)
    if number != 0:
        raise OSError(number, f"users cannot be mapped: {os.strerror(number)}")


def _map_users(pid: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        try:
            _write(f"/proc/{pid}/uid_map", f"0 0 1\n{NOBODY} {NOBODY} 1")
            _write(f"/proc/{pid}/gid_map", f"0 {gid} 1\n{NOBODY} {NOBODY} 1")
        except PermissionError:
            pass  # a superuser of a container that has no such user
        else:
            return
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"0 {uid} 1")
    _write(f"/proc/{pid}/gid_map", f"0 {gid} 1")


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    os.write(handle, text.encode())
    os.close(handle)


def _build_root(settings: dict[str, Any]) -> list[str]:
    """Make a small world and enter it; the names of the further layers that this kernel has."""
    folder, bounds = settings["folder"], settings["bounds"]
    with open("/proc/self/uid_map", encoding="ascii") as file:
        settings["user"] = NOBODY if len(file.readlines()) == 2 else 0
    layers = ["landlock"] * (kernel.landlock_version() > 0) + ["seccomp"] * kernel.has_seccomp()
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            os.symlink(os.readlink(link), folder + link)
    settings["readable"] = readable = visible_places()
    for place in readable:
        _show(place, folder + place)
        kernel.restrict_mount(folder + place, kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES)
    for place in hidden_places(readable):
        kernel.mount("tmpfs", folder + place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k,mode=555")
    for device in _DEVICES:
        _show(f"/dev/{device}", f"{folder}/dev/{device}")
        kernel.restrict_mount(f"{folder}/dev/{device}", kernel.NO_SUID | kernel.NO_PROGRAMS)
    os.mkdir(folder + BOX)
    inodes = max(64, bounds["disk_bytes"] // 4096)
    kernel.mount("tmpfs", folder + BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                 f"size={bounds['disk_bytes']},nr_inodes={inodes},mode=777")  # fmt: skip
    if not os.path.lexists(folder + "/tmp"):  # there is one if this Python lives in it
        os.symlink(BOX, folder + "/tmp")
    kernel.enter_root(folder)
    kernel.restrict_mount("/", kernel.READ_ONLY, below=False)
    socket.sethostname("sandbox")
    os.chdir(BOX)
    return layers


def _show(place: str, target: str) -> None:
    """The same file or folder at another place."""
    if os.path.isdir(place):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    kernel.mount(place, target, None, kernel.MS_BIND | kernel.MS_REC)


def visible_places() -> list[str]:
    """What can be read inside: this Python and the system's libraries; none within another."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [os.path.realpath(sys.executable), f"{prefix}/lib", f"{prefix}/lib64", *_LIBRARIES, "/etc/ld.so.cache"]
    places = sorted({os.path.realpath(place) for place in wanted if os.path.exists(place)})
    return [one for one in places if not any(one != other and one.startswith(f"{other}/") for other in places)]


def hidden_places(readable: list[str]) -> list[str]:
    """Folders of installed packages below what can be read: some bring the answers of data sets with them."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = {
        os.path.realpath(f"{prefix}/{lib}/{python}/{name}")
        for prefix in (sys.base_prefix, "/usr", "/usr/local")
        for lib in ("lib", "lib64")
        for python in (version, "python3")
        for name in _PACKAGES
    }
    return sorted(
        place for place in places if os.path.isdir(place) and any(place.startswith(f"{one}/") for one in readable)
    )


# --- one sandbox


class Supervisor:
    """Starts one program at a time, tells how it ended, and moves files in and out."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], layers: list[str]) -> None:
        self.control = control
        self.settings = settings
        self.layers = layers
        # Whether all other processes that this one sees are its own, so that it may kill whatever it sees.
        self.alone = settings["level"] == "namespaces" and os.getpid() == 1
        self.user = settings.get("user", 0)  # inside; 0: as this process
        self.running = 0
        self.handle = -1
        self.deadline = 0.0

    def serve(self) -> None:
        """Until the parent closes the socket."""
        while True:
            wait = max(0.0, self.deadline - time.monotonic()) if self.running else None
            watched: list[Any] = [self.control, *([self.handle] if self.running else [])]
            ready, _, _ = select.select(watched, [], [], wait)
            if self.running and (self.handle in ready or time.monotonic() >= self.deadline):
                self._settle(overdue=self.handle not in ready)
            if self.control in ready:
                request = receive(self.control)
                if request is None:
                    break
                message, descriptors = request
                send(self.control, self._answer(message, descriptors))
        self._kill_all()

    def _answer(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        try:
            if "start" in message:
                self._start(message, descriptors)
                return {"started": True}
            if "write" in message:
                write_inside(message["write"], base64.b64decode(message["content"]), self.user)
                return {"written": True}
            return {"content": base64.b64encode(read_inside(message["read"], message["limit"])).decode()}
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if self.running:
            raise ValueError("a program is running already")
        hear, speak = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(hear)
            self._become(message, descriptors, speak)
        os.close(speak)
        with open(hear, "rb") as failure:
            what = failure.read().decode(errors="replace")
        if what:
            os.waitpid(child, 0)
            raise ValueError(what)
        self.running, self.handle = child, os.pidfd_open(child)
        self.deadline = time.monotonic() + message["seconds"]

    def _become(self, message: dict[str, Any], descriptors: list[int], speak: int) -> None:
        """In the child: shut it in and turn it into the program. Never returns."""
        try:
            os.setsid()
            for place, descriptor in enumerate(descriptors):
                os.dup2(descriptor, place)
            if speak != MAX_DESCRIPTORS:
                speak = os.dup2(speak, MAX_DESCRIPTORS, inheritable=False)
            os.closerange(MAX_DESCRIPTORS + 1, 4096)
            os.chdir(message["cwd"])
            os.umask(0o022)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            self._shut_in()
            os.execve(message["start"][0], message["start"], message["env"])
        except (OSError, ValueError) as error:
            os.write(speak, f"{error}".encode())
        finally:
            os._exit(127)

    def _shut_in(self) -> None:
        bounds = self.settings["bounds"]
        kernel.no_new_privileges()
        if self.user != 0:
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
        if self.alone:
            kernel.drop_bounding_set()
            if self.user != 0:
                os.setresuid(self.user, self.user, self.user)
            kernel.drop_capabilities()
        kernel.die_with_parent()  # a change of the user would undo it
        if self.alone:
            others = 0 if self.user else 2  # this supervisor and its parent, which are of the same user then
        else:
            others = count_tasks(os.getuid())
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_AS: bounds["memory_bytes"],
            resource.RLIMIT_FSIZE: bounds["file_bytes"],
            resource.RLIMIT_NOFILE: bounds["open_files"],
            resource.RLIMIT_NPROC: bounds["processes"] + others,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        for name, amount in limits.items():
            _, hard = resource.getrlimit(name)
            least = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
            resource.setrlimit(name, (least, least))
        resource.setrlimit(resource.RLIMIT_CPU, (bounds["cpu_seconds"], bounds["cpu_seconds"] + 1))
        if "landlock" in self.layers:
            kernel.landlock([*self.settings["readable"], "/dev"], [BOX, "/dev/null"])
        if "seccomp" in self.layers:
            kernel.filter_system_calls()

    def _kill_main(self) -> None:
        if self.running:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def _settle(self, overdue: bool) -> None:
        """Tell how the program ended; nothing that it started outlives it."""
        if overdue:
            self._kill_main()
        _, status, usage = os.wait4(self.running, 0)
        running, self.running = self.running, 0
        os.close(self.handle)
        left = self._kill_all(running)
        code = os.waitstatus_to_exitcode(status)
        message = {"ended": code, "overdue": overdue, "left": left, "seconds": usage.ru_utime + usage.ru_stime}
        send(self.control, message)

    def _kill_all(self, group: int = 0) -> int:
        """Kill all descendants and wait for them; how many are left after many tries (never within namespaces)."""
        if self.running:
            self._kill_main()
        for attempt in range(MAX_KILL_ROUNDS):
            if attempt:
                time.sleep(0.001)
            if self.alone:
                _kill(-1)
            else:
                children = _children()
                for pid in (*([-group] if group else []), *children):
                    _kill(pid)
                if not children:
                    return 0
            try:
                while os.waitpid(-1, 0 if self.alone else os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                if self.alone:
                    return 0
        return len(_children())


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _children() -> list[int]:
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def count_tasks(uid: int) -> int:
    """Processes and threads of a user: what the kernel compares with the limit on them."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += os.stat(f"/proc/{name}/task").st_nlink - 2
            except (FileNotFoundError, ProcessLookupError):
                continue
    return total


def write_inside(path: str, content: bytes, user: int) -> None:
    """Write a new file, or an ordinary one anew; never through a link. It belongs to ``user``, unless that is 0."""
    parent = ""
    for part in path.split("/")[:-1]:
        parent = f"{parent}{part}/"
        if not os.path.isdir(parent):
            os.mkdir(parent)
            os.chown(parent, user or -1, user or -1)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o644)
    with open(handle, "wb") as file:
        os.fchown(handle, user or -1, user or -1)
        file.write(content)


def read_inside(path: str, limit: int) -> bytes:
    """The bytes of an ordinary file.

    Raises:
        ValueError: another kind of file, or more than ``limit`` bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is no ordinary file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return content


# --- messages


def send(channel: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    body = json.dumps(message).encode()
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors or []))] if descriptors else []
    channel.sendmsg([HEADER.pack(len(body))], beside)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the descriptors beside it; None when the other side has closed."""
    descriptors = array.array("i")
    size = MAX_DESCRIPTORS * descriptors.itemsize
    header, beside, _, _ = channel.recvmsg(HEADER.size, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if len(header) < HEADER.size:
        return None
    parts = bytearray()
    (length,) = HEADER.unpack(header)
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 65536))
        if not part:
            return None
        parts += part
    return json.loads(parts), list(descriptors)
