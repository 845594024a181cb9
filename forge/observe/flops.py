"""How much of a device's arithmetic a run used."""

from __future__ import annotations

import torch

# Dense bf16 peaks by the vendors' datasheets, TFLOP/s. The name is what torch.cuda.get_device_name contains.
PEAK_TFLOPS = {"H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "A100": 312.0, "B200": 2250.0, "L40S": 362.0,
               "RTX 4090": 165.2, "V100": 125.0}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of dense bf16 products by the datasheet; None where the device is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in PEAK_TFLOPS.items() if part in name), None)


def mfu(flops_per_token: float, tokens_per_second: float | None, devices: int, device: torch.device) -> float | None:
    """Model FLOPs utilisation (PaLM, appendix B): the share of the peak that the model's own arithmetic took."""
    peak = peak_flops(device)
    if peak is None or tokens_per_second is None:
        return None
    return flops_per_token * tokens_per_second / (peak * devices)
