"""What else may bend a figure: clocks, power, heat, and other processes. None where there is no nvidia-smi."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Any

from forge.config import Config
from forge.errors import UnusableEnvironment

FIELDS = {"name": "name", "uuid": "uuid", "driver": "driver_version", "sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem",
          "sm_mhz_most": "clocks.max.sm", "watts": "power.draw", "watts_limit": "power.limit",
          "celsius": "temperature.gpu", "memory_used_mib": "memory.used", "busy_percent": "utilization.gpu",
          "throttling": "clocks_event_reasons.active"}
# Bits of nvmlClocksEventReasons that slow a device down; idling (1) and settings of the user (2) do not count.
REASONS = {0x4: "power limit", 0x8: "hardware slowdown", 0x10: "synchronised with others",
           0x20: "software thermal limit", 0x40: "hardware thermal limit", 0x80: "power brake"}
TAKEN_MIB = 2048        # an idle driver holds a few hundred; processes of other containers are not listed


def look() -> dict[str, Any]:
    """Now: the load of this machine, and its GPUs."""
    return {"time": round(time.time(), 3), "load_average": os.getloadavg()[0], "devices": devices()}


def devices() -> list[dict[str, Any]] | None:
    """The GPUs that this process may use, with the processes on them."""
    rows = _ask("gpu", list(FIELDS.values()))
    if rows is None:
        return None
    found = [dict(zip(FIELDS, map(_value, row), strict=True)) for row in rows if len(row) == len(FIELDS)]
    running = _ask("compute-apps", ["gpu_uuid", "pid", "used_memory", "process_name"]) or []
    for device in found:
        device["throttling"] = reasons(device["throttling"])
        device["processes"] = [{"pid": int(pid), "memory_mib": _value(memory), "name": name}
                               for uuid, pid, memory, name in (row for row in running if len(row) == 4)
                               if uuid == device["uuid"]]
    return found


def reasons(mask: Any) -> list[str] | None:
    """The words for what slows a device down; None where it does not say."""
    try:
        bits = int(str(mask), 16)
    except ValueError:
        return None
    return [name for bit, name in REASONS.items() if bits & bit]


def check_free(config: Config) -> None:
    """Raises UnusableEnvironment where somebody else computes on a device that is to be measured."""
    if config.hardware.device == "cpu":
        return
    for number, device in enumerate((devices() or [])[:config.hardware.processes]):
        if device["processes"]:
            users = ", ".join(f"process {other['pid']} ({other['name']}, {other['memory_mib']:g} MiB)"
                              if other["memory_mib"] is not None else f"process {other['pid']} ({other['name']})"
                              for other in device["processes"])
            raise UnusableEnvironment(f"GPU {number} ({device['name']}) is in use by {users}: what is measured beside "
                                      f"others means nothing. Wait, or choose another with CUDA_VISIBLE_DEVICES.")
        if (device["memory_used_mib"] or 0) > TAKEN_MIB:
            raise UnusableEnvironment(f"GPU {number} ({device['name']}) has {device['memory_used_mib']:g} MiB in use "
                                      f"by a process that is not seen from here. Wait for it, or choose another with "
                                      f"CUDA_VISIBLE_DEVICES.")


def _ask(about: str, fields: list[str]) -> list[list[str]] | None:
    """The cells that nvidia-smi answers with, of the visible GPUs; None where it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return None
    chosen = ["-i", visible] if visible else []
    try:
        said = subprocess.run(
            [program, f"--query-{about}={','.join(fields)}", "--format=csv,noheader,nounits", *chosen],
            capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [[cell.strip() for cell in line.split(",", maxsplit=len(fields) - 1)]        # the last may hold commas
            for line in said.stdout.splitlines() if line]


def _value(cell: str) -> Any:
    """A number where it is one; None where the device does not say."""
    try:
        return float(cell)
    except ValueError:
        return None if cell.startswith("[") or cell == "N/A" else cell
