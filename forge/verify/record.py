"""What was measured and concluded, on disk from the first figure on: result.json."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.observe import origin
from forge.observe.finite import finite
from forge.verify.rule import Compared, Distance

if TYPE_CHECKING:
    from forge.verify import Verdict
    from forge.verify.pair import Pair

SCHEMA = "forge.verify/1"


@dataclass
class Record:
    """passes: "maths", "deployed", "update" or "training" -> what was found; None: not measured."""

    run_dir: Path
    pair: Pair
    option: str
    settings: dict[str, Any]
    passes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    first_module: str | None = None
    verdict: Verdict | None = None
    status: str = "running"
    error: str | None = None
    versions: dict[str, str | None] = field(default_factory=lambda: origin.versions() | _cuda())
    commit: str | None = field(default_factory=origin.commit)

    def note(self, name: str, found: Any) -> None:
        """A pass that is done is on disk, whatever becomes of the next."""
        self.passes[name] = found
        self.write()

    def conclude(self, verdict: Verdict) -> None:
        self.verdict, self.status = verdict, "finished"
        self.write()

    @property
    def path(self) -> Path:
        return self.run_dir / "result.json"

    def write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(finite(self.facts(), str), indent=1, allow_nan=False) + "\n")
        os.replace(partial, self.path)

    def facts(self) -> dict[str, Any]:
        from forge.verify.pair import plain_settings

        verdict = self.verdict
        return {
            "schema": SCHEMA, "status": self.status, "error": self.error, "option": self.option,
            "verdict": verdict.verdict if verdict else None, "reason": verdict.reason if verdict else None,
            "exit_code": int(verdict.exit_code) if verdict else None,
            "abstained": bool(verdict and verdict.verdict == "cannot judge"),
            "changes": [{"setting": change.key, "baseline": change.before, "candidate": change.after}
                        for change in self.pair.changes],
            "notes": [*self.pair.notes, *self.notes], "first_module": self.first_module,
            "passes": {name: as_plain(found) for name, found in self.passes.items()},
            "settings": self.settings,
            "configs": {side.name: plain_settings(side.settings) for side in self.pair.sides},
            "versions": self.versions, "device": _device(), "commit": self.commit}


def as_plain(found: Any) -> Any:
    """A pass as JSON knows it."""
    if not isinstance(found, Compared):
        return found
    return {"compute": dict(zip(("baseline", "candidate"), found.compute, strict=True)), "same_bits": found.bits,
            "within_rule": found.fine, "noise": found.noise,
            "error": {"baseline": found.baseline_error, "candidate": found.candidate_error},
            "ratio": found.ratio, "effect": found.effect, "worst_tensor": _distance(found.worst),
            "first_different": _distance(found.first) if found.first else None, "updates": found.values,
            "losses": [_distance(one) for one in found.losses], "norms": [_distance(one) for one in found.norms],
            "all_gradients": [_distance(one) for one in found.overall],
            "tensors": [_distance(one) for one in found.tensors]}


def _cuda() -> dict[str, str | None]:
    import torch

    return {"cuda": torch.version.cuda}


def _device() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        return {"type": "cuda", "name": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    return {"type": "cpu", "name": origin.processor(), "count": 1}


def _distance(one: Distance) -> dict[str, Any]:
    return {**asdict(one), "ratio": one.ratio, "fine": one.fine}
