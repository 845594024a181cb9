"""How much of a device's arithmetic a run used. docs/figures.md explains the figures; forge/model/flops.py counts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from forge.attention import Executes
from forge.checkpointing import Repeats
from forge.model.flops import Execution, Forward, convention, exact, executed
from forge.notes import say

if TYPE_CHECKING:
    from forge.config import Config
    from forge.observe.seen import Seen
    from forge.run import Run

# Dense bf16 peaks by the vendors' datasheets, TFLOP/s (fp16 for the V100, which has no bf16). Each pattern is looked
# for in what torch.cuda.get_device_name says; the first that is found counts.
PEAK_TFLOPS = {
    r"\bGB200\b": 2500.0, r"\bB200\b": 2250.0, r"\bGH200\b": 989.4, r"\bH200 NVL\b": 835.0, r"\bH200\b": 989.4,
    r"\bH100 PCIe\b": 756.0, r"\bH100 NVL\b": 835.0, r"\bH100\b": 989.4, r"\bA100\b": 312.0, r"\bL40S\b": 362.0,
    r"\bRTX 4090$": 165.2, r"\bV100-PCIE\b": 112.0, r"\bV100\b": 125.0}


def peak_flops(device: torch.device, stated_tflops: float | None) -> float | None:
    """FLOP/s of dense bf16 products: as stated, or else by the datasheet; None where neither is known."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((tflops for pattern, tflops in PEAK_TFLOPS.items() if re.search(pattern, name)), None)
    if peak is None:
        say(f"The peak of {name} is not known here, so mfu, mfu_exact and hfu are null: set hardware.peak_tflops= to "
            f"its datasheet's dense bf16 figure, in TFLOP/s.")
        return None
    return peak * 1e12


def utilisation(run: Run, targets_per_second: float) -> dict[str, float | None]:
    """mfu, mfu_exact and hfu: shares of the peak of all devices. None where not known.

    MFU counts the tokens that are trained on; HFU every token that is computed, padding included.
    """
    config, seen = run.config, run.seen
    shares: dict[str, float | None] = dict.fromkeys(("mfu", "mfu_exact", "hfu"))
    forward: Forward = run.model.forward_flops()                        # type: ignore[operator]
    peak = peak_flops(run.topology.device, getattr(config.hardware, "peak_tflops", None))
    if peak is None or not seen.targets:
        return shares
    second = targets_per_second / (peak * run.topology.world_size)
    pictures = seen.pictures / seen.targets
    shares["mfu"] = convention(forward, seen.row_length, pictures) * second
    shares["mfu_exact"] = exact(forward, seen.keys_of_text, pictures) * second
    how = execution(config, forward, seen)
    if how is not None:
        shares["hfu"] = executed(forward, how) * second * seen.tokens / seen.targets
    return possible(shares, peak, getattr(config.precision, "peak_over_bf16", 1.0))


def possible(shares: dict[str, float | None], peak: float, most: float = 1.0) -> dict[str, float | None]:
    """The shares, or none of them and a sentence, where a device would have done more than it can.

    most: times `peak`: what the device does at best in this run's number formats.

    mfu alone may pass 1 in long rows: it counts pairs that causal attention hides and no kernel computes.
    """
    beyond = {name: value for name, value in shares.items() if name != "mfu" and value is not None and value > most}
    if not beyond:
        return shares
    said = ", ".join(f"{name} would be {value:.3g}" for name, value in beyond.items())
    say(f"{said}, and no device does more than its peak: {peak / 1e12:g} TFLOP/s is not the peak of this one. Set "
        f"hardware.peak_tflops= to its datasheet's dense bf16 figure. The figures are null.")
    return dict.fromkeys(shares)


def execution(config: Config, forward: Forward, seen: Seen) -> Execution | None:
    """How the chosen options compute the model; None where one of them does not say what it executes, where weights
    are frozen, where the model sees pictures, where some of unequal blocks are recomputed, or where compiled blocks
    with dropout recompute: what the compiler then leaves out is its own."""
    attention: Executes | None = getattr(config.attention, "executes", None)
    repeats = getattr(config.checkpointing, "repeats", None)
    head_products = getattr(config.loss, "head_products", None)
    pads = getattr(config.moe_router, "pads_experts", None) if forward.routed else False
    if attention is None or repeats is None or head_products is None or pads is not False:
        return None
    if forward.picture or any(group.frozen for group in config.optimizer.groups):
        return None
    again: Repeats = repeats(forward.layers)
    if 0 < again.blocks < forward.layers and 0 < forward.dense_layers < forward.layers:
        return None                     # blocks that cost differently: how many are repeated is not enough to know
    dropout = getattr(config.model, "dropout", 0.0)
    if again.blocks and dropout and not getattr(config.compile, "as_written", False):
        return None
    scores_kept = "attention" if attention.scores_again else "matmul"       # the family of the operators it is made of
    return Execution(
        computed_keys=_computed_keys(attention, seen), scores_again=attention.scores_again,
        narrow_values=getattr(config.attention, "narrow_values", False),
        head_products=head_products, share_again=again.blocks / forward.layers,
        products_again="matmul" not in again.kept, attention_again=scores_kept not in again.kept,
        down_again=dropout > 0 or _down_inside(config))


def _down_inside(config: Config) -> bool:
    """Whether an activation and the product after it are one operator, which recomputation cannot cut in two."""
    inside = getattr(config.operators, "down_inside", None)
    return inside is not None and inside == getattr(config.model, "activation", None)


def _computed_keys(attention: Executes, seen: Seen) -> float:
    plain = not seen.documents and seen.window is None
    if attention.skips == "all" or (attention.skips == "causal" and plain):
        return seen.keys / seen.tokens
    return seen.pairs / seen.tokens
