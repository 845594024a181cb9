"""A routing to start from: what a test does not name is off."""

from forge.moe_router import Routing
from forge.moe_router.gate import choose
from forge.moe_router.memory import Memory


def routing(**changes):
    return Routing(**{"num_experts": 4, "top_k": 2, "score": "softmax", "normalize": False, "scale": 1.0,
                      "num_groups": 1, "top_groups": 1, "shared_hidden": 0, "jitter": 0.0, "aux_loss": 0.0,
                      "aux_scope": "batch", "z_loss": 0.0, "balance": "none", "bias_rate": 0.001, "threshold": 2.0,
                      "load_decay": 0.9, "balance_from": 0, "balance_ramp": 1, "capacity_factor": None, **changes})


def chosen(x, valid, gate, how, training=True, **known):
    """`choose`, of a mixture that remembers what is named, and else nothing."""
    return choose(x, valid, gate, how, Memory.empty(how.num_experts)._replace(**known), training)
