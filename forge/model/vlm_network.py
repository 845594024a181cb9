"""The vision-language model as a module: a decoder's network with a tower beside its embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.attention import Layout
from forge.batch import Batch
from forge.errors import ConfigError
from forge.model import Parts
from forge.model.decoder import Decoder
from forge.model.flops import Forward, convention, seeing
from forge.model.network import Network
from forge.model.tower import Projector, Tower, any_number
from forge.model.vlm import VLM


class VLMNetwork(Network):
    """`vision` and `projector` beside the decoder's own parameters, which have the names they have there."""

    mean: Tensor        # [3, 1, 1] float32
    std: Tensor

    def __init__(self, vlm: Decoder, parts: Parts) -> None:
        super().__init__(vlm, parts)
        assert isinstance(vlm, VLM)
        self.vlm = vlm
        self.vision = Tower(vlm.vision, parts)
        self.projector = Projector(vlm.vision, vlm.width, parts)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(vlm.vision, name)).view(3, 1, 1), persistent=False)

    def block_lists(self) -> list[nn.ModuleList]:
        return [self.vision.blocks, self.blocks]

    def branches(self, name: str) -> int:
        return 2 * self.vlm.vision.layers if name.startswith("vision.") else super().branches(name)

    def forward_flops(self) -> Forward:
        return seeing(super().forward_flops(), self.vlm.vision, self.vlm.width)

    def flops_per_token(self, sequence_length: int) -> float:
        """With one picture in a row of this length."""
        return convention(self.forward_flops(), sequence_length, pictures=1 / sequence_length)

    def _beside(self, batch: Batch) -> tuple[Any, ...]:
        """(pictures [P, 3, image_size, image_size] float, as the tower sees them; the tower's attention plan)

        A batch of text has one picture of zeros, to which no token points: so the tower's gradients are there on every
        rank of DistributedDataParallel, and are zeros.
        """
        vision, device = self.vlm.vision, batch.tensors["tokens"].device
        pictures = batch.tensors.get("pictures")
        if pictures is None or len(pictures) == 0:
            seen = torch.zeros(1, 3, vision.image_size, vision.image_size, device=device)
        elif pictures.is_floating_point():
            seen = self._checked(pictures)
        else:
            seen = self._normalised(pictures)
        any_number(seen)
        layout = Layout(causal=False, documents=None, window=None, length=vision.length, device=device)
        return seen, self.attention.plan(layout)

    def _checked(self, pictures: Tensor) -> Tensor:
        size = self.vlm.vision.image_size
        if pictures.shape[1:] != (3, size, size):
            raise ConfigError(f"The augmented pictures have the shape {list(pictures.shape[1:])}, and "
                              f"model.vision.image_size={size} wants [3, {size}, {size}]: set augment.size={size}.")
        return pictures

    def _normalised(self, pictures: Tensor) -> Tensor:
        """[P, S, S, 3] uint8 -> [P, 3, image_size, image_size] float32"""
        seen, size = pictures.permute(0, 3, 1, 2).float() / 255, self.vlm.vision.image_size
        if seen.shape[2:] != (size, size):
            seen = F.interpolate(seen, (size, size), mode="bilinear", antialias=True)
        return (seen - self.mean) / self.std

    def _embedded(self, tokens: Tensor, *beside: Any) -> Tensor:
        pictures, plan = beside
        features = self.projector(self.vision(pictures, plan, self.residual_dtype)).flatten(0, 1)
        return placed(features, self.embedding(tokens), tokens == self.vlm.picture_token)


def placed(features: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """x [B, T, width] with the rows of features [F, width] where `places` [B, T] is true, in row-major order.

    Of static shapes, so that the device is asked for nothing, and without additions into one row from several places,
    so that gradients have the same bits every time. Rows without a place have a gradient of zero.
    """
    nowhere = len(features)
    which = places.flatten().cumsum(0).sub(1).view(places.shape).clamp(0, nowhere - 1).masked_fill(~places, nowhere)
    rows = F.embedding(which, F.pad(features, (0, 0, 0, 1)), padding_idx=nowhere)
    return torch.where(places.unsqueeze(-1), rows.to(x.dtype), x)
