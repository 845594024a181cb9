"""model: one decoder-only transformer, whose settings make it GPT-2, Llama, Mixtral, OLMoE or Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forge.errors import ForgeError
from forge.model import Parts
from forge.moe_router import Routing
from forge.operators import Activation, Norm

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config

Family = Literal["gpt2", "llama", "mixtral", "olmoe", "qwen3_moe"]
QKNorm = Literal["none", "head", "width"]


@dataclass(frozen=True)
class Llama3Scaling:
    """Longer contexts from shorter training (Llama 3.1): slow rotations are slowed by `factor`, fast ones kept.

    Wavelengths above original_max_length / low_freq_factor tokens are slow, those below
    original_max_length / high_freq_factor fast, and those between blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021), the two halves of a head rotated against each other.

    base: the slowest rotation takes about 2 pi * base tokens.
    """

    base: float
    scaling: Llama3Scaling | None


@dataclass(frozen=True)
class Decoder:
    """A stack of blocks: x + attention(norm(x)), then x + feed_forward(norm(x)).

    width: of the hidden stream. kv_heads: heads of keys and values, each shared by heads / kv_heads query heads.
    head_width: of one head; heads * head_width need not be width. hidden: of the feed-forward, or of one expert.
    rotary: null: learned positions instead. max_length: rows of learned positions; for rotary it is only written down.
    biases: of the linear layers in attention and feed-forward (experts and head have none).
    fused_qkv: queries, keys and values are one product; false: three, with the same weight's rows.
    qk_norm: RMS norm of queries and keys, over each head or over the width of all heads. clip_qkv: their largest size.
    window: a token sees itself and the window - 1 before it; null: all before it.
    tied: the head's weight is the embedding's. dropout: of embedding, attention weights and both residual branches.
    init_std: of the normal distribution weights are drawn from; what is added to the hidden stream is drawn with
        init_std / sqrt(2 * layers) (GPT-2). routing: null: a dense feed-forward.
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
    biases: bool
    fused_qkv: bool
    qk_norm: QKNorm
    clip_qkv: float | None
    window: int | None
    tied: bool
    dropout: float
    init_std: float
    routing: Routing | None
    family: Family
    weights: str | None

    def build(self, parts: Parts) -> nn.Module:
        from forge.model.network import initialised
        from forge.model.weights import load_weights

        network = initialised(self, parts)
        if self.weights is not None:
            load_weights(network, self, Path(self.weights))
        return network

    def unused(self) -> dict[str, str]:
        return {} if self.routing is not None else {"moe_router": "has no experts"}

    def problems(self, config: Config) -> Iterator[str]:
        yield from self._sizes()
        if self.routing is not None:
            yield from self._routing(self.routing)
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
        if self.rotary is not None and self.head_width % 2:
            yield f"model.head_width={self.head_width} is odd, and rotary positions turn pairs: make it even."
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

    def _weights(self, folder: Path) -> Iterator[str]:
        from forge.model.huggingface import disagreements

        try:
            yield from disagreements(self, folder)
        except ForgeError as error:
            yield f"model.weights={folder}: {error}"

