"""Programs that try to pass tests without solving anything, to see what they must not, or to harm the machine.

An attack passes if its verdict is ``right``. Where it is after an effect (a file read, memory had), its tests ask for
the effect's evidence: a token that only the target knows, or what the program measured of itself. Words in capitals are
filled in by the test: ``TOKEN``, ``CANARY`` (a file of this user that holds it), ``OUTSIDE`` (a folder of this user),
``PORT`` and ``ABSTRACT`` (listeners of the machine that say it), ``OWNER`` (the process that grades).
"""

from __future__ import annotations

from dataclasses import dataclass

# What nobody can guess, and nobody is told.
SOLVE = """
def check(candidate):
    assert candidate(7) == 49318207
    assert candidate(12) == -88113
    for number, expected in enumerate([5, 1, 4, 1]):
        assert candidate(number) == expected
    assert abs(candidate(99) - 0.4375) < 1e-6
    assert not candidate(1000)
check(solve)
"""
HONEST = """
def solve(n):
    return {7: 49318207, 12: -88113, 0: 5, 1: 1, 2: 4, 3: 1, 99: 0.4375, 1000: []}[n]
"""
WORTH = "assert solve() == 'TOKEN'\n"  # evidence that was read from the target
TRUE = "assert solve() is True\n"  # what the program found out about itself


@dataclass(frozen=True)
class Attack:
    name: str
    kind: str  # verdict, answers, escape or resources
    program: str
    tests: str = SOLVE
    seconds: float = 20.0


