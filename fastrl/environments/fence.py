"""The restrictions of a scoring worker: a fence around verifiers that evaluate a model's text.

Four layers: resource limits; a network namespace of its own; Landlock, where Linux has it; and an
audit hook, which works everywhere. It is a fence, not a jail: text that is evaluated in the worker
can alter the worker and so the rewards that follow, and a fault in native code can get around the
hook. Nothing here needs privileges.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any

_GIB = 2**30
_MAX_OPEN_FILES = 64

# From linux/prctl.h and linux/sched.h.
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

# From linux/landlock.h: system calls, and the rights that each ABI version added.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_EXECUTE_WRITE_REMOVE_MAKE = 0x1FF3  # version 1: all but reading files and folders
_FILES_BY_VERSION = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # rename, truncate, ioctl of devices
_TCP_BIND_CONNECT = 0b11  # version 4
_ABSTRACT_SOCKETS_SIGNALS = 0b11  # version 6


def limit_memory(gib: float) -> None:
    """Bounds the address space and disables core files."""
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # macOS refuses the bound
        _limit(resource.RLIMIT_AS, int(gib * _GIB))


def leave_network() -> None:
    """Moves to a network namespace without interfaces, where the system permits it.

    To be called while the process has a single thread.
    """
    if sys.platform == "linux":
        # Not a user namespace for root, who would lose access to other users' files.
        flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
        _libc().unshare(flags)


def raise_fence() -> None:
    """Refuses, from here on, to write files, start processes and open sockets.

    The current folder becomes one that no longer exists, so nothing can be created in it.
    """
    folder = tempfile.mkdtemp(prefix="fastrl-")
    os.chdir(folder)
    os.rmdir(folder)
    _restrict_by_landlock()
    _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)  # no effect for root
    sys.dont_write_bytecode = True
    sys.addaudithook(_refusal())


def _refusal() -> Callable[[str, tuple[Any, ...]], None]:
    """The audit hook. Nothing else refers to it, and all it compares with are its own constants."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC and O_APPEND, on Linux and macOS.
            if not arguments[2] & 0x64B:
                return
        elif event in {
            "array.__new__",
            "builtins.id",
            "code.__new__",
            "compile",
            "exec",
            "function.__new__",
            "glob.glob",
            "glob.glob/2",
            "import",
            "marshal.load",
            "marshal.loads",
            "object.__getattr__",
            "object.__setattr__",
            "os.listdir",
            "os.putenv",
            "os.scandir",
            "os.unsetenv",
            "os.walk",
            "pathlib.Path.glob",
            "pathlib.Path.rglob",
            "pickle.find_class",
            "sys._getframe",
            "sys._getframemodulename",
            "sys.excepthook",
            "sys.unraisablehook",
        }:
            return
        raise PermissionError(f"a scoring worker may not do this: {event}")

    return refuse


def _restrict_by_landlock() -> None:
    """Has the kernel refuse to write, remove, create or execute any file, and to use TCP."""
    if sys.platform != "linux":
        return
    libc = _libc()
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return  # not in this kernel, or disabled
    files = _EXECUTE_WRITE_REMOVE_MAKE
    files |= sum(bit for since, bit in _FILES_BY_VERSION.items() if since <= version)
    rights = [files]
    if version >= 4:
        rights.append(_TCP_BIND_CONNECT)
    if version >= 6:
        rights.append(_ABSTRACT_SOCKETS_SIGNALS)
    attributes = (ctypes.c_uint64 * len(rights))(*rights)
    ruleset = libc.syscall(
        _CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0
    )
    if ruleset >= 0:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.syscall(_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
