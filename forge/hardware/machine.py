"""The devices of this machine: CPU cores or CUDA GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from forge.errors import UnusableEnvironment
from forge.hardware import Topology

if TYPE_CHECKING:
    import torch

    from forge.config import Config


@dataclass(frozen=True)
class Machine:
    """device: auto takes CUDA where there is a GPU. processes: workers on this machine.

    threads: CPU threads that a worker computes with; null: OMP_NUM_THREADS where it is set, or else the cores it may
        use, shared by the workers here.
    cudnn_benchmark: let cuDNN time its convolution algorithms and keep the fastest (inputs of constant shape).
    timeout_seconds: how long a collective waits for the other ranks before the run ends.
    garbage: frozen: Python's collector no longer walks what is alive once training runs; automatic: it does.
    peak_tflops: of one device, dense bf16, in TFLOP/s: what utilisation is a share of; null: by forge's own table.
    """

    device: Literal["auto", "cpu", "cuda"]
    processes: int
    threads: int | None
    cudnn_benchmark: bool
    timeout_seconds: int
    garbage: Literal["automatic", "frozen"]
    peak_tflops: float | None

    def problems(self, config: Config) -> Iterator[str]:
        if self.processes < 1:
            yield f"hardware.processes={self.processes}: at least 1 is wanted."
        if self.threads is not None and self.threads < 1:
            yield f"hardware.threads={self.threads}: at least 1 is wanted, or null to share the cores."
        if self.timeout_seconds < 1:
            yield f"hardware.timeout_seconds={self.timeout_seconds}: at least 1 is wanted."
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            yield (f"hardware.peak_tflops={self.peak_tflops}: more than 0 is wanted, in TFLOP/s, or null for the peaks "
                   f"that forge knows.")

    def environment(self) -> dict[str, str]:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.processes))
        share = os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // here)
        # Threads that spin long while they wait cost a factor of thirty when anything else wants the cores, and threads
        # that do not spin at all a fifth when nothing does: docs/benchmarks/frame_cpu_202611.md.
        spin = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
        return {"OMP_NUM_THREADS": str(self.threads or share), **spin}

    @contextmanager
    def claim(self) -> Iterator[Topology]:
        import torch
        import torch.distributed as dist

        if self.threads is not None:    # also where an option of the user's has imported torch before its time
            torch.set_num_threads(self.threads)
        device = self._device()
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            _meet(device, timedelta(seconds=self.timeout_seconds))
        with self._garbage():
            yield Topology(device, int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0")), world)
        if dist.is_initialized():       # not after an error: it would wait for collectives that never end
            dist.destroy_process_group()

    def _garbage(self) -> AbstractContextManager[None]:
        if self.garbage == "automatic":
            return nullcontext()
        from forge.hardware.garbage import frozen_once_training

        return frozen_once_training()

    def _device(self) -> torch.device:
        import torch

        if self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise UnusableEnvironment("hardware.device=cuda: no CUDA GPU can be used here. Take hardware=cpu, "
                                      "or check the driver with nvidia-smi.")
        local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= found:
            raise UnusableEnvironment(f"hardware.processes={self.processes}: this machine has {found} GPU(s), and each "
                                      f"process needs one of its own. Lower hardware.processes, or take hardware=cpu.")
        torch.cuda.set_device(local)
        return torch.device("cuda", local)


def _meet(device: torch.device, timeout: timedelta) -> None:
    """Join the other ranks: through a file where forge started them, through torchrun's store otherwise."""
    import torch.distributed as dist

    meeting = os.environ.get("FORGE_MEETING")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{meeting}" if meeting else "env://",
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout,
        device_id=device if device.type == "cuda" else None)