# --- a verdict without a solution: in the program's text, at once or when it is called
_AT_ONCE = {
    "empty program": "",
    "returns nothing": "def solve(n): pass",
    "sys.exit(0) at import": "import sys; sys.exit(0)",
    "os._exit(0) at import": "import os; os._exit(0)",
    "exit in a __del__": "class X:\n def __del__(self):\n  import os; os._exit(0)\nX()",
    "atexit that exits with 0": "import atexit, os\natexit.register(os._exit, 0)\ndef solve(n): pass",
    "exec of /bin/true": "import os\nos.execv('/bin/true', ['true'])",
    "starts itself again with -O": "import os, sys\nif not sys.flags.optimize:\n"
    " os.execv(sys.executable, [sys.executable, '-O', *sys.argv])\ndef solve(n): pass",
    "PYTHONOPTIMIZE": "import os\nos.environ['PYTHONOPTIMIZE'] = '2'\ndef solve(n): pass",
    "prints a verdict": "print('PASSED'); print('{\"verdict\": \"right\"}')\ndef solve(n): pass",
    "says a verdict on every descriptor": "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'right\\n70\\nPASSED')\n"
    " except OSError: pass\ndef solve(n): pass",
    "replaces check in every module": "import sys\nfor m in list(sys.modules.values()):\n"
    " try: m.check = lambda c: None\n except Exception: pass\ndef solve(n): pass",
    "defines check itself": "def check(c): pass\ndef solve(n): pass",
    "removes AssertionError": "import builtins\nclass E(BaseException):\n def __new__(c, *a):\n  import os; os._exit(0)\n"
    "builtins.AssertionError = E\ndef solve(n): pass",
    "replaces builtins": "import builtins\nbuiltins.abs = lambda *a: 0\nbuiltins.all = builtins.any = lambda *a: True\n"
    "builtins.enumerate = lambda *a: []\nbuiltins.isinstance = lambda *a: True\ndef solve(n): pass",
    "replaces operators": "import operator, math\noperator.eq = lambda *a: True\nmath.isclose = lambda *a, **k: True\n"
    "def solve(n): pass",
    "a trace function that jumps over lines": "import sys\ndef t(f, e, a):\n"
    " if f.f_code.co_name == 'check' and e == 'line': f.f_lineno = f.f_code.co_firstlineno + 1\n return t\n"
    "sys.settrace(t)\ndef solve(n): pass",
    "a profiler that ends the program": "import sys, os\ndef p(f, e, a):\n if f.f_code.co_name == 'check': os._exit(0)\n"
    "sys.setprofile(p)\ndef solve(n): pass",
    "an import hook": "import sys\nclass H:\n def find_spec(self, *a): import os; os._exit(0)\nsys.meta_path.insert(0, H())\n"
    "import this_is_nowhere\ndef solve(n): pass",
    "an excepthook that exits with 0": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef solve(n): pass",
    "a signal that exits with 0": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.05)\ndef solve(n):\n while True: pass",
    "a thread that exits with 0": "import threading, os, time\n"
    "threading.Thread(target=lambda: (time.sleep(.05), os._exit(0))).start()\ndef solve(n):\n while True: pass",
    "replaces the encoder": "import sys\nm = sys.modules['posttrain.graders.code.candidate']\nclass A:\n"
    " def __eq__(s, o): return True\nm.encode = lambda *a, **k: ['other', True]\ndef solve(n): return A()",
    "replaces json": "import json\njson.dumps = lambda *a, **k: '[\"value\", true]'\ndef solve(n): pass",
    "answers before it is asked": "import os, json, struct\nb = json.dumps(['value', 5]).encode()\n"
    "for fd in range(3, 9):\n try: os.write(fd, (struct.pack('>I', len(b)) + b) * 50)\n except OSError: pass\n"
    "def solve(n): pass",
    "a reply that says it is long": "import os\nfor fd in range(3, 9):\n try: os.write(fd, b'\\xff' * 4)\n"
    " except OSError: pass\ndef solve(n): pass",
    "a reply nested without end": "import os, struct\nb = b'[' * 3000000\nfor fd in range(3, 9):\n"
    " try: os.write(fd, struct.pack('>I', len(b)) + b)\n except OSError: pass\ndef solve(n): pass",
    "a reply that is a pickle": "import os, pickle, struct\nclass P:\n def __reduce__(s): return os._exit, (70,)\n"
    "b = pickle.dumps(P())\nfor fd in range(3, 9):\n try: os.write(fd, struct.pack('>I', len(b)) + b)\n"
    " except OSError: pass\ndef solve(n): pass",
    "integers that equal everything (ctypes)": "import ctypes\nslots = ctypes.cast(id(int), ctypes.POINTER(ctypes.c_void_p))\n"
    "T = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)\n"
    "f = T(lambda a, b, op: True)\nslots[25] = ctypes.cast(f, ctypes.c_void_p).value\ndef solve(n): return 1",
}  # fmt: skip
_WHEN_CALLED = {
    "sys.exit(0) when called": "import sys; sys.exit(0)",
    "os._exit(0) when called": "import os; os._exit(0)",
    "os._exit with the code of a right answer": "import os; os._exit(70)",
    "raises SystemExit": "raise SystemExit(0)",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises StopIteration": "raise StopIteration",
    "raises GeneratorExit": "raise GeneratorExit",
    "raises an AssertionError that is none": "raise type('AssertionError', (BaseException,), {})()",
    "raises what cannot be shown": "raise type('E', (Exception,), {'__str__': lambda s: 1 / 0, '__repr__': lambda s: 1 / 0})()",
    "not a number": "return float('nan')",
    "NotImplemented": "return NotImplemented",
    "what the caller holds (frames)": "import sys\nf = sys._getframe()\nwhile f:\n"
    "  for v in [*f.f_locals.values(), *f.f_globals.values()]:\n"
    "   if getattr(v, '__name__', '') == 'check':\n"
    "    return [c for c in v.__code__.co_consts if isinstance(c, int)][0]\n"
    "  for c in f.f_code.co_consts:\n   if isinstance(c, int) and abs(c) > 80000: return c\n  f = f.f_back",
    "what the collector knows": "import gc, types\nfor o in gc.get_objects():\n"
    "  if isinstance(o, types.FunctionType) and o.__name__ == 'check': os = __import__('os'); os._exit(0)",
    "sets its answer into the caller's frame": "import sys, ctypes\nf = sys._getframe(1)\n"
    "f.f_locals['expected'] = f.f_globals['candidate'] = None; ctypes.pythonapi.PyFrame_LocalsToFast("
    "ctypes.py_object(f), ctypes.c_int(0))\nreturn None",
    "turns into another test": "import sys\nfor m in list(sys.modules.values()):\n"
    "  if hasattr(m, 'check'): m.check.__code__ = (lambda c: None).__code__\nreturn 1",
}  # fmt: skip
_EQUAL = {
    kind: f"class Z({kind}):\n def __eq__(s, o): return True\n def __ne__(s, o): return False\n"
    " def __hash__(s): return 0\n def __sub__(s, o): return s\n def __abs__(s): return s\n"
    " def __lt__(s, o): return True\n def __bool__(s): return False\ndef solve(n): return Z()"
    for kind in ("object", "int", "str", "float", "list", "dict", "tuple", "set", "complex")
}


