"""A model small enough for any test: two to twelve blocks of the real decoder."""

from __future__ import annotations

import torch
from routings import routing

from forge.attention.sdpa import SDPA
from forge.batch import Batch
from forge.loss.plain import Plain
from forge.model import Parts
from forge.model.decoder import Decoder
from forge.model.positions import Rotary
from forge.moe_router.sorted import Sorted
from forge.operators.native import Native

ROUTING = routing(normalize=True, aux_loss=0.01, aux_scope="sequence", z_loss=0.001)


def tiny_model(layers=3, dropout=0.0, routing=None, attention=None, seed=0, window=None, head_width=8):
    """In training mode; the same weights for the same seed."""
    decoder = Decoder(
        vocab_size=61, width=32, layers=layers, heads=4, kv_heads=2, head_width=head_width, hidden=48,
        norm="rms", eps=1e-6, rotary=Rotary(10000.0, False, None), max_length=64, activation="swiglu", biases=False,
        fused_qkv=True, qk_norm="none", clip_qkv=None, attention_gate="none", window=window, latent=None,
        tied=False, dropout=dropout, init_std=0.2, routing=routing, dense_first=None, family="llama", weights=None)
    torch.manual_seed(seed)
    return decoder.build(Parts(attention or SDPA(), Native(), Sorted(), Plain(1)))


def tiny_batch(rows=2, length=17, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (rows, length + 1), generator=generator)
    return Batch({"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}, rows * length, seed)


def one_pass(model, batch):
    """The loss, its sum and every gradient of one forward and backward pass, by name."""
    model.zero_grad()
    scaled, loss_sum, _ = model(batch, torch.tensor(1 / batch.num_targets))
    scaled.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": scaled.detach(), "loss_sum": loss_sum, **gradients}
