"""How a model writes: what a run shows at its end, and forge.sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge.config import Config

SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 40}        # readable from a small model


def continue_text(model: nn.Module, config: Config, device: torch.device, prompt: str, length: int,
                  temperature: float, top_k: int, seed: int) -> str:
    """`prompt` and up to `length` tokens after it, drawn from the model; temperature 0 takes the likeliest.

    It stops early where the model ends the document. The global random state is left as it is. All ranks call it,
    since the model may be spread over them, and go on with what the first one draws.
    """
    import torch

    from forge.agreement import of_first
    from forge.batch import Batch
    from forge.data.tokenizer import open_tokenizer
    from forge.observe.evaluate import as_in_evaluation

    tokenizer = open_tokenizer(config.data.tokenizer)
    tokens = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    draws = torch.Generator().manual_seed(seed)
    # Every length would be compiled anew, for one pass each.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, as_in_evaluation(model), config.precision.autocast(device):
        for _ in range(length):
            seen = torch.tensor([tokens[-config.sequence_length:]], device=device)
            logits = model.logits(Batch({"tokens": seen}, 0, seed))[0, -1].float().cpu()     # type: ignore[operator]
            token = of_first(_draw(logits[:tokenizer.vocab_size], temperature, top_k, draws), device)
            if token == tokenizer.end:
                break
            tokens.append(token)
    return tokenizer.decode(tokens)


def _draw(logits: torch.Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    import torch

    if temperature == 0:
        return int(logits.argmax())
    best, ids = logits.topk(min(top_k, len(logits)))
    return int(ids[torch.multinomial(((best - best.max()) / temperature).softmax(0), 1, generator=draws)])
