"""The passes of a micro-batch are one CUDA graph: recorded once, and launched as a whole from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from forge.comm import Sync
    from forge.config import Config
    from forge.passes import Passes
    from forge.precision import Precision


@dataclass(frozen=True)
class Graphed:
    """warmup: updates in turn before the recording, so that everything is compiled and allocated by then."""

    warmup: int

    def problems(self, config: Config) -> Iterator[str]:
        if self.warmup < 1:
            yield f"passes.warmup={self.warmup}: at least 1 is wanted."
        if config.hardware.processes > 1:
            yield (f"passes=graphed records no collectives, and hardware.processes={config.hardware.processes}: set "
                   f"passes=in_turn.")
        if config.reproducible:
            yield ("passes=graphed cannot record what reproducible=true makes kernels do: set passes=in_turn.")

        if getattr(config.model, "vision", None) is not None:
            yield ("passes=graphed records batches of one shape, and a model that sees pictures is given as many as "
                   "its rows have: set passes=in_turn.")

    def build(self, sync: Sync, precision: Precision, device: torch.device, mark: Callable[[str], None]) -> Passes:
        import torch.distributed as dist

        from forge.errors import ConfigError
        from forge.notes import say
        from forge.passes.recorded import Recorded
        from forge.passes.turns import Turns

        if dist.is_initialized() and dist.get_world_size() > 1:     # on several nodes, of which config.py sees one
            raise ConfigError(f"passes=graphed records no collectives, and this run has {dist.get_world_size()} ranks: "
                              f"set passes=in_turn.")
        turns = Turns(sync, precision, device, mark)
        if device.type != "cuda":
            say("passes=graphed needs a CUDA GPU: this run takes its passes in turn.")
            return turns
        return Recorded(turns, self.warmup, mark)
