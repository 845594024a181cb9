"""augment=gpu on a GPU: what the CPU gives, without anybody's random numbers, and without waiting for the device."""

from dataclasses import fields

import pytest
import torch
from augment.recipes import batch, noise, recipe

from forge.augment.draws import drawn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda")


def test_draws_are_those_of_the_cpu():
    """Sines and roots may differ in the last bit of float64; crops are whole pixels, and the same."""
    seeds = torch.arange(10_000) * 31 - 7
    here, there = drawn(recipe(), seeds, 96, 96), drawn(recipe(), seeds.to(GPU), 96, 96)
    for field in fields(here):
        assert torch.allclose(getattr(here, field.name).double(), getattr(there, field.name).double().cpu(), rtol=0,
                              atol=1e-12), field.name


@pytest.mark.parametrize("path", ["fused", "kornia"])
@pytest.mark.parametrize("side", [20, 96])
def test_pictures_are_those_of_the_cpu(path, side):
    """A place in the source differs by a few roundings of float32, some 1e-5 of a pixel, between whose neighbours the
    slope is 1; the colours magnify it by 1.4^3, and the smallest std by 2. A GPU may multiply in another order."""
    option, pictures = recipe(path=path), batch(noise(32, side))
    here, there = option(pictures).tensors["pictures"], option(pictures.to(GPU)).tensors["pictures"]
    assert there.device.type == "cuda" and there.dtype is torch.float32
    assert (here - there.cpu()).abs().max() < 1e-3


def test_the_fused_path_never_waits_for_the_device_and_takes_no_random_numbers():
    option, pictures = recipe(), batch(noise(8, 40)).to(GPU)
    option(pictures)        # makes the constants
    before = torch.cuda.get_rng_state()
    torch.cuda.set_sync_debug_mode("error")
    try:
        option(pictures)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_memory_is_flat_on_the_device():
    option, pictures = recipe(), batch(noise(16, 64)).to(GPU)
    for number in range(400):
        option(pictures)
        if number == 100:
            before = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == before
