"""result.json of a bench: everything that was measured, written anew after each part that is done."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.bench import surroundings
from forge.errors import Exit, UnusableEnvironment
from forge.failure import DISK_FULL
from forge.observe import origin
from forge.observe.finite import finite

SCHEMA = "forge.bench/1"
LOOK_SECONDS = 5.0


@dataclass
class Record:
    """facts: what result.json says. rows: of its table; arms: what each trial was, with its raw turns."""

    run_dir: Path
    facts: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    arms: dict[str, Any] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begun(cls, run_dir: Path, mode: str, words: list[str], settings: dict[str, Any]) -> Record:
        """Raises UnusableEnvironment where nothing can be written."""
        record = cls(run_dir, {
            "schema": SCHEMA, "mode": mode, "status": "running", "exit_code": None, "abstained": False, "reason": None,
            "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "words": words, "settings": settings,
            "versions": origin.versions(), "source": origin.source(), "processor": origin.processor(),
            "device": None})
        record.look()
        record.write()
        return record

    def look(self) -> None:
        self.looks.append(surroundings.look())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look every few seconds meanwhile: an idle device has other clocks than one that works."""
        if not self.looks[0]["devices"]:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_SECONDS):
                self.look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def arm(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Note what a trial is; the hash stands for its whole configuration."""
        made = json.dumps({key: value for key, value in facts["config"].items() if key != "run_dir"}, sort_keys=True,
                          default=str)
        self.arms[name] = {**facts, "config_sha256": hashlib.sha256(made.encode()).hexdigest()}
        noted: dict[str, Any] = self.arms[name]
        return noted

    def end(self, status: str, code: Exit, reason: str | None = None) -> None:
        self.facts |= {"status": status, "exit_code": int(code), "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        if reason is not None:
            self.facts["reason"] = reason

    @property
    def result(self) -> dict[str, Any]:
        everything = {**self.facts, "rows": self.rows, "surroundings": self.looks, "throttling": self.throttling(),
                      "comparisons": self.comparisons, "arms": self.arms}
        made: dict[str, Any] = finite(everything)
        return made

    def throttling(self) -> list[str] | None:
        """What slowed a device down at any look; None where no device says."""
        told = [reasons for look in self.looks for device in look["devices"] or []
                if (reasons := device["throttling"]) is not None]
        return sorted({reason for reasons in told for reason in reasons}) if told else None

    def write(self) -> None:
        """Whole or not at all. Raises UnusableEnvironment."""
        path = self.run_dir / "result.json"
        partial = path.with_suffix(".partial")
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self.result, indent=1) + "\n")
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            mend = "free some space there, or set run_dir= to another disk" if error.errno in DISK_FULL else \
                "set run_dir= to a folder that can be written"
            raise UnusableEnvironment(f"run_dir={self.run_dir}: {path.name} cannot be written: {error.strerror}. "
                                      f"What was measured is shown here; {mend}.") from None
