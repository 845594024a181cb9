"""When an option that stands for one fused kernel can run it, and what it says where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from forge.attention.mask import is_plain
from forge.attention.sdpa import SDPA, Choice
from forge.notes import say

if TYPE_CHECKING:
    from forge.attention import Layout
    from forge.config import Config

PLAIN = SDPA()
OLDEST = (8, 0)         # compute capability of the A100, the first GPU that PyTorch has these kernels for


def choose(name: str, layout: Layout) -> Choice:
    """The kernel exactly, or sdpa where documents or a window are to be hidden, which such kernels do not know."""
    choice = PLAIN.plan(layout)
    if not is_plain(layout):
        say(f"attention={name} knows no documents and no window: this run takes sdpa with a mask "
            f"(attention=flex has a kernel for them on a GPU).")
        return choice
    if layout.device.type == "cuda" and torch.cuda.get_device_capability(layout.device) < OLDEST:
        say(f"attention={name} needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}: this run takes sdpa.")
        return choice
    return replace(choice, exact=layout.length > 1)         # cuDNN has no kernel for a single token


def half_precision(name: str, config: Config) -> Iterator[str]:
    """GPUs have these kernels in float16 and bfloat16 only."""
    if on_gpu(config) and config.precision.compute in ("float32", "tf32"):
        yield (f"attention={name} computes in half precision: add precision=bf16 (or hardware=cpu, "
               f"where float32 works too).")


def head_width(name: str, config: Config, most: int, multiple: int) -> Iterator[str]:
    width = of_model(config, "head_width")
    if on_gpu(config) and width is not None and (width > most or width % multiple):
        yield (f"attention={name} takes heads of at most {most} numbers, in multiples of {multiple}, and "
               f"model.head_width is {width}: set attention=sdpa.")


def on_gpu(config: Config) -> bool:
    """A GPU may be what the run is computed on."""
    return config.hardware.device != "cpu"


def of_model(config: Config, setting: str) -> Any:
    """A setting of the model, or None where this kind of model has no such setting."""
    return getattr(config.model, setting, None)
