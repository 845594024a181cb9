"""How tokens pass through the experts they chose, by the package sonic-moe (Guo et al. 2025, Apache-2.0).

What it is told follows version 0.1.2.post1: `moe_general_routing_inputs`, whose choices may be anybody's. It reads
weights as [2 * hidden, width, num_experts] and [width, hidden, num_experts], with the experts outermost in memory and,
where it is told so, all rows of the gate first: that is how forge keeps them, so they are viewed and not copied.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from forge.errors import ConfigError, UnusableEnvironment
from forge.moe_router.experts import by_sorting
from forge.moe_router.sonic import INSTALL, MISSING, PACKAGE

HOPPER = (9, 0)
FORMATS = (torch.bfloat16, torch.float16)


@torch.compiler.disable     # type: ignore[untyped-decorator]     # its own assertions refuse to be traced
def by_sonic(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See forge.moe_router.experts. Raises UnusableEnvironment where the package or the device is missing, and
    ConfigError for a number format that the package has no kernels for."""
    if not len(tokens):
        return by_sorting(tokens, experts, weights, gate_up, down)
    compute, swiglu = _package()
    check_device(tokens.device)
    if tokens.dtype not in FORMATS:
        raise ConfigError(f"moe_router=sonic computes in bfloat16 or float16, and this run in "
                          f"{str(tokens.dtype).removeprefix('torch.')}: set precision=bf16, or moe_router=sorted.")
    num_experts, top_k = len(down), experts.shape[1]
    dropped = experts == num_experts        # which it does not know: the last expert computes them, for nothing
    each = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device).repeat_interleave(top_k)
    y, _ = compute(
        tokens.contiguous(), weights.masked_fill(dropped, 0).float().flatten(), each,
        experts.clamp(max=num_experts - 1).to(torch.int32).flatten(), gate_up.permute(1, 2, 0), None,
        down.permute(1, 2, 0), None, E=num_experts, stream_id=torch.cuda.current_stream(tokens.device).cuda_stream,
        activation_type=swiglu, is_inference_mode_enabled=not torch.is_grad_enabled(), concat_layout=True)
    return y        # type: ignore[no-any-return]


@cache
def _package() -> tuple[Any, Any]:
    """(its function, its name for SwiGLU)."""
    if find_spec(PACKAGE) is None:
        raise UnusableEnvironment(MISSING)
    try:
        compute = import_module(PACKAGE).moe_general_routing_inputs
        swiglu = import_module(f"{PACKAGE}.enums").ActivationType.SWIGLU
    except (ImportError, AttributeError, OSError) as error:
        raise UnusableEnvironment(f"moe_router=sonic: the package sonic-moe cannot be used: {error} ({INSTALL}).") \
            from None
    if "concat_layout" not in signature(compute).parameters:
        raise UnusableEnvironment(f"moe_router=sonic needs sonic-moe 0.1.2.post1, and another version is installed: "
                                  f"{INSTALL}.")
    return compute, swiglu


def check_device(device: torch.device) -> None:
    """Raises UnusableEnvironment where the package has no kernels for it."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < HOPPER:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise UnusableEnvironment(f"moe_router=sonic has kernels for Hopper GPUs and later only, and this run is on "
                                  f"{name}: take moe_router=fused.")
