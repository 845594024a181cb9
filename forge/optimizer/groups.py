"""Which parameters are trained, and with which settings: by name, the first matching group decides."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from forge.errors import ConfigError
from forge.optimizer import Group


def freeze(model: nn.Module, groups: list[Group]) -> None:
    """Take frozen parameters out of training. Call before gradients are synchronised.

    Raises ConfigError where a group matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for index, group in enumerate(groups):
        if not any(fnmatchcase(name, group.match) for name in names):
            raise ConfigError(f"optimizer.groups[{index}].match={group.match!r} matches no parameter. Names look like "
                              f"{', '.join(names[:2] + names[-2:])}")
    for name, parameter in model.named_parameters():
        deciding = _deciding(name, groups)
        if deciding is not None and deciding.frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("optimizer.groups freezes every parameter: nothing is left to train.")


def parameter_groups(model: nn.Module, groups: list[Group], weight_decay: float) -> list[dict[str, Any]]:
    """torch.optim's parameter groups, with "lr_scale", "weight_decay" and "names".

    Weights of matrix products and embeddings decay; vectors (norms, biases) do not, unless their group says so
    (Loshchilov & Hutter 2019; nanoGPT's rule).
    """
    made: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = _deciding(name, groups)
        decay = weight_decay if parameter.dim() >= 2 else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        lr_scale = 1.0 if group is None else group.lr_scale
        entry = made.setdefault((lr_scale, decay), {"params": [], "names": [], "lr_scale": lr_scale,
                                                    "weight_decay": decay})
        entry["params"].append(parameter)
        entry["names"].append(name)
    return list(made.values())


def _deciding(name: str, groups: list[Group]) -> Group | None:
    return next((group for group in groups if fnmatchcase(name, group.match)), None)
