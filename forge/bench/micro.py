"""What this machine can do: the figures beside which those of a run are to be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from forge.config import conf_dir
from forge.errors import ForgeError

if TYPE_CHECKING:
    from forge.bench.resident import Arm
    from forge.bench.session import Session
    from forge.bench.trial import Trial

Family = Literal["matmul", "copy", "transfer", "attention", "launch", "loader", "tar", "decoding", "all_reduce"]


@dataclass(frozen=True)
class Micro:
    """families: what is measured. seconds: that one figure may take, about. patience: seconds for a family.

    shapes: products of this model, those with the most operations. square_sizes: of large square products.
    copy_mb: of copies, in 10^6 bytes. dropouts: of attention. all_reduce_bytes: sizes. updates: that the loader reads.
    shard_mb: in a shard that is read, in 10^6 bytes.
    """

    families: list[Family]
    seconds: float
    patience: float
    shapes: int
    square_sizes: list[int]
    copy_mb: list[int]
    dropouts: list[float]
    all_reduce_bytes: list[int]
    updates: int
    shard_mb: int

    def problems(self) -> Iterator[str]:
        for name in ("shapes", "updates", "shard_mb"):
            if getattr(self, name) < 1:
                yield f"bench.{name}={getattr(self, name)}: at least 1 is wanted."
        for name in ("seconds", "patience"):
            if not getattr(self, name) > 0:
                yield f"bench.{name}={getattr(self, name)}: more than 0 is wanted."
        for name in ("square_sizes", "copy_mb", "all_reduce_bytes"):
            if any(value < 1 for value in getattr(self, name)):
                yield f"bench.{name}={getattr(self, name)}: sizes of at least 1 are wanted."
        if not all(0 <= value < 1 for value in self.dropouts):
            yield f"bench.dropouts={self.dropouts}: probabilities, below 1, are wanted."
        if not self.families:
            yield f"bench.families=[]: name one at least of {', '.join(get_args(Family))}."

    def __call__(self, session: Session) -> None:
        from forge.bench.resident import ArmFailed
        from forge.bench.session import BASELINE, BaselineFailed
        from forge.bench.trial import QUIET

        plain = {**QUIET, "compile": "compile=none"}            # compiled code hides its products
        trial = session.composer.trial(BASELINE, quiet=plain)
        options = self._attention(session, plain) if "attention" in self.families else {}
        session.progress.measure(len(self.families))
        arm: Arm | None = None
        for family in self.families:
            if arm is None:
                try:
                    arm = session.start(trial, self.patience, cold=False)
                except ArmFailed as failure:
                    raise BaselineFailed(failure, BASELINE) from None
            try:
                with session.record.watched():
                    rows = self._rows(session, arm, family, options)
            except ArmFailed as failure:        # a family that takes its process along is a row, not the end
                rows = [{"name": family, "shown": {}, "reason": str(failure)}]
                arm.end()
                arm = None
            session.record.look()
            session.record.rows += [{"family": family, "status": "measured" if "reason" not in row else "not measured",
                                     **row} for row in rows]
            session.record.write()
            session.progress.done()

    def _rows(self, session: Session, arm: Arm, family: str, options: dict[str, Trial]) -> list[dict[str, Any]]:
        session.progress.tell(family, "measuring")
        settings = {name: value for name, value in vars(self).items() if name not in ("families", "patience")}
        usable = {name: str(trial.folder) for name, trial in options.items() if trial.problem is None}
        rows: list[dict[str, Any]] = arm.ask("probe", family=family, settings={**settings, "options": usable})["rows"]
        if family == "attention":
            rows += [{"name": name, "shown": {}, "reason": trial.problem} for name, trial in options.items()
                     if trial.problem is not None]
        return rows

    def _attention(self, session: Session, quiet: dict[str, str]) -> dict[str, Trial]:
        """A frozen configuration for each option there is, here and beside."""
        from forge.command_line import config_dirs

        found: dict[str, Trial] = {}
        folders = [conf_dir(), *config_dirs(session.composer.words)]
        for name in sorted({path.stem for folder in folders for path in Path(folder, "attention").glob("*.yaml")}):
            try:
                found[name] = session.composer.trial(f"attention={name}", f"attention={name}", quiet=quiet)
            except ForgeError:      # an option of the user's that is not allowed here is no part of this question
                continue
            found[name].freeze()
        return found
