"""What a layer of mixed experts costs, by each router and as others compute it, beside a dense layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge.config import conf_dir
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.bench.session import Session
    from forge.bench.trial import Composer, Trial

# What is measured beside the options of moe_router: see forge.bench.probes.contenders.
WAYS = ("dense", "grouped_only", "grouped_kernels", "sorted_compiled", "torchtitan_way", "hf_way", "sonic_way")
MEASURED = ("gate", "aux_loss", "z_loss", "square_size", "copy_mb", "loop_rows", "skew", "tolerance", "blocks", "spare",
            "calls", "seconds")         # what the process of a shape is told
SHAPE = ("tokens", "width", "hidden", "experts", "top_k")


@dataclass(frozen=True)
class Experts:
    """shapes: [tokens, width, hidden, experts, top_k] of each layer. contenders: options of moe_router and WAYS.

    gate: number format of the gate's weights. aux_loss, z_loss: weights of the losses of the column `losses`.
    square_size, copy_mb: of the product and the copy whose rates make the floor.
    loop_rows: tokens times top_k beyond which moe_router=loop is left out. skew: see conf/bench/experts.yaml.
    tolerance: of the distance to the plain algorithm in float32, in roundings of the number format.
    blocks, spare: as of other benches, with every contender in each block. calls, seconds: of a turn, at least and
    about. patience: seconds for a shape. cold: each shape compiles with empty caches.
    """

    shapes: list[list[int]]
    contenders: list[str]
    gate: Literal["float32", "bfloat16"]
    aux_loss: float
    z_loss: float
    square_size: int
    copy_mb: int
    loop_rows: int
    skew: float | None
    tolerance: float
    blocks: int
    spare: int
    calls: int
    seconds: float
    patience: float
    cold: bool

    def problems(self) -> Iterator[str]:
        for shape in self.shapes:
            yield from _shape_problems(shape)
        for name, least in (("blocks", 2), ("spare", 0), ("calls", 1), ("loop_rows", 0), ("square_size", 1),
                            ("copy_mb", 1), ("aux_loss", 0), ("z_loss", 0)):
            if getattr(self, name) < least:
                yield f"bench.{name}={getattr(self, name)}: at least {least} is wanted."
        for name in ("seconds", "patience", "tolerance"):
            if not getattr(self, name) > 0:
                yield f"bench.{name}={getattr(self, name)}: more than 0 is wanted."
        if self.skew is not None and not self.skew > 1:
            yield f"bench.skew={self.skew}: more than 1 is wanted, or null for balanced loads only."
        for name in ("shapes", "contenders"):
            if not getattr(self, name):
                yield f"bench.{name}=[] leaves nothing to measure."

    def trials(self, composer: Composer) -> Iterator[Trial]:
        """Raises ConfigError for a contender that is none, and a baseline without experts."""
        from forge.bench.session import BASELINE

        baseline = composer.trial(BASELINE).config
        if getattr(baseline.model, "routing", None) is None:
            raise ConfigError(f"bench=experts takes scores and weights from model.routing, and "
                              f"model={baseline.choices.get('model', '')} has no experts: leave model= out.")
        known = {path.stem for folder in _folders(composer) for path in Path(folder, "moe_router").glob("*.yaml")}
        for name in self.contenders:
            if name not in known and name not in WAYS:
                raise ConfigError(f"bench.contenders: {name} is neither an option of moe_router "
                                  f"({', '.join(sorted(known))}) nor one of {', '.join(WAYS)}.")
        return iter([composer.trial(f"moe_router={name}", f"moe_router={name}") for name in self.contenders
                     if name in known])

    def __call__(self, session: Session) -> None:
        from forge.bench.resident import ArmFailed
        from forge.bench.session import BASELINE

        options = {trial.name.removeprefix("moe_router="): trial for trial in self.trials(session.composer)}
        for trial in options.values():
            if trial.problem is None:
                trial.freeze()
        session.progress.measure(len(self.shapes), stage="shape")
        for shape in self.shapes:
            family = _named(shape)
            try:
                rows = self._rows(session, session.composer.trial(f"{BASELINE} {family}"), shape, options)
            except ArmFailed as failure:        # a shape that takes its process along is a row, not the end
                rows = [{"name": "all", "shown": {}, "status": failure.status, "reason": str(failure)}]
            session.record.rows += [{"family": family, "shape": dict(zip(SHAPE, shape, strict=True)), **row}
                                    for row in rows]
            session.record.look()
            session.record.write()
            session.progress.done()

    def _rows(self, session: Session, trial: Trial, shape: list[int],
              options: dict[str, Trial]) -> list[dict[str, Any]]:
        """In a process of its own: what one shape compiles, or leaves in memory, is not the next one's. Raises
        ArmFailed."""
        arm = session.start(trial, self.patience, self.cold)
        try:
            session.progress.tell(_named(shape), "measuring")
            settings = {name: getattr(self, name) for name in MEASURED}
            usable = {name: str(option.folder) for name, option in options.items() if option.problem is None}
            asked = [name for name in self.contenders if name in usable or name not in options]
            with session.record.watched():
                rows: list[dict[str, Any]] = arm.ask("probe", family="experts", settings={
                    **settings, "shape": dict(zip(SHAPE, shape, strict=True)), "contenders": asked,
                    "options": usable})["rows"]
        finally:
            arm.end()
        return rows + [{"name": name, "shown": {}, "status": "failed", "reason": option.problem}
                       for name, option in options.items() if option.problem is not None]


def _folders(composer: Composer) -> list[str]:
    from forge.command_line import config_dirs

    return [conf_dir(), *config_dirs(composer.words)]


def _named(shape: list[int]) -> str:
    """Tokens x width x hidden, experts and choices."""
    tokens, width, hidden, experts, top_k = shape
    return f"{tokens} x {width} x {hidden}, {top_k} of {experts}"


def _shape_problems(shape: list[int]) -> Iterator[str]:
    if len(shape) != len(SHAPE) or any(size < 1 for size in shape):
        yield f"bench.shapes: {shape} is no layer: [{', '.join(SHAPE)}], of at least 1 each, is wanted."
    elif shape[-1] > shape[-2]:
        yield f"bench.shapes: {shape}: a token cannot choose {shape[-1]} of {shape[-2]} experts."
