"""What a machine can do, measured inside the process of an arm: each family of figures is a module with `measure`.

A row has a `name`, the figures, and `shown`: what the table says of them. What cannot be measured here is a row with
null figures and its `reason`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.bench.driver import Driver

Row = dict[str, Any]


def probe(driver: Driver, family: str, settings: dict[str, Any], allowed: tuple[str, ...]) -> list[Row]:
    """The rows of one family, on the devices of this arm; all ranks take part."""
    from forge.bench.probes import (
        all_reduce,
        attention,
        augment,
        copy,
        experts,
        launch,
        loader,
        matmul,
        reading,
        transfer,
    )

    if family in ("attention", "experts"):       # to load, which may lie outside forge
        options = {name: Path(folder) for name, folder in settings["options"].items()}
        with_options = {"attention": attention.measure, "experts": experts.measure}
        return with_options[family](driver, settings, options, allowed)
    families = {"matmul": matmul.measure, "copy": copy.measure, "transfer": transfer.measure,
                "all_reduce": all_reduce.measure, "loader": loader.measure, "launch": launch.measure,
                "tar": reading.tar, "decoding": reading.decoding, "augment": augment.measure}
    return families[family](driver, settings)


def missing(name: str, reason: str) -> Row:
    return {"name": name, "shown": {}, "reason": reason}


def sentence(error: Exception) -> str:
    """The first line of what an operation says about why it cannot."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:300]
