"""Rotary positions: the settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Longer contexts from shorter training (Llama 3.1): slow rotations are slowed by `factor`, fast ones kept.

    Wavelengths above original_max_length / low_freq_factor tokens are slow, those below
    original_max_length / high_freq_factor fast, and those between blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int


@dataclass(frozen=True)
class YaRN:
    """Longer contexts from shorter training (Peng et al. 2023, arXiv 2309.00071): slow rotations are slowed by
    `factor`, fast ones kept.

    Pairs of numbers that turn more than beta_fast times in original_max_length tokens are fast, those that turn less
    than beta_slow times slow, and those between are blended by their place; truncate: between whole places.
    amplitude: what queries and keys are multiplied by where they are rotated. mscale_all_dim: all scores of latent
    attention are multiplied by `of_scores` (DeepSeek-V3); 0: by 1.
    """

    factor: float
    original_max_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    amplitude: float
    mscale_all_dim: float

    @property
    def of_scores(self) -> float:
        return louder(self.factor, self.mscale_all_dim) ** 2

    def problems(self, latent: bool) -> Iterator[str]:
        at = "model.rotary.scaling"
        if self.factor < 1:
            yield f"{at}.factor={self.factor:g}: contexts become longer by 1 or more."
        if self.original_max_length < 1:
            yield f"{at}.original_max_length={self.original_max_length}: a context has 1 token or more."
        if not 0 < self.beta_slow < self.beta_fast:
            yield (f"{at}.beta_slow={self.beta_slow:g} is not between 0 and beta_fast={self.beta_fast:g}: 1 and 32 are "
                   "usual.")
        if self.amplitude <= 0:
            yield f"{at}.amplitude={self.amplitude:g}: more than 0 is wanted; 0.1 * log(factor) + 1 is usual."
        if self.mscale_all_dim and not latent:
            yield f"{at}.mscale_all_dim={self.mscale_all_dim:g} is of model.latent, which is null: set it to 0."


def louder(factor: float, by: float) -> float:
    """What YaRN multiplies by, so that softmax is as sharp over a longer context."""
    return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021).

    base: the slowest rotation takes about 2 pi * base tokens. interleaved: neighbours in a head are rotated against
    each other (DeepSeek); false: its first half against its second (Llama, in Hugging Face's layout).
    """

    base: float
    interleaved: bool
    scaling: Llama3Scaling | YaRN | None
