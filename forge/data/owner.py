"""Which process holds something in a folder that processes of several jobs and machines share."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

_SILENT = 600.0     # seconds after which a process on another machine counts as gone: nobody can look at it from here


def own() -> str:
    """This process: its host, number and start time, since numbers come again."""
    return f"{_host()} {os.getpid()} {_started(os.getpid())}"


def is_gone(owner: str, heard: float) -> bool:
    """Whether the process has ended. heard: when it last wrote something, in seconds since 1970."""
    host, _, process = owner.rpartition(" ")[0].rpartition(" ")
    if host != _host():
        return time.time() - heard > _SILENT
    return not process.isdigit() or _started(int(process)) != owner.rpartition(" ")[2]


def _host() -> str:
    """With the namespace of process numbers: containers of one host may share its name, and not its numbers."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{space}"


def _started(process: int) -> str:
    """In clock ticks since the machine started; "" where there is no such process, or only what its parent has not yet
    asked about."""
    try:
        said = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if said[0] in "ZX" else said[19]