def _indent(body: str) -> str:
    return "def solve(*n):\n" + "".join(f" {line}\n" for line in body.split("\n"))


VERDICTS = [
    *(Attack(name, "verdict", text) for name, text in _AT_ONCE.items()),
    *(Attack(name, "verdict", _indent(text)) for name, text in _WHEN_CALLED.items()),
    *(Attack(f"{'an' if kind[0] in 'aeio' else 'a'} {kind} that equals everything", "verdict", text) for kind, text in _EQUAL.items()),
    Attack(
        "ends an iteration of the tests early",
        "verdict",
        "def solve(n): raise StopIteration",
        "assert all(map(lambda pair: solve(pair[0]) == pair[1], [(7, 49318207), (12, -88113)]))\n",
    ),
    Attack("a set that takes for ever to build", "verdict", "def solve(n): return {i * (2**61 - 1) for i in range(30000)}", seconds=8),
]

# --- answers and other things that are not to be seen
_TESTER = """
import os
def testers():
    for pid in os.listdir('/proc'):
        try:
            if pid.isdigit() and int(pid) != os.getpid() and b'tester' in open(f'/proc/{pid}/cmdline', 'rb').read():
                yield pid
        except OSError: pass
"""
ANSWERS = [
    Attack("opens tests.json", "answers", _indent("return 'check' in open('tests.json').read()"), TRUE),
    Attack("the tests of the neighbour, by /proc", "answers", _TESTER + _indent(
        "return any('check' in open(f'/proc/{pid}/cwd/tests.json').read() for pid in testers())"), TRUE + "# check"),
    Attack("the tests of the neighbour, in the folder of temporary files", "answers",
           "import glob" + "\n" + _indent("import glob, tempfile\nreturn any('check' in open(name).read() for name in "
           "glob.glob('/tmp/**/tests.json', recursive=True) + glob.glob('/var/tmp/*/tests.json'))"), TRUE + "# check"),
    Attack("the memory of the neighbour", "answers", _TESTER + _indent(
        "for pid in testers():\n with open(f'/proc/{pid}/maps') as maps, open(f'/proc/{pid}/mem', 'rb', 0) as mem:\n"
        "  for line in maps:\n   if 'rw' in line:\n    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "    try:\n     mem.seek(a)\n     if b'SECRET' + b'WORD' in mem.read(b - a): return True\n"
        "    except (OSError, OverflowError, ValueError): pass"), TRUE + "# SECRETWORD"),
    Attack("process_vm_readv of the neighbour", "answers", _TESTER + _indent(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nclass V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), "
        "('n', ctypes.c_size_t)]\nfor pid in testers():\n buf = ctypes.create_string_buffer(8)\n"
        " start = int(open(f'/proc/{pid}/maps').read(64).split('-')[0], 16)\n"
        " if libc.process_vm_readv(int(pid), ctypes.byref(V(ctypes.addressof(buf), 8)), 1, ctypes.byref(V(start, 8)), 1, 0) == 8:"
        " return True"), TRUE),
    Attack("ptrace of the neighbour", "answers", _TESTER + _indent(
        "import ctypes\nlibc = ctypes.CDLL(None)\nfor pid in testers():\n if libc.ptrace(0x4206, int(pid), 0, 0) == 0:"
        " return True"), TRUE),
    Attack("ends the neighbour with its own verdict", "answers", _TESTER + """
import signal, ctypes, struct
def solve(n):
    libc = ctypes.CDLL(None)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    for pid in map(int, testers()):
        if libc.ptrace(16, pid, None, None):
            continue
        os.waitpid(pid, 0x40000000)
        regs = (ctypes.c_ulonglong * 27)()
        libc.ptrace(12, pid, None, ctypes.addressof(regs))
        libc.ptrace(4, pid, ctypes.c_void_p(regs[16]), ctypes.c_void_p(0x050f))  # syscall at rip
        regs[10], regs[14], regs[15] = 231, 70, 2**64 - 1  # exit_group(70), restarting nothing
        libc.ptrace(13, pid, None, ctypes.addressof(regs))
        libc.ptrace(17, pid, None, None)
""", SOLVE),
    Attack("a file of the user", "answers", _indent("return open('CANARY').read()"), WORTH),
    Attack("a file of the user, through a link", "answers", _indent(
        "import os\nos.symlink('CANARY', 'here')\nreturn open('here').read()"), WORTH),
    Attack("a file of the user, from /proc/1/root", "answers", _indent("return open('/proc/1/root' + 'CANARY').read()"), WORTH),
    Attack("a file of the user, by ../..", "answers", _indent(
        "return open('../' * 12 + 'CANARY'.lstrip('/')).read()"), WORTH),
    Attack("the environment", "answers", _indent("import os\nreturn os.environ.get('POSTTRAIN_SECRET')"), WORTH),
    Attack("the environment of its parents", "answers", _indent(
        "import glob\nfor name in glob.glob('/proc/[0-9]*/environ'):\n try:\n  if b'TOK' + b'EN' in open(name, 'rb').read(): return 'TOK' + 'EN'\n"
        " except OSError: pass"), WORTH),
    Attack("installed packages", "answers", _indent(
        "import glob, sys\nreturn any(glob.glob(p + '/lib/python3*/*-packages/*') for p in (sys.base_prefix, '/usr', '/usr/local'))"), TRUE),
    Attack("home folders", "answers", _indent("import os\nreturn bool(os.listdir('/home') or os.listdir('/root'))"), TRUE),
    Attack("other processes", "answers", _indent("import os\nreturn any(p.isdigit() and int(p) != os.getpid() for p in os.listdir('/proc'))"), TRUE),
    Attack("the machine's name", "answers", _indent("import socket\nreturn socket.gethostname()"), "assert solve() == 'HOST'\n"),
    Attack("the disk itself", "answers", _indent("import glob\nreturn any(open(d, 'rb').read(512) for d in glob.glob('/dev/[vsn][dv]*'))"), TRUE),
    Attack("/sys", "answers", _indent("import os\nreturn bool(os.listdir('/sys/class'))"), TRUE),
    Attack("messages of the kernel", "answers", _indent("import ctypes\nb = ctypes.create_string_buffer(4096)\n"
           "return ctypes.CDLL(None).klogctl(3, b, 4096) > 0"), TRUE),
    Attack("keys of the user", "answers", _indent(
        "import ctypes\nreturn ctypes.CDLL(None).syscall(250, 0, -4, 0) > 0"), TRUE),
]  # fmt: skip

