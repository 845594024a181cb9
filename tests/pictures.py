"""Vision-language models for tests, and batches for them."""

from dataclasses import replace

import torch
from decoders import LLAMA

from forge.batch import IGNORED, Batch
from forge.model.vision import Vision
from forge.model.vlm import VLM

PICTURE = 60            # of a vocabulary of 61
VISION = Vision(image_size=8, patch_size=2, width=24, layers=2, heads=3, hidden=40, eps=1e-6, activation="gelu_tanh",
                biases=True, class_token=False, layer_scale=None, final_norm=True, mean=[0.5, 0.4, 0.3],
                std=[0.5, 0.25, 0.2], shuffle=2, order="idefics", family="idefics3")
ORDERS = {"idefics": VISION, "eagle": replace(VISION, order="eagle", family=None),
          "llava": replace(VISION, order="llava", shuffle=1, final_norm=False, family="llava"),
          "internvl": replace(VISION, order="internvl", class_token=True, layer_scale=0.1, final_norm=False,
                              biases=False, activation="gelu", family="internvl")}


def small(order="idefics", **changes) -> VLM:
    return VLM(**{**vars(LLAMA), "vision": ORDERS[order], "picture_token": PICTURE, **changes})


def batch_of(vlm, per_row=(2, 1, 0), text=6, seed=1, size=None):
    """Rows of text with so many pictures in each. size: of uint8 pictures; None: float ones, normalised already."""
    draw = torch.Generator().manual_seed(seed)
    run, length = vlm.vision.tokens_per_picture, max(per_row) * (vlm.vision.tokens_per_picture + 1) + text
    tokens = torch.randint(PICTURE, (len(per_row), length + 1), generator=draw)
    for row, count in enumerate(per_row):
        for number in range(count):
            begin = 1 + number * (run + 1)
            tokens[row, begin:begin + run] = PICTURE
    targets = tokens[:, 1:].clone()
    targets[targets == PICTURE] = IGNORED
    shape = (sum(per_row), 3, *[vlm.vision.image_size] * 2) if size is None else (sum(per_row), size, size, 3)
    pictures = (torch.randn(shape, generator=draw) if size is None
                else torch.randint(256, shape, generator=draw, dtype=torch.uint8))
    return Batch({"tokens": tokens[:, :-1].contiguous(), "targets": targets, "pictures": pictures},
                 int((targets != IGNORED).sum()), seed=3)


def error(ours, theirs) -> float:
    """Relative to the norm."""
    return ((ours - theirs).norm() / theirs.norm()).item()
