"""FlexAttention: blocks of the score table that a mask hides are never computed (PyTorch flex_attention)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.attention import Executes
from forge.attention.limits import of_model, on_gpu
from forge.notes import say

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from forge.attention import Layout
    from forge.attention.fused import Choice
    from forge.config import Config


@dataclass(frozen=True)
class Flex:
    """The kernel that skips what documents and windows hide. A CPU has no backward for it: masked sdpa there."""

    executes: ClassVar[Executes] = Executes(scores_again=True, skips="all")

    def problems(self, config: Config) -> Iterator[str]:
        if on_gpu(config) and of_model(config, "dropout"):
            yield (f"attention=flex knows no dropout, and model.dropout is {of_model(config, 'dropout')}: "
                   f"set model.dropout=0 or attention=sdpa.")
        recomputed, compiled = (config.choices.get(group, "none") for group in ("checkpointing", "compile"))
        if on_gpu(config) and "none" not in (recomputed, compiled):
            # Seen on torch 2.11, with every mask and dtype: gradients a thousand times too large, and no error.
            yield (f"attention=flex is computed wrongly where compiled code recomputes it, and checkpointing="
                   f"{recomputed} with compile={compiled} does: set one of them to none, or take another attention.")

    def plan(self, layout: Layout) -> BlockMask | Choice | None:
        if layout.device.type == "cuda":
            from forge.attention.blocks import block_mask

            return block_mask(layout)
        from forge.attention.fused import choose

        say("attention=flex has no backward pass on a CPU: this run takes sdpa, with a mask where one is needed.")
        return choose(layout, None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: BlockMask | Choice | None, dropout: float) -> Tensor:
        from forge.attention.blocks import attend_blocks
        from forge.attention.fused import Choice, attend

        if isinstance(plan, Choice):
            return attend(q, k, v, plan, dropout)
        return attend_blocks(q, k, v, plan)