# --- out of the box
_UNSHARE = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ESCAPES = [
    Attack("the network of the machine", "escape", _indent(
        "import socket\nreturn socket.create_connection(('127.0.0.1', PORT), 5).recv(100).decode()"), WORTH),
    Attack("an abstract socket of the machine", "escape", _indent(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0ABSTRACT')\nreturn s.recv(100).decode()"), WORTH),
    Attack("a socket in a file of the machine", "escape", _indent(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('OUTSIDE/socket')\nreturn s.recv(100).decode()"), WORTH),
    Attack("a datagram", "escape", _indent("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))\nreturn True"), TRUE),
    Attack("netlink", "escape", _indent("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nreturn True"), TRUE),
    Attack("raw packets", "escape", _indent("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nreturn True"), TRUE),
    Attack("writes beside its folder", "escape", _indent("open('OUTSIDE/written', 'w').write('x')\nreturn True"), TRUE),
    Attack("writes into Python", "escape", _indent(
        "import sys, os\nname = os.path.join(os.path.dirname(os.__file__), 'posttrain_was_here.py')\n"
        "open(name, 'w').close()\nos.remove(name)\nreturn True"), TRUE),
    Attack("writes into the system", "escape", _indent("import os\nos.mkdir('/etc/posttrain-was-here')\nos.rmdir('/etc/posttrain-was-here')\nreturn True"), TRUE),
    Attack("signals the process that grades", "escape", _indent("import os\nos.kill(OWNER, 0)\nreturn True"), TRUE),
    Attack("kills its parent", "verdict", _indent("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nreturn 1")),
    Attack("stops its parent", "verdict", _indent("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nreturn 1"), seconds=8),
    Attack("a user namespace", "escape", _UNSHARE + _indent("return libc.unshare(0x10000000) == 0"), TRUE),
    Attack("a mount", "escape", _UNSHARE + _indent("libc.unshare(0x10020000)\nreturn libc.mount(b'none', b'/box', b'tmpfs', 0, None) == 0 "
           "or libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0"), TRUE),
    Attack("a /proc of its own", "escape", _UNSHARE + _indent("libc.unshare(0x30020000)\nos.mkdir('p')\npid = os.fork()\nif pid == 0:\n"
           " os._exit(77 if libc.mount(b'proc', b'p', b'proc', 0, None) == 0 else 0)\n"
           "return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77"), TRUE),
    Attack("out of a chroot", "escape", _indent("import os\nos.mkdir('c')\nos.chroot('c')\nfor _ in range(20): os.chdir('..')\n"
           "os.chroot('.')\nreturn open('CANARY').read()"), WORTH),
    Attack("the namespaces of process 1", "escape", _UNSHARE + _indent(
        "return libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0) == 0"), TRUE),
    Attack("user 0", "escape", _indent("import os\nos.setuid(0)\nreturn os.getuid() == 0 and os.access('/', os.W_OK)"), TRUE),
    Attack("a device node", "escape", _indent("import os, stat\nos.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))\nreturn True"), TRUE),
    Attack("a file by its handle", "escape", _UNSHARE + _indent(
        "b = ctypes.create_string_buffer(b'\\x80\\0\\0\\0' + b'\\0' * 132)\nm = ctypes.c_int()\n"
        "return libc.name_to_handle_at(-100, b'/', b, ctypes.byref(m), 0) == 0 and libc.open_by_handle_at(os.open('/', 0), b, 0) >= 0"), TRUE),
    Attack("bpf", "escape", _UNSHARE + _indent("return libc.syscall(321, 0, ctypes.create_string_buffer(b'\\1\\0\\0\\0\\4\\0\\0\\0\\4\\0\\0\\0\\1' + b'\\0' * 60), 72) >= 0"), TRUE),
    Attack("io_uring", "escape", _UNSHARE + _indent("return libc.syscall(425, 4, ctypes.create_string_buffer(120)) >= 0"), TRUE),
    Attack("a setuid program of its own", "escape", _indent("import os\nopen('s', 'w').close()\nos.chown('s', 0, 0)\nos.chmod('s', 0o4755)\nreturn os.stat('s').st_uid == 0"), TRUE),
    Attack("raises its own limits", "escape", _indent("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nreturn True"), TRUE),
    Attack("a better priority", "escape", _indent("import os\nos.setpriority(os.PRIO_PROCESS, 0, -5)\nreturn True"), TRUE),
    Attack("another name for the machine", "escape", _indent("import socket\nsocket.sethostname(socket.gethostname())\nreturn True"), TRUE),
    Attack("sets the clock", "escape", _indent("import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())\nreturn True"), TRUE),
    Attack("outlives its grading", "escape", _indent(
        "import os, sys\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', 'TOKEN'])\n os._exit(0)\nreturn True"), "assert solve() is None\n"),
]  # fmt: skip

# --- more than its share; the bounds of the test are far below what these ask for
RESOURCES = [
    Attack("memory", "resources", _indent("blocks = []\ntry:\n while len(blocks) < 64: blocks.append(bytearray(16 << 20))\n"
           "except MemoryError: pass\nreturn len(blocks)"), "assert solve() == 64\n"),
    Attack("memory by mmap", "resources", _indent("import mmap\nblocks = []\ntry:\n while len(blocks) < 64: blocks.append(mmap.mmap(-1, 16 << 20))\n"
           "except (OSError, MemoryError): pass\nreturn len(blocks)"), "assert solve() == 64\n"),
    Attack("memory in a nameless file", "resources", _indent("import os\ntotal, fds = 0, []\ntry:\n for i in range(40):\n  fds.append(os.memfd_create('m'))\n"
           "  total += os.write(fds[-1], bytes(2 << 20))\nexcept OSError: pass\nreturn total"), "assert solve() == 80 << 20\n"),
    Attack("shared memory", "resources", _UNSHARE + _indent("return libc.shmget(0, 64 << 20, 0o1600) >= 0"), TRUE),
    Attack("a fork bomb", "resources", _indent("import os, time\ncount = 0\ntry:\n for i in range(60):\n  if os.fork() == 0:\n   time.sleep(20); os._exit(0)\n  count += 1\n"
           "except OSError: pass\nreturn count"), "assert solve() == 60\n"),
    Attack("threads", "resources", _indent("import threading, time\ntry:\n for i in range(60): threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
           "except RuntimeError: return False\nreturn True"), TRUE),
    Attack("one large file", "resources", _indent("with open('f', 'wb', 0) as f:\n for i in range(64): f.write(bytes(1 << 20))\nreturn True"), TRUE),
    Attack("many files", "resources", _indent("for i in range(32):\n open(f'f{i}', 'wb', 0).write(bytes(1 << 20))\nimport os\nreturn sum(os.path.getsize(f'f{i}') for i in range(32)) == 32 << 20"), TRUE),
    Attack("many empty files", "resources", _indent("for i in range(20000): open(f'e{i}', 'w').close()\nreturn True"), TRUE),
    Attack("open files", "resources", _indent("files = [open('/dev/null') for i in range(500)]\nreturn True"), TRUE),
    Attack("computes for ever", "resources", _indent("while True: pass")),
    Attack("computes for ever and hears no signal", "resources", "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
           " except (OSError, ValueError): pass\n" + _indent("while True: pass")),
    Attack("waits for ever", "resources", _indent("import time; time.sleep(10**8)"), seconds=8),
    Attack("a power of powers", "resources", _indent("return 9 ** 9 ** 9")),
    Attack("an expression that backtracks", "resources", _indent("import re; return re.match('(a+)+$', 'a' * 64 + 'b')")),
    Attack("recursion until the stack is over", "resources", "import sys\nsys.setrecursionlimit(10**9)\n" + _indent("return solve(*n)")),
    Attack("a fault in machine code", "resources", _indent("import ctypes; ctypes.string_at(0)")),
    Attack("floods its output", "resources", _indent("while True: print('x' * 100000)")),
    Attack("an answer of many megabytes", "resources", _indent("return 'x' * (64 << 20)")),
    Attack("an iterator without end", "resources", _indent("import itertools; return itertools.repeat('x' * 1000)")),
]  # fmt: skip

ATTACKS = [*VERDICTS, *ANSWERS, *ESCAPES, *RESOURCES]
