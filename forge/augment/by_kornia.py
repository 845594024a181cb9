"""The plain twin of the fused path: operation after operation, kornia's where it has one.

Called as functions, since the modules draw from torch's global generator. kornia's own crop aliases where it shrinks,
so the crop is torch's resize with antialias.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from forge.augment.draws import Draws


def by_kornia(pictures: Tensor, draws: Draws, size: int) -> Tensor:
    """[P, 3, size, size] float32 in 0..1, of pictures [P, H, W, 3] uint8."""
    from kornia import enhance
    from kornia.geometry import transform

    if not len(pictures):
        return pictures.new_zeros(0, 3, size, size, dtype=torch.float32)
    x = _cropped(pictures.permute(0, 3, 1, 2).float() / 255, draws, size)
    x = torch.where(draws.flip[:, None, None, None], transform.hflip(x), x)
    x = transform.warp_affine(x, _matrix(draws, size)[:, :2], (size, size), align_corners=False)
    x = enhance.adjust_brightness_accumulative(x, draws.brightness.float())
    x = enhance.adjust_contrast_with_mean_subtraction(x, draws.contrast.float())
    x = enhance.adjust_saturation_with_gray_subtraction(x, draws.saturation.float())
    return enhance.adjust_hue(x, draws.hue.float() * (2 * torch.pi))


def _cropped(x: Tensor, draws: Draws, size: int) -> Tensor:
    """[P, 3, H, W] -> [P, 3, size, size]. torch resizes pictures of one size only: one by one where nobody has to be
    waited for to learn their sizes, which is fastest there, and else as it would, all at once."""
    return (one_by_one if x.device.type == "cpu" else at_once)(x, draws, size)


def one_by_one(x: Tensor, draws: Draws, size: int) -> Tensor:
    boxes = torch.stack([draws.left, draws.top, draws.width, draws.height], 1).int().tolist()
    return torch.cat([
        functional.interpolate(one[None, :, top:top + height, left:left + width], (size, size), mode="bilinear",
                               align_corners=False, antialias=True)
        for one, (left, top, width, height) in zip(x, boxes, strict=True)])


def at_once(x: Tensor, draws: Draws, size: int) -> Tensor:
    narrowed = _resized(x, draws.left, draws.width, size)
    return _resized(narrowed.transpose(2, 3), draws.top, draws.height, size).transpose(2, 3)


def _resized(x: Tensor, start: Tensor, extent: Tensor, size: int) -> Tensor:
    """[P, 3, A, B] -> [P, 3, A, size]: of each, the pixels from start [P] on, extent [P] of them, along the last axis.

    Each pixel of the result is a mean of those under a triangle about its place, as wide as it shrinks, or one pixel
    either way (torch's bilinear with antialias, and Pillow's). In float32 also where products are not.
    """
    length = x.shape[3]
    shrinks = (extent / size)[:, None, None]
    reach = shrinks.clamp(min=1)
    centre = (torch.arange(size, device=x.device, dtype=torch.float64)[:, None] + 0.5) * shrinks        # [P, size, 1]
    most = math.ceil(2 * max(1.0, length / size)) + 1       # pixels under a triangle, of any crop
    place = (centre - reach + 0.5).floor() + torch.arange(most, device=x.device)                        # in the crop
    weight = (1 - (place + 0.5 - centre).abs() / reach).clamp(min=0)
    weight = weight * ((place >= 0) & (place < extent[:, None, None]))
    weight = (weight / weight.sum(2, keepdim=True)).float()
    source = (place + start[:, None, None]).clamp(0, length - 1).long()
    made = x.new_zeros(*x.shape[:3], size)
    for seen, share in zip(source.unbind(2), weight.unbind(2), strict=True):        # all at once would be many pictures
        made.addcmul_(x.gather(3, seen[:, None, None].expand_as(made)), share[:, None, None])
    return made


def _matrix(draws: Draws, size: int) -> Tensor:
    """[P, 3, 3] float32, from pixels of the cropped picture to those of the result."""
    from kornia.geometry.transform import get_affine_matrix2d

    centre = torch.full((len(draws.angle), 2), (size - 1) / 2, dtype=torch.float64, device=draws.angle.device)
    scale = torch.stack([draws.scale, draws.scale], 1)
    shift = torch.stack([draws.right, draws.down], 1)
    shear = draws.shear * (torch.pi / 180)
    made: Any = get_affine_matrix2d(shift, centre, scale, draws.angle, shear, torch.zeros_like(shear))
    return made.float()     # type: ignore[no-any-return]
