"""Which shards stay in a folder of copies, by scores of their samples."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forge.data.copier import Shard
from forge.data.storage import Location
from forge.errors import ConfigError


@dataclass(frozen=True)
class Pins:
    """Shards that stay once they are there, those with the highest scores.

    scores: a file of JSON Lines, {"shard": "000.tar", "score": 0.7}, any number of lines a shard, one a sample for
        example: they are added. A shard is named as it ends: by its name, or by as much of its path as tells it apart.
    share: of max_gb, which pinned shards may take at most.
    """

    scores: str
    share: float

    def problems(self) -> Iterator[str]:
        if not 0 < self.share < 1:
            yield f"data.staging.pins.share={self.share} is no share: set it to 0.5, for example"
        if not os.path.isfile(self.scores):
            yield f"data.staging.pins.scores={self.scores} is no file: name one with a score a line"

    def pinned(self, shards: Sequence[Shard], max_bytes: int) -> list[Shard]:
        """Those with the highest scores that fit, the highest first. Raises ConfigError."""
        scores = _scores(self.scores)
        of_shards = {shard: sum(score for name, score in scores.items() if _ends_with(shard.location, name))
                     for shard in shards}
        if not any(of_shards.values()):
            raise ConfigError(f"data.staging.pins.scores={self.scores} gives no score to any shard of data.train: "
                              "name shards as their paths end.")
        left, pinned = int(max_bytes * self.share), []
        for shard in sorted(shards, key=lambda shard: (-of_shards[shard], str(shard.location))):
            if of_shards[shard] > 0 and shard.size <= left:
                left -= shard.size
                pinned.append(shard)
        return pinned


def _scores(path: str) -> dict[str, float]:
    """The sum of the scores of each name in a file. Raises ConfigError."""
    scores: dict[str, float] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                said = json.loads(line)
                name, score = str(said["shard"]), float(said["score"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"data.staging.pins.scores={path}, line {number}: "
                                  '{"shard": "000.tar", "score": 0.7} is wanted, for example.') from None
            scores[name] = scores.get(name, 0.0) + score
    return scores


def _ends_with(location: Location, name: str) -> bool:
    return f"/{location}".endswith(f"/{name}")
