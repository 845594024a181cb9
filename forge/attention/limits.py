"""What fused kernels cannot do, in the user's words. Read before a device is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.config import Config


def half_precision(name: str, config: Config) -> Iterator[str]:
    """GPUs have these kernels in float16 and bfloat16 only."""
    if on_gpu(config) and config.precision.compute in ("float32", "tf32"):
        yield (f"attention={name} computes in half precision: add precision=bf16 (or hardware=cpu, "
               f"where float32 works too).")


def head_width(name: str, config: Config, most: int, multiple: int) -> Iterator[str]:
    vision = of_model(config, "vision")
    tower = None if vision is None else vision.width // max(1, vision.heads)
    for setting, width in (("head_width is", of_model(config, "head_width")), ("vision.width over heads is", tower)):
        if on_gpu(config) and width is not None and (width > most or width % multiple):
            yield (f"attention={name} takes heads of at most {most} numbers, in multiples of {multiple}, and "
                   f"model.{setting} {width}: set attention=sdpa.")


def on_gpu(config: Config) -> bool:
    """A GPU may be what the run is computed on."""
    return config.hardware.device != "cpu"


def of_model(config: Config, setting: str) -> Any:
    """A setting of the model, or None where this kind of model has no such setting."""
    return getattr(config.model, setting, None)
