"""Attention, precision, checkpointing and compile at once, as a user combines them."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_batch, tiny_model

from forge.attention.cudnn import CuDNN
from forge.attention.eager import Eager
from forge.attention.flash import Flash
from forge.attention.flex import Flex
from forge.checkpointing.full import Full
from forge.checkpointing.none import KeepAll
from forge.checkpointing.selective import Selective
from forge.compile.blocks import Blocks
from forge.compile.none import NotCompiled
from forge.compile.whole import Whole
from forge.precision.bf16 import BF16
from forge.precision.fp32 import FP32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16_MODEL, BF16_BLOCKS = (BF16(scope, True, "float32", None, "float32") for scope in ("model", "blocks"))
SELECTIVE = Selective(1, ["matmul", "attention"])
NONE, BLOCKS, WHOLE = NotCompiled(), Blocks(False, True, "default"), Whole(False, True)


def trained(attention, precision, checkpointing, compiled, documents):
    """The loss and the gradients of one pass, in float32."""
    batch = tiny_batch(rows=4, length=64)
    if documents:
        place = torch.arange(64, dtype=torch.int32).expand(4, -1)
        batch.tensors["documents"] = place // torch.tensor([[7], [20], [33], [64]], dtype=torch.int32)
    model = tiny_model(layers=3, head_width=64, attention=attention).cuda()
    model = compiled(checkpointing(precision.convert(model)))
    device = torch.device("cuda")
    with precision.autocast(device):
        scaled, _, _ = model(batch.to(device), torch.tensor(1 / batch.num_targets, device=device))
    scaled.backward()
    return {"loss": scaled.detach(), **{name: weight.grad.float() for name, weight in model.named_parameters()}}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("attention", "precision", "checkpointing", "compiled"), [
    (Flash(), BF16_MODEL, KeepAll(), WHOLE), (Flash(), BF16_BLOCKS, Full(), BLOCKS),
    (CuDNN(), BF16_MODEL, SELECTIVE, BLOCKS), (CuDNN(), BF16_MODEL, SELECTIVE, NONE),
    (Flex(), FP32(), KeepAll(), NONE), (Flex(), BF16_MODEL, SELECTIVE, NONE), (Flex(), BF16_MODEL, KeepAll(), BLOCKS),
    (Flex(), BF16_BLOCKS, KeepAll(), WHOLE)])
def test_equals_the_plain_run(attention, precision, checkpointing, compiled, documents):
    """bfloat16 rounds to 8 bits; about ten roundings a block, of three, forward and backward: 1 % of a loss, 10 % of
    the largest number of a gradient. Float32 in compiled flex_attention: a thousandth of that."""
    torch._dynamo.reset()
    wanted = trained(Eager(), FP32(), KeepAll(), NONE, documents)
    found = trained(attention, precision, checkpointing, compiled, documents)
    finer = 1e-3 if precision.compute == "float32" else 1.0
    assert (found["loss"] - wanted["loss"]).abs() <= 0.01 * finer * wanted["loss"]
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 0.1 * finer * value.abs().max(), name
