"""The loss on text that was held out, beside a model that only counts, and a sample to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.evaluation.judging import Judging, problems_of
from forge.notes import say
from forge.observe.sampling import SAMPLING, continue_text

if TYPE_CHECKING:
    from forge.config import Config
    from forge.run import Run


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
        yield from problems_of(self.every, self.batches)
        if self.sample < 0:
            yield f"evaluation.sample={self.sample}: 0 or more is wanted."

    def build(self, run: Run) -> HeldoutObserver:
        return HeldoutObserver(self, run)


class HeldoutObserver(Judging):
    def __init__(self, settings: Heldout, run: Run) -> None:
        super().__init__(run, settings.every)
        self.settings = settings

    def figures(self) -> dict[str, float]:
        loss, _ = self.judge.mean_loss(self.run.model, self.settings.batches)
        return {"loss_heldout": loss}

    def closing(self) -> dict[str, Any]:
        """The trigram model's loss is the first rank's to count."""
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
