"""Matrix products of cuBLASLt that end in more than a product: what PyTorch does not pass on.

A product leaves the tensor cores as float32; an epilogue still applies GELU, or its derivative, before the result is
rounded and written, and so saves reading and writing it once more. (NVIDIA cuBLAS documentation, cublasLtEpilogue_t;
cuBLAS computes GELU by the tanh approximation.) The library is the one that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from forge.errors import UnusableEnvironment

GELU_AUX, GELU_AUX_BIAS, DGELU = 160, 164, 192                              # cublasLtEpilogue_t
_DTYPES = {torch.float16: 2, torch.bfloat16: 14}                            # cudaDataType_t
_FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSED = 0, 68, 1
_TRANSA, _TRANSB, _EPILOGUE, _BIAS, _AUX, _AUX_LD, _BIAS_TYPE = 3, 4, 7, 8, 11, 12, 26      # ..MatmulDescAttributes_t
_MAX_WORKSPACE = 1                                                          # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 32 * 2**20      # bytes: what NVIDIA recommends for Hopper
CANDIDATES, TRIALS = 8, 5    # kernels that are timed, and how often, when a product is met first
ALIGNED = 8                 # numbers: sizes that are no multiple lose the fast kernels
PLACED = 256                # bytes: the alignment of operands that cuBLASLt counts on when it proposes kernels


def gelu_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [N, D], weight [H, D], bias [H] -> (gelu(pre), pre), pre = x weight^T + bias, both [N, H]."""
    pre, activated = (x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))
    plan = _plan(GELU_AUX if bias is None else GELU_AUX_BIAS, True, weight.shape[0], x.shape[0], x.shape[1], x.dtype)
    plan(weight, x, activated, pre, bias)
    return activated, pre


def gelu_gradient_product(gradient: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    """gradient [N, D], weight [D, H], pre [N, H] -> (gradient weight) gelu'(pre) [N, H]."""
    result = torch.empty_like(pre)
    plan = _plan(DGELU, False, pre.shape[1], pre.shape[0], gradient.shape[1], pre.dtype)
    plan(weight, gradient, result, pre, None)
    return result


def fits(weight: Tensor, *others: Tensor | None) -> bool:
    """Whether these kernels take such operands: half precision, rows together in memory, whole vectors."""
    operands = [weight, *(other for other in others if other is not None)]
    return weight.shape[0] % ALIGNED == 0 and all(
        operand.is_cuda and operand.dtype in _DTYPES and operand.dtype is weight.dtype and operand.is_contiguous()
        and operand.data_ptr() % PLACED == 0 and operand.shape[-1] % ALIGNED == 0 for operand in operands)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
                ("reserved", c_int * 4)]


class _Plan:
    """One product of fixed shapes, in cuBLAS's column-major terms: out [m, n] = op(a) b."""

    def __init__(self, epilogue: int, transposed: bool, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.description = c_void_p()
        kind = _DTYPES[dtype]
        _call("MatmulDescCreate", byref(self.description), _COMPUTE_FLOAT32, _FLOAT32)
        for name, value in ((_TRANSA, c_int32(_TRANSPOSED if transposed else 0)), (_TRANSB, c_int32(0)),
                            (_EPILOGUE, c_int32(epilogue)), (_AUX_LD, c_int64(m)), (_BIAS_TYPE, c_int32(kind))):
            self._set(name, value)
        self.layouts = [_layout(kind, *shape) for shape in (((k, m) if transposed else (m, k)), (k, n), (m, n))]
        self.candidates: list[_Heuristic] = []

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, aux: Tensor, bias: Tensor | None) -> None:
        self._set(_AUX, c_void_p(aux.data_ptr()))
        if bias is not None:
            self._set(_BIAS, c_void_p(bias.data_ptr()))
        if not self.candidates:
            self.candidates = self._ask()
        if len(self.candidates) > 1 and not torch.cuda.is_current_stream_capturing():
            self.candidates = [self._fastest(a, b, out)]
        self._run(self.candidates[0], a, b, out)

    def _run(self, heuristic: _Heuristic, a: Tensor, b: Tensor, out: Tensor) -> None:
        workspace = torch.empty(heuristic.workspace, dtype=torch.uint8, device=out.device)
        a_layout, b_layout, out_layout = self.layouts
        result = c_void_p(out.data_ptr())
        _call("Matmul", _handle(), self.description, byref(c_float(1.0)), c_void_p(a.data_ptr()), a_layout,
              c_void_p(b.data_ptr()), b_layout, byref(c_float(0.0)), result, out_layout, result, out_layout,
              byref(heuristic.algorithm), c_void_p(workspace.data_ptr()), c_size_t(heuristic.workspace),
              c_void_p(torch.cuda.current_stream().cuda_stream))

    def _ask(self) -> list[_Heuristic]:
        """The kernels that cuBLAS thinks are fastest, best first; one where their choice must not depend on a clock."""
        wanted = 1 if torch.are_deterministic_algorithms_enabled() else CANDIDATES
        preference, found, count = c_void_p(), (_Heuristic * wanted)(), c_int()
        _call("MatmulPreferenceCreate", byref(preference))
        limit = c_size_t(WORKSPACE)
        _call("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, byref(limit), c_size_t(8))
        a, b, out = self.layouts
        _call("MatmulAlgoGetHeuristic", _handle(), self.description, a, b, out, out, preference, wanted, found,
              byref(count))
        _call("MatmulPreferenceDestroy", preference)
        usable = [heuristic for heuristic in found[:count.value] if heuristic.state == 0]
        if not usable:
            raise RuntimeError("cuBLASLt has no kernel for this product")
        return usable

    def _fastest(self, a: Tensor, b: Tensor, out: Tensor) -> _Heuristic:
        """By trying: with an epilogue, cuBLAS's first guess is up to 15 % slower than its best."""
        times = []
        for heuristic in self.candidates:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(TRIALS + 1)]
            self._run(heuristic, a, b, out)
            for mark in marks:
                mark.record()
                self._run(heuristic, a, b, out)
            marks[-1].synchronize()
            times.append(min(first.elapsed_time(second) for first, second in pairwise(marks)))
        return self.candidates[times.index(min(times))]

    def _set(self, name: int, value: c_int32 | c_int64 | c_void_p) -> None:
        _call("MatmulDescSetAttribute", self.description, name, byref(value), c_size_t(ctypes.sizeof(value)))


@lru_cache(maxsize=256)
def _plan(epilogue: int, transposed: bool, m: int, n: int, k: int, dtype: torch.dtype) -> _Plan:
    return _Plan(epilogue, transposed, m, n, k, dtype)


def _layout(kind: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    _call("MatrixLayoutCreate", byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(rows))
    return layout


@cache
def _library() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        raise UnusableEnvironment(f"operators=fused needs cuBLASLt, which PyTorch brings along, and it cannot be "
                                  f"loaded: {error}. Set operators=native.") from None


@cache
def _handle() -> c_void_p:
    handle = c_void_p()
    _call("Create", byref(handle))
    return handle


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{name} failed with status {status}")
