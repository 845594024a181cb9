"""The kernels of moe_router=fused as an H100 or H200 would run them: compiled here, where there is none.

What a wrong tiling costs can be seen without a GPU: more shared memory than there is, registers that do not suffice
and spill, products that miss the tensor cores' own instructions.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED = 227 * 1024         # bytes a block may have (CUDA programming guide, compute capability 9.0)
PROGRAM = """
import json, os, re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

class Absent:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)

driver.set_active(Absent())
run, tools = JITFunction.run, os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")

def built(self, *args, grid, warmup, **how):
    kernel = run(self, *args, grid=grid, warmup=True, **how)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([os.path.join(tools, "cuobjdump"), "-res-usage", file.name], capture_output=True,
                               text=True, check=True).stdout
    print(json.dumps({"name": self.fn.__name__, "shared": kernel.metadata.shared,
                      "stack": int(re.search(r"STACK:(\\d+)", usage)[1]),
                      "registers": int(re.search(r"REG:(\\d+)", usage)[1]),
                      "tensor_cores": "wgmma.mma_async" in kernel.asm["ptx"],
                      "copies": "cp.async.bulk.tensor" in kernel.asm["ptx"]}), flush=True)

JITFunction.run = built
from forge.kernels import choice, combine, grouped, placement, tilings
for module in (grouped, placement):
    module.num_multiprocessors = lambda device: 132

def like(*shape, dtype=torch.bfloat16):         # of this shape, and of no size
    return torch.empty(64, dtype=dtype).as_strided(shape, (0,) * len(shape))

tokens, width, hidden, num_experts, top_k = 8192, 2048, 768, 128, 8
how = tilings._read((9, 0), 2)
choices, tiles = tokens * top_k, tokens * top_k // how["up"].rows + num_experts
integers = [torch.empty(size, dtype=torch.int32) for size in ((tokens, top_k), choices, num_experts, (2, tiles), 1)]
where = placement.Placement(*integers)
# Strides tell a description of memory how long a row is.
gate_up = torch.empty(2 * hidden, width, dtype=torch.bfloat16).expand(num_experts, -1, -1)
down = torch.empty(width, hidden, dtype=torch.bfloat16).expand(num_experts, -1, -1)
grouped._described = lambda tensor, *block: grouped.TensorDescriptor(
    tensor, [tensor.shape[:-1].numel(), tensor.shape[-1]], [tensor.shape[-1], 1], list(block))
x, h, active = (torch.empty(64, size, dtype=torch.bfloat16).as_strided((rows, size), (0, 1))
                for rows, size in ((tokens, width), (choices, 2 * hidden), (choices, hidden)))
weights = torch.empty(tokens, top_k)
torch.Tensor.new_empty = lambda self, *shape, **kind: like(*shape)
torch.empty_like = lambda tensor, **kind: like(*tensor.shape)
grouped.up(x, gate_up, where, how["up"])
grouped.down(active, down, where, how["down"], transposed=True)
grouped.down_backward(x, down, weights, h, where, how["down_backward"])
grouped.down(h, gate_up, where, how["up_backward"], transposed=False)
grouped.weight_gradient(h, x, where, "right", how["gate_up_gradient"])
grouped.weight_gradient(x, active, where, "left", how["down_gradient"])
del torch.Tensor.new_empty
placement._launch(torch.empty(tokens, num_experts), torch.empty(num_experts), torch.empty(tokens, dtype=torch.bool),
                  torch.empty(tokens, top_k, dtype=torch.int64), weights, num_experts, 128,
                  choice.Scores("softmax", True, 1.0))
"""


@pytest.fixture(scope="module")
def kernels():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_are_built(kernels):
    assert [kernel["name"] for kernel in kernels] == [
        "_up", "_down", "_down_backward", "_down", "_weight_gradient", "_weight_gradient", "_place"]


def test_shared_memory_suffices(kernels):
    assert all(kernel["shared"] <= SHARED for kernel in kernels), kernels


def test_registers_suffice(kernels):
    """A few bytes of stack are not yet spilling: 16 a thread is one vector."""
    assert all(kernel["stack"] <= 16 for kernel in kernels), kernels


def test_products_use_the_tensor_cores_and_the_copy_engine(kernels):
    assert all(kernel["tensor_cores"] and kernel["copies"] for kernel in kernels[:-1]), kernels
