"""model: one decoder-only transformer, which settings make GPT-2, Llama, Qwen, Mixtral, OLMoE or DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forge.errors import ForgeError
from forge.model import Parts
from forge.model.positions import Rotary, YaRN
from forge.moe_router import Routing
from forge.operators import Activation, Norm
from forge.schema import shown

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config

Family = Literal["gpt2", "llama", "qwen2", "qwen3", "mixtral", "olmoe", "qwen3_moe", "dots1", "deepseek_v3"]
Gate = Literal["none", "head", "element"]
QKNorm = Literal["none", "head", "width"]
Biases = bool | Literal["qkv"]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are made from one narrow latent.

    q_rank: width of the latent that queries are made from; null: from the hidden stream itself. kv_rank: of the one of
    keys and values. rotary_width: how much of each head's queries and keys carries positions, that part of the keys
    being one for all heads; the other head_width - rotary_width numbers carry none. value_width: of one head of values.
    eps: of the RMS norms of both latents.
    """

    q_rank: int | None
    kv_rank: int
    rotary_width: int
    value_width: int
    eps: float


@dataclass(frozen=True)
class DenseFirst:
    """The first `layers` blocks have a dense feed-forward of width `hidden` and no experts (DeepSeekMoE, 2024)."""

    layers: int
    hidden: int


