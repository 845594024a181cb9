"""A routing to start from: what a test does not name is off."""

import torch

from forge.moe_router import Routing


def routing(**changes):
    return Routing(**{"num_experts": 4, "top_k": 2, "score": "softmax", "normalize": False, "scale": 1.0, "groups": 1,
                      "top_groups": 1, "shared_hidden": 0, "jitter": 0.0, "aux_loss": 0.0, "aux_scope": "batch",
                      "z_loss": 0.0, "balance": "none", "bias_rate": 0.001, "threshold": 2.0, "load_decay": 0.9,
                      "balance_from": 0, "balance_ramp": 1, "capacity_factor": None, **changes})


def past(how, **known):
    """What a mixture remembers: nothing, but for what is named."""
    from forge.moe_router.gate import Past  # which registers what decides

    zeros = torch.zeros(how.num_experts)
    return Past(**{"bias": zeros, "average": zeros, "updates": torch.zeros(()), "seen": zeros, **known})


def chosen(x, valid, gate, how, training=True, **known):
    """`choose`, of a mixture that remembers what is named."""
    from forge.moe_router.gate import choose

    return choose(x, valid, gate, how, past(how, **known), training)
