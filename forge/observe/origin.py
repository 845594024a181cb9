"""What a figure comes from: the versions, the commit, and the processor. It imports no torch."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import forge

PACKAGES = ("torch", "numpy", "hydra-core", "triton")


def versions() -> dict[str, str | None]:
    """None for a package that is not installed."""
    return {"forge": forge.__version__, "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES}}


def source(folder: Path = Path(__file__).parents[2]) -> dict[str, Any] | None:
    """commit: that the code in this folder is of. changed: whether it was since. None outside of a checkout of its own:
    what is installed below somebody else's repository is not of their commit."""
    with suppress(OSError, subprocess.SubprocessError):
        def git(*words: str) -> str:
            return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10,
                                  check=True).stdout.strip()

        if Path(git("rev-parse", "--show-toplevel")).resolve() == folder.resolve():
            return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    return None


def commit() -> str | None:
    """The same in a word: the commit, with a + where files were changed since."""
    found = source()
    return found["commit"] + "+" * found["changed"] if found else None


def processor() -> str:
    """The name of the CPU, or its architecture where it has none."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