@dataclass(frozen=True)
class Decoder:
    """A stack of blocks: x + attention(norm(x)), then x + feed_forward(norm(x)).

    width: of the hidden stream. kv_heads: heads of keys and values, each shared by heads / kv_heads query heads.
    head_width: of one head; heads * head_width need not be width. hidden: of the feed-forward, or of one expert.
    rotary: null: learned positions instead. max_length: rows of learned positions; for rotary it is only written down.
    biases: of the linear layers in attention and feed-forward (experts and head have none); qkv: of queries, keys and
        values alone.
    fused_qkv: queries, keys and values are one product; false: three, with the same weight's rows.
    qk_norm: RMS norm of queries and keys, over each head or over the width of all heads. clip_qkv: their largest size.
    attention_gate: what attention gives is multiplied by the sigmoid of a product with its input (Qiu et al. 2025,
        arXiv 2505.06708): by one number a head, or by one each of its numbers.
    window: a token sees itself and the window - 1 before it; null: all before it. latent: null: queries, keys and
        values straight from the hidden stream; else fused_qkv says how the latents are computed.
    tied: the head's weight is the embedding's. dropout: of embedding, attention weights and both residual branches.
    init_std: of the normal distribution weights are drawn from; what is added to the hidden stream is drawn with
        init_std / sqrt(2 * layers) (GPT-2). routing: null: a dense feed-forward. dense_first: null: experts in all
        blocks.
    family: whose Hugging Face layout is read and written. weights: such a folder, to start from; null: random.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    norm: Norm
    eps: float
    rotary: Rotary | None
    max_length: int
    activation: Activation
    biases: Biases
    fused_qkv: bool
    qk_norm: QKNorm
    clip_qkv: float | None
    attention_gate: Gate
    window: int | None
    latent: Latent | None
    tied: bool
    dropout: float
    init_std: float
    routing: Routing | None
    dense_first: DenseFirst | None
    family: Family
    weights: str | None

    def build(self, parts: Parts) -> nn.Module:
        from forge.model.weights import load_weights

        network = self._drawn(parts)
        if self.weights is not None:
            load_weights(network, self, Path(self.weights))
        return network

    def _drawn(self, parts: Parts) -> nn.Module:
        """A network with random weights."""
        from forge.model.network import initialised

        return initialised(self, parts)

    @property
    def rotated_width(self) -> int:
        """How much of a head of queries and keys the rotation turns."""
        return self.head_width if self.latent is None else self.latent.rotary_width

    @property
    def dense_layers(self) -> int:
        """How many of the first blocks have no experts."""
        if self.routing is None:
            return self.layers
        return 0 if self.dense_first is None else self.dense_first.layers

    def unused(self) -> dict[str, str]:
        from forge.moe_router.limits import idle

        if self.routing is None:
            return {"moe_router": "has no experts"}
        return {f"model.routing.{name}": f"has no effect without {other}" for name, other in idle(self.routing).items()}

    def problems(self, config: Config) -> Iterator[str]:
        yield from self._sizes()
        if self.routing is not None:
            yield from self._routing(self.routing)
        if self.dense_first is not None:
            yield from self._dense_first(self.dense_first)
        if self.latent is not None:
            yield from self._latent(self.latent)
        if self.rotary is None and config.sequence_length > self.max_length:
            yield (f"sequence_length={config.sequence_length} is longer than model.max_length={self.max_length}, the "
                   f"positions this model learns: shorten sequence_length or raise model.max_length.")
        if self.weights is not None:
            yield from self._weights(Path(self.weights))

    def _sizes(self) -> Iterator[str]:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "hidden", "max_length"):
            if not 1 <= getattr(self, name) < 2**31:
                yield f"model.{name}={getattr(self, name)}: at least 1, and less than 2^31, is wanted."
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            yield (f"model.heads={self.heads} is no multiple of model.kv_heads={self.kv_heads}: each head of keys "
                   f"serves the same number of heads.")
        if self.rotary is not None and self.rotated_width % 2:
            name = "head_width" if self.latent is None else "latent.rotary_width"
            yield f"model.{name}={self.rotated_width} is odd, and rotary positions turn pairs: make it even."
        if self.rotary is not None and isinstance(self.rotary.scaling, YaRN):
            yield from self.rotary.scaling.problems(self.latent is not None)
        if self.window is not None and self.window < 1:
            yield f"model.window={self.window}: at least 1 is wanted, or null for all tokens before."
        for name, value in (("init_std", self.init_std), ("eps", self.eps), ("clip_qkv", self.clip_qkv),
                            ("rotary.base", self.rotary.base if self.rotary else None)):
            if value is not None and not value > 0:
                yield f"model.{name}={value}: more than 0 is wanted."
        if not 0 <= self.dropout < 1:
            yield f"model.dropout={self.dropout}: a probability, below 1, is wanted."

    def _routing(self, routing: Routing) -> Iterator[str]:
        yield from routing.problems()
        if self.activation != "swiglu":
            yield (f"model.activation={self.activation}: experts compute swiglu. Set model.activation=swiglu, or "
                   f"model.routing=null for a dense feed-forward.")

    def _dense_first(self, first: DenseFirst) -> Iterator[str]:
        if self.routing is None:
            yield "model.dense_first is set, but all blocks are dense: set model.dense_first=null."
        elif not 1 <= first.layers < self.layers:
            yield (f"model.dense_first.layers={first.layers}: between 1 and model.layers - 1 is wanted, so that some "
                   f"block has experts; for none, set model.dense_first=null.")
        if not 1 <= first.hidden < 2**31:
            yield f"model.dense_first.hidden={first.hidden}: at least 1, and less than 2^31, is wanted."

    def _latent(self, latent: Latent) -> Iterator[str]:
        for name, value in (("q_rank", latent.q_rank), ("kv_rank", latent.kv_rank),
                            ("rotary_width", latent.rotary_width), ("value_width", latent.value_width)):
            if value is not None and not 1 <= value < 2**31:
                yield f"model.latent.{name}={value}: at least 1, and less than 2^31, is wanted."
        if not latent.eps > 0:
            yield f"model.latent.eps={latent.eps}: more than 0 is wanted."
        if latent.rotary_width >= self.head_width:
            yield (f"model.latent.rotary_width={latent.rotary_width} leaves nothing of model.head_width="
                   f"{self.head_width} that carries no positions: make it less.")
        if latent.value_width > self.head_width:
            yield (f"model.latent.value_width={latent.value_width} is more than model.head_width={self.head_width}: "
                   f"attention takes values that are as wide as keys, or narrower.")
        if self.kv_heads != self.heads:
            yield (f"model.kv_heads={self.kv_heads}: with model.latent each head has keys of its own, so set "
                   f"model.kv_heads={self.heads}.")
        if self.rotary is None:
            yield "model.rotary=null: model.latent carries its positions by rotation, so set model.rotary.base."
        for name, none in (("qk_norm", "none"), ("clip_qkv", None), ("attention_gate", "none"), ("biases", False)):
            if getattr(self, name) != none:
                yield (f"model.{name}={shown(getattr(self, name))}: model.latent knows none. "
                       f"Set model.{name}={shown(none)}.")

    def _weights(self, folder: Path) -> Iterator[str]:
        from forge.model.huggingface import disagreements

        try:
            yield from disagreements(self, folder)
        except ForgeError as error:
            yield f"model.weights={folder}: {error}"
