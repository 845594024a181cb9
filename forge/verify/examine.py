"""verify=gradients, step by step: the reference, both passes of both sides, the optimizers, and the first culprit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from forge.config import Config, check
from forge.errors import ConfigError
from forge.precision.fp32 import FP32
from forge.verify import DIFFERS, Verdict
from forge.verify.called import never_called, watchable
from forge.verify.changes import kind_of
from forge.verify.conclude import UPDATES, Findings, conclude
from forge.verify.distances import Files, compared, noise
from forge.verify.job import Job, found
from forge.verify.modules import first_module
from forge.verify.pair import Pair, shares
from forge.verify.rule import Compared, Rule
from forge.verify.run_side import do
from forge.verify.update import compare_stored, compare_updates

if TYPE_CHECKING:
    from forge.verify.gradients import Gradients
    from forge.verify.record import Record


@dataclass
class Examination:
    verify: Gradients
    pair: Pair
    record: Record

    def __post_init__(self) -> None:
        shared = shares(self.pair.baseline.config, self.pair.candidate.config, self.verify.rows,
                        self.verify.most_micro_batches)
        self.share = dict(zip(("baseline", "candidate"), shared, strict=True))
        self.weights = self.record.run_dir / "scratch" / "weights.safetensors"
        self.no_float32 = {side.name: refusal(side.config, FP32()) for side in self.pair.sides}
        one, other = (side.config for side in self.pair.sides)
        self.reformatted = one.precision != other.precision
        self.alike_refused = refusal(one, other.precision)
        self.watch = watchable(change.group for change in self.pair.changes
                               if change.group not in other.model.unused())
        self.plain = {"compile": "none"} | {
            group: twins[option] for group, twins in self.verify.plain.items()
            if (option := str(self.pair.baseline.config.choices.get(group))) in twins}

    def __call__(self) -> Verdict:
        self._say_what_cannot_be()
        self._say_how_much_is_read()
        names = self._names()
        baseline = do(self.pair.baseline, [
            self._job("baseline", "reference", precision="float64", plain=self.plain), *self._passes("baseline", names),
            self._job("baseline", "again"), *self._alike()], self.pair.allowed)
        candidate = do(self.pair.candidate, self._watched(self._passes("candidate", names)), self.pair.allowed)
        foreign: list[str] = found(candidate, names[0]).get("foreign", [])
        if foreign:
            return self._conclude({}, foreign)
        passes = {name: self._compare(name, baseline, candidate) for name in names}
        passes.setdefault("deployed", replace(passes[names[0]], name="deployed"))
        if self.reformatted:
            passes["precision"] = replace(passes["deployed"], name="precision")
            if self.alike_refused is None:
                passes["deployed"] = self._compare("alike", baseline, candidate)
            else:
                del passes["deployed"]
        for name, one in passes.items():
            self.record.note(name, one)
        if self._optimizer_changed():
            passes["update"] = compare_updates(self.verify, self.pair, self._job, baseline / names[0], self.watch)
            self.record.note("update", passes["update"])
        if self._stored_otherwise():
            passes["stored"] = compare_stored(self.verify, self.pair, self._job, baseline / names[0])
            self.record.note("stored", passes["stored"])
        self._say_what_was_not_called(candidate)
        return self._conclude(passes, [])

    def _names(self) -> list[str]:
        """The passes to run. Where both train in float32 anyway, one is both."""
        if not self._has_maths():
            return ["deployed"]
        alike = all(isinstance(side.config.precision, FP32) for side in self.pair.sides)
        return ["maths"] if alike else ["maths", "deployed"]

    def _has_maths(self) -> bool:
        return not any(self.no_float32.values())

    def _passes(self, side: str, names: list[str]) -> list[Job]:
        return [self._job(side, name, precision="float32" if name == "maths" else "own") for name in names]

    def _alike(self) -> list[Job]:
        """The baseline in the candidate's number format, where that is another: what else differs shows apart."""
        if not self.reformatted or self.alike_refused is not None:
            return []
        given = OmegaConf.to_container(self.pair.candidate.settings, resolve=True)["precision"]  # type: ignore
        return [self._job("baseline", "alike", precision="given", given=given, allowed=self.pair.allowed)]

    def _job(self, side: str, name: str, **more: Any) -> Job:
        share = self.share[side]
        common: dict[str, Any] = {
            "name": name, "what": "gradients", "rows": share.rows, "micro_batch": share.micro_batch,
            "updates": self.verify.updates, "weights": str(self.weights)}
        return Job(**common | more)

    def _compare(self, name: str, baseline: Path, candidate: Path) -> Compared:
        """name: of the baseline's job; the candidate has no other number format than its own to be alike in."""
        reference, own = Files(baseline, "reference"), Files(baseline, name)
        theirs = "deployed" if name == "alike" else name
        rule = Rule.of(own.figures["compute"], own.figures["updates"][0]["targets"],
                       (self.verify.multiplier, self.verify.multiplier_half), self.verify.few)
        made = compared(theirs, reference, own, Files(candidate, theirs), rule)
        if name == self._names()[-1]:         # what the repetition repeats
            made = replace(made, noise=noise(reference, own, Files(baseline, "again"), self.verify.updates))
        return made

    def _optimizer_changed(self) -> bool:
        one, other = (side.config for side in self.pair.sides)
        return (one.optimizer, one.schedule, one.steps) != (other.optimizer, other.schedule, other.steps)

    def _stored_otherwise(self) -> bool:
        one, other = (side.config.precision for side in self.pair.sides)
        return (one.parameter, one.master) != (other.parameter, other.master)

    def _say_what_was_not_called(self, candidate: Path) -> None:
        figures = [found(candidate, folder.parent.name) for folder in sorted(candidate.glob("*/figures.json"))]
        self.record.notes.extend(never_called(one["calls"] for one in figures if "calls" in one))

    def _watched(self, passes: list[Job]) -> list[Job]:
        """The candidate's passes, of which the last notes what it calls. What is compiled calls nothing by itself."""
        if not self.watch or str(self.pair.candidate.config.choices.get("compile")) == "none":
            return [*passes[:-1], replace(passes[-1], watch=self.watch)]
        return [*passes, self._job("candidate", "called", updates=1, plain={"compile": "none"}, watch=self.watch)]

    def _say_how_much_is_read(self) -> None:
        for side in self.pair.sides:
            config, share = side.config, self.share[side.name]
            own, length = config.rows_per_pass(config.hardware.processes), config.sequence_length
            note = (f"A pass of the {side.name} has {share.micro_batch} rows ({share.micro_batch * length} tokens), "
                    f"and the run's own {own} ({own * length}).")
            if own > share.micro_batch:
                note += (" A limit between the two, such as loss.chunk_tokens, may never be crossed here: raise "
                         "verify.rows.")
            self.record.notes.append(note)

    def _say_what_cannot_be(self) -> None:
        for side, why in self.no_float32.items():
            if why:
                self.record.notes.append(f"No maths pass, since the {side} has no float32 path: {why}")
        swapped = [f"{group}={name}" for group, name in self.plain.items() if group != "compile"]
        if swapped:
            self.record.notes.append(f"The float64 reference takes {' '.join(swapped)}.")

    def _conclude(self, passes: dict[str, Compared], foreign: list[str]) -> Verdict:
        kinds = [(change, kind_of(change, self.verify.declared, self.pair.declared)) for change in self.pair.changes]
        inseparable = None
        if passes and not {"maths", "deployed"} & passes.keys():
            inseparable = (f"The number formats differ, and the baseline cannot take the candidate's "
                           f"({self.alike_refused}): compare in one format, and the formats apart.")
        verdict = conclude(Findings(passes, foreign, kinds, self.verify.largest_baseline_error, inseparable,
                                    len(self.verify.factors)))
        if verdict.verdict == DIFFERS and any(not one.fine for name, one in passes.items() if name not in UPDATES):
            precision = "float32" if self._has_maths() else "own"
            module = self.record.first_module = first_module(self.verify, self.pair, self._job, self.plain, precision)
            if module:
                more = f"The first module that gives something else is {module}."
                verdict = replace(verdict, reason=f"{verdict.reason} {more}")
        return verdict


def refusal(config: Config, precision: Any) -> str | None:
    """Why these options cannot compute in this number format, in their own words; None where they can."""
    try:
        check(replace(config, precision=precision))
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None
