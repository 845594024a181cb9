"""What the frame costs: forge's trainer against a bare loop of the same model, optimizer and data.

    python scripts/frame_cost.py [blocks=8] [steps=20] [out=FILE] [settings as for forge.train ...]

Both sides run in this process, in turns of `steps` updates (A B B A ...), each on its own copy of the model; the
first turn of each is dropped. Prints the median time of an update of each side, and the ratio with its spread.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir

from forge.config import Config, check, conf_dir, realise
from forge.words import reporting, take


def main() -> None:
    asked, overrides = take({"blocks": 8, "steps": 20, "out": ""}, sys.argv[1:])
    with initialize_config_dir(conf_dir(), version_base="1.3"), tempfile.TemporaryDirectory() as folder:
        quiet = ["evaluation=none", "snapshot=none", "tracker=[]", f"run_dir={folder}", "steps=1000000"]
        config = realise(compose("train", [*quiet, *overrides]))
        check(config)
        os.environ.update(config.hardware.environment())
        result = compare(config, Path(folder), asked["blocks"], asked["steps"])
    print(json.dumps({"overrides": overrides, **result}, indent=1))
    if asked["out"]:
        Path(asked["out"]).write_text(json.dumps({"overrides": overrides, **result}, indent=1))


def compare(config: Config, folder: Path, blocks: int, steps: int) -> dict:
    """Milliseconds an update, of each turn of each side."""
    import torch

    from forge.build import build

    with config.hardware.claim() as topology, build(config, topology, folder) as (trainer, run):
        def of_forge() -> Iterator[None]:
            for step in trainer.steps(10**9):
                for observe in run.observers:
                    trainer.ask(observe(step))
                yield

        sides = {"bare": bare(config, topology.device), "forge": of_forge()}
        wait: Callable[[], None] = torch.cuda.synchronize if topology.device.type == "cuda" else lambda: None
        for side in sides.values():
            turn(side, 2 * steps, wait)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for block in range(blocks):
            for name in (list(sides) if block % 2 == 0 else list(sides)[::-1]):
                times[name].append(turn(sides[name], steps, wait))
        device = torch.cuda.get_device_name() if topology.device.type == "cuda" else "cpu"
    ratios = sorted(ours / theirs for ours, theirs in zip(times["forge"], times["bare"], strict=True))
    return {"device": device, "torch": torch.__version__,
            "ms": {name: median(values) for name, values in times.items()},
            "ratio": {"median": median(ratios), "low": ratios[0], "high": ratios[-1]}, "turns": times}


def bare(config: Config, device) -> Iterator[None]:
    """The loop as a person would write it by hand."""
    import torch

    from forge.batch import Cursor
    from forge.build import build_feed, build_model
    from forge.hardware import Topology

    topology = Topology(device, 0, 0, 1)
    feed = build_feed(config, topology)
    model = build_model(config, topology)
    decay = [weight for weight in model.parameters() if weight.dim() >= 2]
    rest = [weight for weight in model.parameters() if weight.dim() < 2]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)
    cursor = Cursor()
    while True:
        work = feed[cursor]
        for batch in work.batches:
            if device.type == "cuda":
                batch = batch.pin_memory()
            batch = batch.to(device)
            with config.precision.autocast(device):
                loss, _, _ = model(batch, torch.full((), 1 / work.num_targets, device=device))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        cursor = work.cursor
        yield


def turn(side: Iterator[None], steps: int, wait: Callable[[], None]) -> float:
    """Milliseconds an update, over `steps` of them."""
    wait()
    begun = time.perf_counter()
    for _ in range(steps):
        next(side)
    wait()
    return (time.perf_counter() - begun) / steps * 1e3


def median(values: list[float]) -> float:
    ranked = sorted(values)
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2


if __name__ == "__main__":
    with reporting():
        main()
