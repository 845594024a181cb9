"""Where values that are not finite arise. Looked for when a run ends because of them, and never before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.agreement import all_agree
from forge.hardware import Topology


def origin_of(model: nn.Module, again: Callable[[int], None], topology: Topology, step: int) -> str:
    """A sentence. again: takes the forward and backward passes of update `step` once more. All ranks call it."""
    own = _weights(model)
    when = 0
    if all_agree(own is None, topology):
        search = Search(model, f" on rank {topology.rank}" if topology.world_size > 1 else "")
        try:
            # Compiled code has no modules to look into.
            with search.watching(), torch.compiler.set_stance("force_eager"):
                again(step)
        except Exception as error:      # said, since it must not hide why the run ends; others may hang: do not wait
            return f"Looking for where it arose failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}."
        own, when = search.found, search.looks
    said = [(when, own)] * topology.world_size
    if topology.world_size > 1:
        dist.all_gather_object(said, (when, own))
    _, earliest = min(said, key=lambda one: (one[1] is None, one[0]))       # from there it may have gone to other ranks
    return earliest or (
        f"Where it arose is not known: all weights are finite, and so were the passes of step {step} when taken once "
        f"more, without compilation. What differs is rounding, and what is drawn by other means than the seed.")


def _weights(model: nn.Module) -> str | None:
    """Of parameters and buffers that are not finite. Waits for the device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, tensor in tensors if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Not finite are the weights of {', '.join(names[:3])}{more}." if names else None


class Search:
    """Watches what modules are given and give, in the order of execution, and then the gradients of both, until
    something is not finite. That is where it arose: what came before was finite.

    found: a sentence on it. whose: its end. looks: how many tensors were looked at for it; all ranks look at the same
    ones in the same order. The model is called with a batch first.
    """

    def __init__(self, model: nn.Module, whose: str) -> None:
        self.model, self.whose = model, whose
        self.found: str | None = None
        self.looks = 0
        self.micro_batch, self.shape = 0, torch.Size()

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks: list[Any] = []
        for name, module in self.model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._given, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(self._gives, name)))
        for name, weight in self.model.named_parameters():
            if weight.requires_grad:
                hooks.append(weight.register_hook(partial(self._look, f"the gradient of {name}")))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _given(self, name: str, module: nn.Module, args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not name:
            self.micro_batch, self.shape = self.micro_batch + 1, args[0].tensors["tokens"].shape
            return args, kwargs
        caller, called = self._call(name)

        def watched(value: Any) -> Any:
            for tensor in _floats(value):
                self._look(f"{caller}, in what {called} is given", tensor)
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            value = value.view_as(value)        # whose gradient is that of this use alone
            value.register_hook(partial(self._look, f"{name}, in the gradient of what it is given"))
            return value

        return tuple(map(watched, args)), {key: watched(value) for key, value in kwargs.items()}

    def _gives(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        caller, called = self._call(name)
        for tensor in _floats(output):
            self._look(name or "the loss", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look, f"{caller}, in the gradient of what {called} gives"))

    def _call(self, name: str) -> tuple[str, str]:
        """(the module that calls this one, what it calls it)"""
        caller = name.rpartition(".")[0]
        while isinstance(self.model.get_submodule(caller), nn.ModuleList):
            caller = caller.rpartition(".")[0]
        return caller or "the model", name.removeprefix(f"{caller}.")

    @torch.no_grad()
    def _look(self, place: str, tensor: Tensor) -> None:
        if self.found is not None:
            return
        self.looks += 1
        if bool(tensor.isfinite().all()):
            return
        counts = {"nan": int(tensor.isnan().sum()), "inf": int(tensor.isinf().sum())}
        kinds = " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        self.found = (f"It arose in {place}: of {tensor.numel():,} values, {kinds}, first at "
                      f"{_position(~tensor.isfinite(), self.shape)} of micro-batch {self.micro_batch}{self.whose}.")


def _position(bad: Tensor, shape: torch.Size) -> str:
    """Of the first that is True, in words of the tokens [B, T] where the tensor's first dimensions are these."""
    index = [int(one) for one in torch.unravel_index(bad.flatten().byte().argmax(), bad.shape)]
    if bad.shape[:2] == shape:
        return f"row {index[0]}, token {index[1]}"
    if bad.dim() and bad.shape[0] == shape.numel():
        return "row {}, token {}".format(*divmod(index[0], shape[1]))
    return f"index {index}"


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _floats(part)
