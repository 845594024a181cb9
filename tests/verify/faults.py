"""Mistakes a person could make in an option of their own: small, silent, and wrong."""

TANH = """
from dataclasses import dataclass
from forge.operators.native import Native

@dataclass(frozen=True)
class Option(Native):
    '''The approximation of GELU in the place of GELU.'''

    def feed_forward(self, width, hidden, activation, bias):
        return super().feed_forward(width, hidden, "gelu_tanh" if activation == "gelu" else activation, bias)
"""

SCALED = """
from dataclasses import dataclass
from forge.comm.sync import Alone

@dataclass
class Scaled(Alone):
    def finish(self, step):
        for weight in self.model.parameters():
            weight.grad.mul_(1.01)

@dataclass(frozen=True)
class Option:
    def build(self, model, topology, precision):
        return Scaled(model)
"""

SUMMED = """
from dataclasses import dataclass
from forge.passes.turns import Turns

class Summed(Turns):
    '''Each micro-batch counts as if it were the whole update.'''

    def __call__(self, batches, scale):
        batches = list(batches)
        return super().__call__(batches, scale * len(batches))

@dataclass(frozen=True)
class Option:
    def build(self, sync, precision, device, mark):
        return Summed(sync, precision, device, mark)
"""

MEAN_OF_MEANS = """
from dataclasses import dataclass
from forge.passes.turns import Turns

class Means(Turns):
    '''Right only where all micro-batches have as many targets.'''

    def __call__(self, batches, scale):
        batches = list(batches)
        targets = sum(batch.num_targets for batch in batches)
        terms = {}
        for batch in batches:
            own = scale * targets / (batch.num_targets * len(batches))
            for name, value in super().__call__([batch], own).items():
                terms[name] = terms.get(name, 0) + value
        return terms

@dataclass(frozen=True)
class Option:
    def build(self, sync, precision, device, mark):
        return Means(sync, precision, device, mark)
"""

PEEKING = """
from dataclasses import dataclass
from forge.attention.eager import Eager

@dataclass(frozen=True)
class Option(Eager):
    '''A token sees the next one: the mask starts one diagonal too far up.'''

    def plan(self, layout):
        import torch

        return torch.ones(layout.length, layout.length, dtype=torch.bool, device=layout.device).tril(1)
"""

DROPPING = """
from dataclasses import dataclass
from forge.attention.sdpa import SDPA

@dataclass(frozen=True)
class Option(SDPA):
    '''Attention that drops a tenth whatever it is told.'''

    def __call__(self, q, k, v, plan, dropout):
        return super().__call__(q, k, v, plan, 0.1)
"""

OTHER_TIES = """
from dataclasses import dataclass
from forge.moe_router.experts import by_sorting
from forge.moe_router.gate import choose
from forge.moe_router.mixture import Mixture

class FromTheLast(Mixture):
    '''Experts counted from the last to the first, so that ties go to the higher number.'''

    def forward(self, x, valid):
        choice = choose(x, valid, self.gate.weight.flip(0), self.routing, self.memory(), self.training)
        experts = self.routing.num_experts - 1 - choice.experts
        y = by_sorting(x.flatten(0, 1), experts, choice.weights, self.gate_up, self.down).view_as(x)
        return y, choice.aux, choice.load.flip(-1)

@dataclass(frozen=True)
class Option:
    def build(self, width, hidden, routing):
        return FromTheLast(width, hidden, routing, by_sorting)
"""

LOSING = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Option:
    '''Buckets without the last parameter: each rank keeps its own gradient of it.'''

    def build(self, model, topology, precision):
        from forge.comm.sync import bucketed
        from torch.nn.parallel import DistributedDataParallel

        last = [name for name, _ in model.named_parameters()][-1]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [last])
        return bucketed(model, precision, bucket_cap_mb=1)
"""

DRAWING = """
from dataclasses import dataclass
from forge.attention.sdpa import SDPA

@dataclass(frozen=True)
class Option(SDPA):
    '''Never the same twice.'''

    def __call__(self, q, k, v, plan, dropout):
        import os

        import torch

        noise = torch.frombuffer(bytearray(os.urandom(v.numel())), dtype=torch.uint8).view_as(v).to(v.dtype)
        return super().__call__(q, k, v + 0.001 * noise, plan, dropout)
"""

CAREFREE = """
from dataclasses import dataclass
from forge.optimizer.adamw import AdamW

@dataclass(frozen=True)
class Option(AdamW):
    '''Weight decay of vectors too.'''

    def build(self, model, schedule, steps, precision):
        made = super().build(model, schedule, steps, precision)
        for group in made.optimizer.param_groups:
            group["weight_decay"] = self.weight_decay
        return made
"""

LOUDER = """
from dataclasses import dataclass
from forge.operators import layers
from forge.operators.native import Native

class Louder(layers.FeedForward):
    def forward(self, x):
        return super().forward(x) * 1.001

@dataclass(frozen=True)
class Option(Native):
    '''A feed-forward that gives a thousandth too much.'''

    def feed_forward(self, width, hidden, activation, bias):
        return Louder(width, hidden, layers.NATIVE[activation](hidden), activation == "swiglu", bias)
"""

FIRST_ROW = """
from dataclasses import dataclass
from forge.attention.sdpa import SDPA

@dataclass(frozen=True)
class Option(SDPA):
    '''All rows look at the values of the first.'''

    def __call__(self, q, k, v, plan, dropout):
        return super().__call__(q, k, v[:1].expand_as(v), plan, dropout)
"""

LEAVING = """
from dataclasses import dataclass
from forge.operators.native import Native

@dataclass(frozen=True)
class Option(Native):
    def norm(self, width, kind, eps):
        raise SystemExit(3)
"""
