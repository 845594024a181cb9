"""What a vision-language model sees with: a vision transformer, and a projector to the width of its decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Order = Literal["idefics", "internvl", "eagle", "llava"]
VisionFamily = Literal["idefics3", "smolvlm", "llava", "internvl"]


@dataclass(frozen=True)
class Vision:
    """A tower of blocks, x + attention(norm(x)) and then x + feed_forward(norm(x)), over the patches of a picture, each
    of which looks at all others (Dosovitskiy et al. 2020; SigLIP, Zhai et al. 2023); and the projector behind it.

    image_size: sides of a picture, in pixels. patch_size: sides of a patch; what fills no patch, to the right and
    below, is not seen. width: of the tower's hidden stream.
    hidden: of its feed-forward. eps: of its layer norms. biases: of queries, keys and values; all else has them.
    class_token: one more token before the patches, which the projector does not see. layer_scale: both branches are
        multiplied by learned numbers that begin with this one (Touvron et al. 2021); null: by none.
    final_norm: a layer norm behind the last block.
    mean, std: of red, green and blue, in pictures of 0 to 1: what the tower sees is (picture - mean) / std.
    shuffle: so many by so many neighbours become one token. order: idefics: their numbers by row, column, channel, and
        one product; internvl: in the same order, normalised, and two products with a GELU between them; eagle: by
        channel, row, column, and then as internvl; llava: no neighbours, two products.
    family: whose Hugging Face layout is read and written, with the decoder's family in it; null: none has this shape.
    """

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    hidden: int
    eps: float
    activation: Literal["gelu", "gelu_tanh"]
    biases: bool
    class_token: bool
    layer_scale: float | None
    final_norm: bool
    mean: list[float]
    std: list[float]
    shuffle: int
    order: Order
    family: VisionFamily | None

    @property
    def patches_per_side(self) -> int:
        return self.image_size // max(1, self.patch_size)       # other parts ask before `problems` is heard

    @property
    def length(self) -> int:
        """Tokens in the tower."""
        return self.patches_per_side**2 + self.class_token

    @property
    def tokens_per_picture(self) -> int:
        """Tokens in the decoder."""
        return (self.patches_per_side // max(1, self.shuffle)) ** 2

    def problems(self) -> Iterator[str]:
        for name in ("image_size", "patch_size", "width", "layers", "heads", "hidden", "shuffle"):
            if not 1 <= getattr(self, name) < 2**31:
                yield f"model.vision.{name}={getattr(self, name)}: at least 1, and less than 2^31, is wanted."
                return
        yield from self._multiples()
        if not self.eps > 0:
            yield f"model.vision.eps={self.eps}: more than 0 is wanted."
        for name, least in (("mean", 0.0), ("std", 2.0**-20)):
            values = getattr(self, name)
            if len(values) != 3 or not all(least <= value <= 1 for value in values):
                yield f"model.vision.{name}={values}: three numbers, from {least:.2g} to 1, are wanted."

    def _multiples(self) -> Iterator[str]:
        if self.image_size < self.patch_size:
            yield (f"model.vision.patch_size={self.patch_size} is more than model.vision.image_size={self.image_size}: "
                   f"a picture has at least one patch.")
        elif self.patches_per_side % self.shuffle:
            yield (f"model.vision.shuffle={self.shuffle} does not divide the {self.patches_per_side} patches of a side "
                   f"(model.vision.image_size over patch_size): set a number that does.")
        if self.width % self.heads:
            yield f"model.vision.width={self.width} is no multiple of model.vision.heads={self.heads}: make it one."
        if self.order == "llava" and self.shuffle != 1:
            yield (f"model.vision.shuffle={self.shuffle}: model.vision.order=llava joins no neighbours. Set "
                   f"model.vision.shuffle=1, or another order.")
