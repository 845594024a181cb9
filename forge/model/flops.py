"""How many floating-point operations a decoder's training takes: every formula, term by term, in this one place.

Only matrix products are counted, a multiply and its add as two operations. Embeddings are looked up, and norms,
activations, softmax and the update are some thousandths of the rest. All figures are per token.

Three questions have three answers:

* convention(): what others publish. 6 N + 12 L H d S: each token looks at all S tokens of its row (Chowdhery et al.
  2022, PaLM, appendix B; nanoGPT and torchtitan count so). N: the weights in products, with the head, of experts only
  the chosen ones.
* exact(): what the model asks for. A causal token looks at (S + 1) / 2 on average, in a window or a document at fewer.
* executed(): what the chosen options compute for that, repetitions and hidden pairs included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.model.decoder import Decoder

BOTH_WAYS = 3           # backward is two products for each of forward: the gradients of its input and of its weight
SCORES_AGAIN = 3.5      # fused kernels compute the scores anew in backward: 2 + 5 products for 2 + 4 (Dao 2023)


@dataclass(frozen=True)
class Forward:
    """One forward pass, per token, over all layers.

    projections: to queries, keys and values, and out of attention. gate: scores of all experts; 0 in dense models.
    up, down: of the feed-forward (with swiglu, up is two), or of the experts that a token goes to, a shared one too.
    head: logits. attention_per_key: score and weighted sum, for each key that a token looks at.
    layers: of the model. routed: the feed-forward is a mixture of experts.
    """

    projections: float
    gate: float
    up: float
    down: float
    head: float
    attention_per_key: float
    layers: int
    routed: bool

    @property
    def in_blocks(self) -> float:
        """The products with weights in all blocks."""
        return self.projections + self.gate + self.up + self.down


def forward_of(decoder: Decoder) -> Forward:
    heads = decoder.heads * decoder.head_width
    keys = decoder.kv_heads * decoder.head_width
    routing = decoder.routing
    hidden = decoder.hidden if routing is None else routing.top_k * decoder.hidden + routing.shared_hidden
    ups = 2 if decoder.activation == "swiglu" else 1
    product = 2.0 * decoder.layers * decoder.width          # of `width` numbers with a matrix of one column, each layer
    return Forward(
        projections=product * (2 * heads + 2 * keys),
        gate=0.0 if routing is None else product * routing.num_experts,
        up=product * hidden * ups,
        down=product * hidden,
        head=2.0 * decoder.width * decoder.vocab_size,
        attention_per_key=4.0 * decoder.layers * heads,
        layers=decoder.layers, routed=routing is not None)


def convention(forward: Forward, sequence_length: int) -> float:
    """Forward and backward where each token looks at its whole row: the numerator of the MFU that others publish."""
    return exact(forward, sequence_length)


def exact(forward: Forward, keys: float) -> float:
    """Forward and backward where a token looks at `keys` tokens on average: nothing hidden, nothing twice."""
    return BOTH_WAYS * (forward.in_blocks + forward.head + forward.attention_per_key * keys)


def mean_keys(length: int, window: int | None) -> float:
    """Tokens that a causal token looks at on average, in a row of `length`: the mean of min(place, window)."""
    seen = min(window or length, length)
    return seen - seen * (seen - 1) / (2 * length)


@dataclass(frozen=True)
class Execution:
    """How the chosen options compute the model.

    computed_keys: keys a token for which scores are computed; hidden ones too, where the kernel does not skip them.
    scores_again: backward computes the scores anew, as fused kernels do.
    head_products: matrix products of the head, forward and backward: 3, or 4 where the loss throws logits away.
    share_again: of the blocks, how many run forward twice (checkpointing).
    products_again, attention_again: whether those blocks repeat products with weights, and attention.
    down_again: whether they repeat their last product too. Backward needs its result only where something behind it
        does: the weights of experts, or dropout.
    """

    computed_keys: float
    scores_again: bool
    head_products: int
    share_again: float
    products_again: bool
    attention_again: bool
    down_again: bool


def executed(forward: Forward, how: Execution) -> float:
    """What is computed, forward and backward: the numerator of HFU (Korthikanti et al. 2022, who count what
    checkpointing repeats; here what kernels and losses repeat as well).

    Tiles on the edge of a mask, and padding inside a kernel, are not counted: they are the kernel's own.
    """
    attention = forward.attention_per_key * how.computed_keys
    total = BOTH_WAYS * forward.in_blocks + how.head_products * forward.head
    total += attention * (SCORES_AGAIN if how.scores_again else BOTH_WAYS)
    if how.products_again:
        total += how.share_again * (forward.in_blocks - (0.0 if how.down_again else forward.down))
    if how.attention_again:
        total += how.share_again * attention
    return total
