"""The vision transformer, and the projector to the decoder's width."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.model import Parts
from forge.model.vision import Vision

PROJECTOR_EPS = 1e-5        # of the projector's layer norm, which no config.json states


class Tower(nn.Module):
    """Pictures [P, 3, image_size, image_size] -> [P, patches, width], patches by row and column."""

    def __init__(self, vision: Vision, parts: Parts) -> None:
        super().__init__()
        self.vision = vision
        self.patch = nn.Linear(3 * vision.patch_size**2, vision.width)      # a convolution whose patches do not overlap
        self.position_embedding = nn.Embedding(vision.length, vision.width)
        if vision.class_token:
            self.class_token = nn.Parameter(torch.zeros(vision.width))
        self.blocks = nn.ModuleList(TowerBlock(vision, parts) for _ in range(vision.layers))
        if vision.final_norm:
            self.final_norm = parts.operators.norm(vision.width, "layer", vision.eps)

    def forward(self, pictures: Tensor, plan: Any, residual_dtype: torch.dtype | None) -> Tensor:
        x: Tensor = self.patch(cut(pictures, self.vision.patch_size).to(self.patch.weight.dtype))
        if self.vision.class_token:
            x = torch.cat([self.class_token.expand(len(x), 1, -1).to(x.dtype), x], dim=1)
        x = x + self.position_embedding.weight
        x = x if residual_dtype is None else x.to(residual_dtype)
        any_number(x)
        for block in self.blocks:
            x = block(x, plan)
        x = self.final_norm(x) if self.vision.final_norm else x
        return x[:, 1:] if self.vision.class_token else x


def any_number(x: Tensor) -> None:
    """Tell the compiler that the first size, of pictures, changes from batch to batch; else each would be compiled."""
    if not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(x, 0)


class TowerBlock(nn.Module):
    """Attention and feed-forward, each normalised before and added after: [P, T, width] -> the same."""

    def __init__(self, vision: Vision, parts: Parts) -> None:
        super().__init__()
        self.attention_norm = parts.operators.norm(vision.width, "layer", vision.eps)
        self.attention = TowerAttention(vision, parts)
        self.feed_forward_norm = parts.operators.norm(vision.width, "layer", vision.eps)
        self.feed_forward = parts.operators.feed_forward(vision.width, vision.hidden, vision.activation, True)
        self.scaled = vision.layer_scale is not None
        if vision.layer_scale is not None:
            self.attention_scale, self.feed_forward_scale = (
                nn.Parameter(torch.full((vision.width,), vision.layer_scale)) for _ in range(2))

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        y: Tensor = self.attention(self.attention_norm(x), plan)
        x = x + (y * self.attention_scale if self.scaled else y).to(x.dtype)
        y = self.feed_forward(self.feed_forward_norm(x))
        return x + (y * self.feed_forward_scale if self.scaled else y).to(x.dtype)


class TowerAttention(nn.Module):
    """Of all patches to all. qkv.weight holds the rows of all queries, then all keys, then all values."""

    def __init__(self, vision: Vision, parts: Parts) -> None:
        super().__init__()
        self.heads, self.attend = vision.heads, parts.attention
        self.qkv = nn.Linear(vision.width, 3 * vision.width, bias=vision.biases)
        self.out = nn.Linear(vision.width, vision.width)

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        q, k, v = (tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2) for tensor in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.attend(q, k, v, plan, 0.0).transpose(1, 2).flatten(2))     # type: ignore[no-any-return]


class Projector(nn.Module):
    """[P, patches, vision.width] -> [P, tokens_per_picture, width]. See Vision.order."""

    def __init__(self, vision: Vision, width: int, parts: Parts) -> None:
        super().__init__()
        self.vision = vision
        joined = vision.width * vision.shuffle**2
        if vision.order in ("internvl", "eagle"):
            self.norm = parts.operators.norm(joined, "layer", PROJECTOR_EPS)
        if vision.order == "idefics":
            self.linear = nn.Linear(joined, width, bias=False)
        else:
            self.up, self.down = nn.Linear(joined, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = shuffle(x, self.vision.shuffle, channels_first=self.vision.order == "eagle")
        if self.vision.order == "idefics":
            return self.linear(x)       # type: ignore[no-any-return]
        if self.vision.order != "llava":
            x = self.norm(x)
        return self.down(F.gelu(self.up(x)))    # type: ignore[no-any-return]


def cut(pictures: Tensor, patch_size: int) -> Tensor:
    """[P, C, H, W] -> [P, patches, C * patch_size ** 2]: by channel, row and column, as a convolution's weight has
    them. Pixels to the right and below that fill no patch are left out, as a convolution leaves them."""
    height, width = (size - size % patch_size for size in pictures.shape[2:])
    rows: Tensor = pictures[:, :, :height, :width].unflatten(2, (-1, patch_size))
    tiles: Tensor = rows.unflatten(4, (-1, patch_size))                                 # [P, C, rows, r, columns, c]
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def shuffle(x: Tensor, by: int, channels_first: bool) -> Tensor:
    """[P, side * side, C] -> [P, (side / by) ** 2, by * by * C]: by * by neighbours become one token.

    The numbers of a token: by row, column and channel (Idefics3, InternVL), or by channel, row and column
    (F.pixel_unshuffle, Eagle). They are the same numbers, and weights trained for the one are wrong for the other.
    """
    side = int(x.shape[1] ** 0.5)
    tiles: Tensor = x.unflatten(1, (side // by, by, side // by, by))                    # [P, rows, r, columns, c, C]
    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
    return tiles.permute(order).flatten(3).flatten(1, 2)
