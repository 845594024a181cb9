"""model: a decoder that reads pictures between its tokens (nanoVLM, SmolVLM, LLaVA, InternVL, Eagle by settings)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.model.decoder import Decoder
from forge.model.vision import Vision
from forge.notes import say

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config
    from forge.model import Parts


@dataclass(frozen=True)
class VLM(Decoder):
    """A decoder, of which the embeddings of `picture_token` are replaced by what the tower sees, in order.

    vision: the tower and the projector. picture_token: the id that holds a picture's places; each picture has
    vision.tokens_per_picture of them.
    """

    vision: Vision
    picture_token: int

    def _drawn(self, parts: Parts) -> nn.Module:
        from forge.model.network import initialised
        from forge.model.vlm_network import VLMNetwork

        vision = self.vision
        if unseen := vision.image_size % vision.patch_size:
            say(f"model.vision.image_size={vision.image_size}: the last {unseen} rows and columns of pixels fill no "
                f"patch of {vision.patch_size} and are not seen.")
        return initialised(self, parts, VLMNetwork)

    def problems(self, config: Config) -> Iterator[str]:
        yield from super().problems(config)
        yield from self.vision.problems()
        if not 0 <= self.picture_token < self.vocab_size:
            yield (f"model.picture_token={self.picture_token} is no token of model.vocab_size={self.vocab_size}: raise "
                   f"vocab_size, or name the id that stands for pictures.")
