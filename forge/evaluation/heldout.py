"""The loss on text that was held out, beside a model that only counts, and a sample to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.notes import say
from forge.observe import Request
from forge.observe.sampling import SAMPLING, continue_text

if TYPE_CHECKING:
    from forge.config import Config
    from forge.run import Run
    from forge.trainer import Step


@dataclass(frozen=True)
class Heldout:
    """every: updates between evaluations; 0: only at the end. batches: micro-batches of each rank, at most; the same
    ones each time. baseline: at the end, count byte trigrams for comparison (data of bytes only, and not of
    conversations). sample: at the end, write so many tokens after `prompt`; 0: none."""

    every: int
    batches: int
    baseline: bool
    sample: int
    prompt: str

    def problems(self, config: Config) -> Iterator[str]:
        if self.batches < 1:
            yield f"evaluation.batches={self.batches}: at least 1 is wanted, or evaluation=none."
        for name in ("every", "sample"):
            if getattr(self, name) < 0:
                yield f"evaluation.{name}={getattr(self, name)}: 0 or more is wanted."

    def build(self, run: Run) -> HeldoutObserver:
        return HeldoutObserver(self, run)


class HeldoutObserver:
    def __init__(self, settings: Heldout, run: Run) -> None:
        from forge.observe.evaluate import Judge

        self.settings, self.run = settings, run
        self.judge = Judge.of(run.config, run.topology, "heldout")
        self.facts: dict[str, Any] = {"loss_heldout": None}

    def __call__(self, step: Step) -> Request | None:
        finished = step.last and Request.STOP not in step.agreed
        due = self.settings.every > 0 and step.number % self.settings.every == 0
        if finished or due:
            with self.run.phases.pause():
                loss, _ = self.judge.mean_loss(self.run.model, self.settings.batches)
                self.run.ledger.note(step.number, loss_heldout=loss)
                if finished:
                    self.facts = {"loss_heldout": loss} | self._closing()
        return None

    def _closing(self) -> dict[str, Any]:
        """What is shown once, at the end of the run, by the first rank. All ranks call it."""
        config = self.run.config
        facts: dict[str, Any] = {}
        all_bytes = config.data.tokenizer == "bytes" and not getattr(self.judge.source, "whole", False)
        if self.settings.baseline and all_bytes and self.run.topology.is_first:
            from forge.data.trigram import heldout_loss as trigram_loss

            facts["loss_trigram"] = trigram_loss(config.data.open("train"), self.judge.source)
        if self.settings.sample and config.data.tokenizer is None:
            say("evaluation.sample, evaluation.prompt: data.tokenizer=null, so no text is written.")
        elif self.settings.sample:
            facts["sample"] = continue_text(self.run.model, config, self.run.topology.device, self.settings.prompt,
                                            self.settings.sample, seed=config.seed, **SAMPLING)
        return facts

    def result(self) -> dict[str, Any]:
        return self.facts
