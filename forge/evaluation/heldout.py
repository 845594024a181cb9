"""The loss on text that was held out, beside a model that only counts, and a sample to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.observe import Request

if TYPE_CHECKING:
    from forge.config import Config
    from forge.run import Run
    from forge.trainer import Step


@dataclass(frozen=True)
class Heldout:
    """every: updates between evaluations; 0: only at the end. batches: micro-batches of each rank, at most; the same
    ones each time. baseline: at the end, count byte trigrams for comparison (data of bytes only). sample: at the
    end, write so many tokens after `prompt`; 0: none."""

    every: int
    batches: int
    baseline: bool
    sample: int
    prompt: str

    def problems(self, config: Config) -> Iterator[str]:
        if self.batches < 1:
            yield f"evaluation.batches={self.batches}: at least 1 is wanted, or evaluation=none."

    def build(self, run: Run) -> HeldoutObserver:
        return HeldoutObserver(self, run)


class HeldoutObserver:
    def __init__(self, settings: Heldout, run: Run) -> None:
        self.settings, self.run = settings, run
        self.feed = run.open_feed("heldout", run.config.rows_per_pass(run.topology.data_size) * run.topology.data_size)
        self.facts: dict[str, Any] = {"loss_heldout": None}

    def __call__(self, step: Step) -> Request | None:
        finished = step.last and Request.STOP not in step.agreed
        due = self.settings.every > 0 and step.number % self.settings.every == 0
        if finished or due:
            with self.run.phases.pause():
                loss = self._loss()
                self.run.ledger.note(step.number, loss_heldout=loss)
                if finished:
                    self.facts = {"loss_heldout": loss} | self._closing()
        return None

    def _loss(self) -> float:
        from forge.evaluation.loss import mean_loss

        run = self.run
        loss, _ = mean_loss(run.model, run.config.precision, self.feed, self.settings.batches, run.stage, run.topology)
        return loss

    def _closing(self) -> dict[str, Any]:
        """What is shown once, at the end of the run."""
        config = self.run.config
        facts: dict[str, Any] = {}
        if not self.run.topology.is_first:
            return {}
        if self.settings.baseline and config.data.tokenizer == "bytes":
            from forge.data.trigram import heldout_loss as trigram_loss

            facts["loss_trigram"] = trigram_loss(config.data.open("train"), self.feed.source)
        if self.settings.sample:
            from forge.sample import continue_text

            facts["sample"] = continue_text(self.run.model, config, self.run.topology.device, self.settings.prompt,
                                            self.settings.sample, temperature=0.8, top_k=40, seed=config.seed)
        return facts

    def result(self) -> dict[str, Any]:
        return self.facts
