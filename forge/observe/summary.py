"""What is said at the end of a run, on the terminal and in report.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.config import Config

MEANING = {"data_wait": "waiting for data", "copy": "copy to the device", "forward": "forward and loss",
           "backward": "backward (with sync)", "passes": "forward and backward, one graph",
           "optimizer": "update", "other": "everything else"}

UTILISATION = {"mfu": "MFU by convention", "mfu_exact": "exactly causal", "hfu": "executed (HFU)"}


def print_summary(result: dict[str, Any], run_dir: Path) -> None:
    """To the terminal: the losses, a sample, where the time went, and where everything is."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for line in _losses(result):
        console.print(line, soft_wrap=True)
    if result.get("sample"):
        console.print(f"\nA sample:\n[dim]{escape(result['sample'])}[/dim]\n", soft_wrap=True)
    if any(result["phases_ms"].values()):
        table = Table(title="Where a step's time went", title_justify="left")
        table.add_column("phase")
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
        for name, ms, share in _shares(result):
            table.add_row(name, ms, share)
        console.print(table)
    if result["status"] == "stopped":
        console.print(f"Stopped after step {result['steps']}."
                      + (f" Go on: python -m forge.train resume={run_dir}" if result.get("snapshot") else ""),
                      soft_wrap=True, highlight=False)
    for name, place in _places(result, run_dir):
        console.print(f"{name:12} {place}", soft_wrap=True, highlight=False)


def write_report(path: Path, result: dict[str, Any], config: Config) -> None:
    """report.md: the same facts, and which options made them."""
    lines = [f"# {path.parent.name}: {result['status']} after {result['steps']} steps", "", *_losses(result), ""]
    if any(result["phases_ms"].values()):
        lines += ["## Where a step's time went", "", "| phase | ms | share |", "|---|---:|---:|"]
        lines += [f"| {' | '.join(row)} |" for row in _shares(result)] + [""]
    if result.get("sample"):
        lines += ["## A sample", "", *(f"    {line}" for line in result["sample"].splitlines()), ""]
    lines += ["## Options", "", "| group | option |", "|---|---|"]
    lines += [f"| {group} | {option} |" for group, option in config.choices.items()]
    lines += ["", "## Where it ran", "", f"{result['device']['count']} x {result['device']['name']}; "
              + ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number), "",
              "Run it again: `python -m forge.train from=" + str(path.parent) + "`", ""]
    path.write_text("\n".join(lines))


def _losses(result: dict[str, Any]) -> list[str]:
    lines = []
    if result["loss_last"] is not None:
        lines.append(f"Training loss {result['loss_first']:.4f} at the first step, {result['loss_last']:.4f} at the "
                     f"last ({result['steps']}).")
    if result.get("loss_heldout") is not None:
        unit = "nats a byte" if result.get("loss_trigram") is not None else "nats a token"
        beside = (f"; a byte-trigram model reaches {result['loss_trigram']:.4f}"
                  if result.get("loss_trigram") is not None else "")
        lines.append(f"Held-out loss {result['loss_heldout']:.4f} {unit}{beside}.")
    if result.get("exact") is not None:
        kinds = ", ".join(f"{name.removeprefix('exact_')} {share:.1%}" for name, share in result.items()
                          if name.startswith("exact_"))
        lines.append(f"Answered exactly: {result['exact']:.1%} of the held-out samples{kinds and f' ({kinds})'}.")
    if result["tokens_per_second"] is not None:
        padded = f", beside {result['padding_share']:.1%} padding" if result["padding_share"] else ""
        lines.append(f"{result['tokens_per_second']:,.0f} tokens/s{padded}; "
                     f"peak memory {result['peak_memory_bytes'] / 1e9:.2f} GB.")
    lines += list(_dropped(result["dropped"] or {}))
    shares = [f"{name} {result[key]:.1%}" for key, name in UTILISATION.items() if result[key] is not None]
    if shares:
        lines.append(f"Of the peak of {'the device' if result['device']['count'] == 1 else 'all devices'}: "
                     f"{', '.join(shares)}.")
    return lines


def _dropped(dropped: dict[str, Any]) -> Iterator[str]:
    for when, of in (("opening", "Left out when shards were opened"), ("reading", "Bad when they were read")):
        reasons = [f"{sum(shards.values()):,} for {reason} (most in {max(shards, key=lambda shard: shards[shard])})"
                   for reason, shards in dropped.get(when, {}).items()]
        if reasons:
            among = f", of {dropped['samples_read']:,} samples" if when == "reading" else ""
            yield f"{of}{among}: {'; '.join(reasons)}."


def _shares(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    phases = {name: ms for name, ms in result["phases_ms"].items() if ms is not None}
    whole = sum(phases.values())
    rows = [(MEANING.get(name, name), f"{ms:.2f}", f"{ms / whole:.1%}") for name, ms in phases.items()]
    return [*rows, ("a step", f"{whole:.2f}", "100.0%")]


def _places(result: dict[str, Any], run_dir: Path) -> list[tuple[str, str]]:
    places = [("Report", str(run_dir / "report.md")), ("Figures", str(run_dir / "metrics.jsonl")),
              ("TensorBoard", result.get("tensorboard")), ("Snapshot", result.get("snapshot"))]
    return [(name, place) for name, place in places if place]
