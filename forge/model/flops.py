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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.model.decoder import Decoder
    from forge.model.vision import Vision

BOTH_WAYS = 3           # backward is two products for each of forward: the gradients of its input and of its weight


@dataclass(frozen=True)
class Forward:
    """One forward pass, per token, over all layers.

    projections: to queries, keys, values and gates, and out of attention.
    gate: scores of all experts; 0 in dense models.
    up, down: of the feed-forward (with swiglu, up is two), or of the experts that a token goes to, a shared one too.
    dense_down: of `down`, the part in blocks without experts.
    head: logits. scores_per_key, values_per_key: product with a key, and its share of the weighted sum of values, for
        each key that a token looks at.
    picture: of one picture, through the tower and the projector, all layers; 0 where the model sees none.
    layers: of the model. routed: the feed-forward is a mixture of experts, in blocks without dense_layers of them.
    """

    projections: float
    gate: float
    up: float
    down: float
    dense_down: float
    head: float
    scores_per_key: float
    values_per_key: float
    picture: float
    layers: int
    dense_layers: int
    routed: bool

    @property
    def attention_per_key(self) -> float:
        return self.scores_per_key + self.values_per_key

    @property
    def in_blocks(self) -> float:
        """The products with weights in all blocks."""
        return self.projections + self.gate + self.up + self.down


def forward_of(decoder: Decoder) -> Forward:
    routing, dense, ups = decoder.routing, decoder.dense_layers, 2 if decoder.activation == "swiglu" else 1
    routed = decoder.layers - dense
    product = 2.0 * decoder.width                           # of `width` numbers with a matrix of one column
    dense_hidden = dense * (decoder.hidden if decoder.dense_first is None else decoder.dense_first.hidden)
    chosen = 0 if routing is None else routed * (routing.top_k * decoder.hidden)
    shared = 0 if routing is None else routed * routing.shared_hidden
    keys = decoder.layers * decoder.heads * decoder.head_width
    return Forward(
        projections=decoder.layers * _projections(decoder),
        gate=0.0 if routing is None else product * routed * routing.num_experts,
        up=product * ups * (dense_hidden + chosen + shared),
        down=product * (dense_hidden + chosen + shared), dense_down=product * dense_hidden,
        head=product * decoder.vocab_size,
        scores_per_key=2.0 * keys, values_per_key=2.0 * decoder.layers * _values(decoder),
        picture=0.0, layers=decoder.layers, dense_layers=dense, routed=routing is not None)


def _projections(decoder: Decoder) -> float:
    """Of one layer."""
    queries, keys = decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
    if decoder.latent is None:
        gates = {"none": 0, "head": decoder.heads, "element": queries}[decoder.attention_gate]
        return 2.0 * decoder.width * (2 * queries + 2 * keys + gates)
    latent = decoder.latent
    to_queries = decoder.width * queries if latent.q_rank is None else latent.q_rank * (decoder.width + queries)
    plain_keys = decoder.heads * (decoder.head_width - latent.rotary_width)
    from_latent = latent.kv_rank * (plain_keys + _values(decoder))
    to_latent = decoder.width * (latent.kv_rank + latent.rotary_width)
    return 2.0 * (to_queries + to_latent + from_latent + decoder.width * _values(decoder))


def _values(decoder: Decoder) -> int:
    """Width of the values of all query heads together."""
    return decoder.heads * (decoder.head_width if decoder.latent is None else decoder.latent.value_width)


def seeing(forward: Forward, vision: Vision, width: int) -> Forward:
    """The same for a decoder of this width behind a tower and a projector."""
    patches = vision.patches_per_side**2
    of_patches = 2.0 * patches * 3 * vision.patch_size**2 * vision.width
    products = 4 * vision.width**2 + 2 * vision.width * vision.hidden
    scores_and_values = 2 * vision.length * vision.width
    in_blocks = 2.0 * vision.layers * vision.length * (products + scores_and_values)
    joined = vision.width * vision.shuffle**2
    projected = 2.0 * vision.tokens_per_picture * width * (joined if vision.order == "idefics" else joined + width)
    return replace(forward, picture=of_patches + in_blocks + projected)


def convention(forward: Forward, sequence_length: float, pictures: float = 0.0) -> float:
    """Forward and backward where each token looks at its whole row: the numerator of the MFU that others publish."""
    return exact(forward, sequence_length, pictures)


def exact(forward: Forward, keys: float, pictures: float = 0.0) -> float:
    """Forward and backward where a token looks at `keys` tokens on average: nothing hidden, nothing twice.

    pictures: for each token. The pixels' own gradient, which nobody wants, is counted: some thousandths of the tower.
    """
    in_decoder = forward.in_blocks + forward.head + forward.attention_per_key * keys
    return BOTH_WAYS * (in_decoder + forward.picture * pictures)


def mean_keys(length: int, window: int | None) -> float:
    """Tokens that a causal token looks at on average, in a row of `length`: the mean of min(place, window)."""
    seen = min(window or length, length)
    return seen - seen * (seen - 1) / (2 * length)


@dataclass(frozen=True)
class Execution:
    """How the chosen options compute the model.

    computed_keys: keys a token for which scores are computed; hidden ones too, where the kernel does not skip them.
    scores_again: backward computes the scores anew, as fused kernels do.
    narrow_values: values that are narrower than keys are computed so, and not padded.
    head_products: matrix products of the head, forward and backward: 3, or 4 where the loss throws logits away.
    share_again: of the blocks, how many run forward twice (checkpointing).
    products_again, attention_again: whether those blocks repeat products with weights, and attention.
    down_again: whether they repeat the last product of a dense feed-forward too. Backward needs its result only where
        something behind it does: dropout. Behind that of experts are their weights, and of a shared one the experts.
    """

    computed_keys: float
    scores_again: bool
    narrow_values: bool
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
    scores = forward.scores_per_key * how.computed_keys
    attention = scores + (forward.values_per_key * how.computed_keys if how.narrow_values else scores)
    total = BOTH_WAYS * forward.in_blocks + how.head_products * forward.head
    total += BOTH_WAYS * attention + (scores if how.scores_again else 0.0)      # 2 + 5 products for 2 + 4 (Dao 2023)
    if how.products_again:
        total += how.share_again * (forward.in_blocks - (0.0 if how.down_again else forward.dense_down))
    if how.attention_again:
        total += how.share_again * attention
    return total
