"""python -m forge.sample from=RUN prompt="def " [length=200] [temperature=0.8] [top_k=40] [seed=0]

Continues a text with the model of a run. Other words override settings of the run, as for forge.train.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, Exit
from forge.words import packages, reporting, split, take

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge.config import Config

SETTINGS: dict[str, Any] = {"prompt": "def ", "length": 200, "temperature": 0.8, "top_k": 40, "seed": 0}


def main() -> None:
    with reporting():
        sys.exit(sample(sys.argv[1:]))


def sample(arguments: list[str]) -> Exit:
    """Print the prompt and its continuation. Raises ForgeError."""
    own, rest = split(arguments)
    if "from" not in own:
        raise ConfigError(f"from= is missing: name a run directory.\n{__doc__}")
    asked, overrides = take(SETTINGS, rest)
    for name, least in (("length", 1), ("temperature", 0.0), ("top_k", 1)):
        if asked[name] < least:
            raise ConfigError(f"{name}={asked[name]}: at least {least} is wanted.")
    from forge.restore import restored

    with restored(Path(own["from"]), overrides, packages(own)) as run:
        print(continue_text(run.model, run.config, run.topology.device, **asked))
    return Exit.ANSWERED


def continue_text(model: nn.Module, config: Config, device: torch.device, prompt: str, length: int,
                  temperature: float, top_k: int, seed: int) -> str:
    """`prompt` and up to `length` tokens after it, drawn from the model; temperature 0 takes the likeliest.

    It stops early where the model ends the document. The global random state is left as it is.
    """
    import torch

    from forge.batch import Batch
    from forge.data.tokenizer import open_tokenizer
    from forge.evaluation.loss import as_in_evaluation

    tokenizer = open_tokenizer(config.data.tokenizer)
    tokens = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    draws = torch.Generator().manual_seed(seed)
    # Every length would be compiled anew, for one pass each.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, as_in_evaluation(model), config.precision.autocast(device):
        for _ in range(length):
            seen = torch.tensor([tokens[-config.sequence_length:]], device=device)
            logits = model.logits(Batch({"tokens": seen}, 0, seed))[0, -1].float().cpu()     # type: ignore[operator]
            token = _draw(logits[:tokenizer.vocab_size], temperature, top_k, draws)
            if token == tokenizer.end:
                break
            tokens.append(token)
    return tokenizer.decode(tokens)


def _draw(logits: torch.Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    import torch

    if temperature == 0:
        return int(logits.argmax())
    best, ids = logits.topk(min(top_k, len(logits)))
    return int(ids[torch.multinomial((best / temperature).softmax(0), 1, generator=draws)])


if __name__ == "__main__":
    main()
