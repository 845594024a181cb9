"""Where torch.compile takes hold of the model, and what it needs around it."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.distributed as dist

from forge.errors import UnusableEnvironment
from forge.notes import say

if TYPE_CHECKING:
    from torch import nn


def compile_blocks(option: str, model: nn.Module, **how: Any) -> nn.Module:
    """Each block in place, so that the names of parameters stay; and the loss, whose logits are the largest tensors.
    how: arguments of torch.compile."""
    _prepare(option, model)
    trainable: Any = model
    for blocks in trainable.block_lists():
        for block in blocks:
            block.compile(**how)
    trainable.score = torch.compile(trainable.score, **how)
    return model


def compile_whole(option: str, model: nn.Module, **how: Any) -> nn.Module:
    """Replaces model.compute by its compiled self. how: arguments of torch.compile."""
    _prepare(option, model)
    if dist.is_initialized() and dist.get_world_size() > 1:
        say(f"compile={option}: the backward of one graph gives all gradients at its end, so their reduction overlaps "
            f"with nothing (compile=blocks lets it overlap).")
    trainable: Any = model
    trainable.compute = torch.compile(trainable.compute, **how)
    return model


def _prepare(option: str, model: nn.Module) -> None:
    """Raises UnusableEnvironment where there is no compiler for the code that torch.compile writes."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    variable, names = ("CXX", ["g++"]) if on_cpu else ("CC", ["gcc", "clang"])      # Inductor's; Triton's
    if variable in os.environ:
        names = shlex.split(os.environ[variable])[:1]
    if not any(map(shutil.which, names)):
        raise UnusableEnvironment(
            f"compile={option} needs a C++ compiler, and {' or '.join(names)} is not on this machine: install it "
            f"(apt-get install g++), name another in the variable {variable}, or set compile=none.")
    # Under DistributedDataParallel torch would cut graphs at its buckets, and cannot cut through a recomputed block.
    torch._dynamo.config.optimize_ddp = False
    # Rows of every length that batching makes are a shape, in training and in evaluation. Past 8 of them torch would go
    # on uncompiled.
    torch._dynamo.config.recompile_limit = 64
