"""Everything a run must remember. If it is not here, it does not survive."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from forge.batch import Cursor

if TYPE_CHECKING:
    from forge.parallel.spread import Spread


class Stateful(Protocol):
    """state_dict is flat: names to tensors, or to what JSON can hold."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Progress:
    """How far the run has come: updates done, and where the data stand."""

    def __init__(self) -> None:
        self.step = 0
        self.cursor = Cursor()

    def advance(self, cursor: Cursor) -> None:
        self.step, self.cursor = self.step + 1, cursor

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.cursor.epoch, "index": self.cursor.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.cursor = int(state["step"]), Cursor(int(state["epoch"]), int(state["index"]))


class Rng:
    """The global generators of this rank. The model's draws are seeded by position; this keeps everything else."""

    def state_dict(self) -> dict[str, Any]:
        algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        version, numbers, next_gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(), "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "numpy": [str(algorithm), int(position), int(has_gauss), float(gauss)],
            "python_numbers": torch.tensor(numbers, dtype=torch.int64), "python": [version, next_gauss]}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        algorithm, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((algorithm, state["numpy_keys"].numpy().astype(np.uint32), position, has_gauss, gauss))
        version, next_gauss = state["python"]
        random.setstate((version, tuple(state["python_numbers"].tolist()), next_gauss))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


@dataclass(frozen=True)
class RunState:
    """The parts that survive. shared: the same on all ranks, written once. own: each rank's, written by each.

    spread: of the parameters whose slices, and those of their state, are on several ranks: they are written whole.
    sums: each rank's share of a sum, written by each. The first rank loads all of them, one after the other, and adds
        them up; so it does not matter how many ranks go on. A snapshot that has none yet starts the sum.
    """

    shared: dict[str, Stateful]         # model, update, comm, progress
    own: dict[str, Stateful]            # rng
    spread: dict[str, Spread] = field(default_factory=dict)
    sums: dict[str, Stateful] = field(default_factory=dict)
