"""Pictures a second of each way to augment them: on this device, and in a process that reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from forge.bench.session import Session

Contender = Literal["fused", "kornia", "modules", "cpu"]        # see forge.bench.probes.augment


@dataclass(frozen=True)
class Augmenting:
    """contenders: ways to augment. changes: settings of augment=gpu, for all of them.

    num_pictures, side: of a batch, and their sides. size: what they are brought to. blocks, spare: as of other benches,
    with every contender in each block. calls, seconds: of a turn, at least and about. patience: seconds for all.
    """

    contenders: list[Contender]
    changes: list[str]
    num_pictures: int
    side: int
    size: int
    blocks: int
    spare: int
    calls: int
    seconds: float
    patience: float

    def problems(self) -> Iterator[str]:
        for name, least in (("num_pictures", 1), ("side", 1), ("size", 1), ("blocks", 2), ("spare", 0), ("calls", 1)):
            if getattr(self, name) < least:
                yield f"bench.{name}={getattr(self, name)}: at least {least} is wanted."
        for name in ("seconds", "patience"):
            if not getattr(self, name) > 0:
                yield f"bench.{name}={getattr(self, name)}: more than 0 is wanted."
        if not self.contenders:
            yield "bench.contenders=[] leaves nothing to measure."
        for word in self.changes:
            if not word.startswith("augment."):
                yield f"bench.changes: {word} is no setting of augment=gpu: augment.flip.p=0, for example, is one."

    def __call__(self, session: Session) -> None:
        from forge.bench.resident import ArmFailed
        from forge.bench.session import BASELINE, BaselineFailed
        from forge.composition import own_settings

        fixed = ["augment=gpu", f"augment.size={self.size}", "augment.mean=[0.5,0.5,0.5]", "augment.std=[0.5,0.5,0.5]"]
        recipe = own_settings("train", "augment", [*fixed, *self.changes], [])
        session.progress.measure(1)
        try:
            arm = session.start(session.composer.trial(BASELINE), self.patience, cold=False)
            session.progress.tell("augment", "measuring")
            settings = {**vars(self), "recipe": recipe}
            with session.record.watched():
                rows: list[dict[str, Any]] = arm.ask("probe", family="augment", settings=settings)["rows"]
        except ArmFailed as failure:
            raise BaselineFailed(failure, BASELINE) from None
        session.record.look()
        family = f"{self.num_pictures} of {self.side} to {self.size}"
        session.record.rows += [{"family": family, **row} for row in rows]
        session.record.write()
        session.progress.done()
