"""What scripts/measure_gpu.sh measured, in one table, and the curves of the mixtures of experts in a picture.

    python scripts/measured.py OUT

A figure that is not there is a dash; nothing is computed that no record holds, but MFU of the product rate that
bench=micro measured in the same OUT.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def main() -> None:
    out = Path(sys.argv[1])
    rows = [[name, seconds_of(out, name), code, figure] for name, code in codes(out) for figure in figures(out, name)]
    width = [max(len(row[place]) for row in [["what", "s", "exit", ""], *rows]) for place in range(3)]
    lines = ["  ".join([*(cell.ljust(size) for cell, size in zip(row, width, strict=False)), row[3]]).rstrip()
             for row in [["what", "s", "exit", "figures"], *rows]]
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw(out)


def codes(out: Path) -> list[tuple[str, str]]:
    """(name, exit code), in the order they ended in."""
    files = sorted(out.glob("*.code"), key=lambda path: path.stat().st_mtime)
    return [(file.stem, file.read_text().strip()) for file in files]


def seconds_of(out: Path, name: str) -> str:
    file = out / f"{name}.seconds"
    return file.read_text().strip() if file.exists() else "-"


def figures(out: Path, name: str) -> list[str]:
    """One line or several; the last line of the log where there is no record."""
    record = read(out / name / "result.json")
    if record is None:
        log = out / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return [lines[-1][:160] if lines else "-"]
    schema = record.get("schema", "")
    if schema.startswith("forge.verify/"):
        return [f"{record['verdict']}: {record['reason']}"[:200]]
    if schema.startswith("forge.bench/"):
        return {"experts": experts, "micro": micro, "telemetry": telemetry, "augment": augment}.get(
            record["mode"], compared)(record) or \
            [str(record.get("reason"))]
    return [run(record, out)]


def read(path: Path) -> Record | None:
    try:
        found: Record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def run(record: Record, out: Path) -> str:
    return ", ".join([
        f"{text(record['tokens_per_second'], ',.0f')} tokens/s",
        f"step {text(dig(record, 'step_ms', 'median'), '.1f')} ms",
        f"MFU {text(record['mfu'], '.1%')}, of the measured rate {text(of_measured(record['mfu'], out), '.1%')}",
        f"{text(record['peak_memory_bytes'], '.1f', 1e9)} GB",
        f"loss {text(record['loss_first'], '.3f')} -> {text(record['loss_last'], '.3f')}",
        f"{record['steps']} steps, {record['status']}"])


def of_measured(mfu: float | None, out: Path) -> float | None:
    record = read(out / "micro/result.json") or {}
    peak = dig(record, "device", "peak_flops")
    best = max((row.get("flops_per_second") or 0 for row in record.get("rows", [])), default=0)
    return mfu * peak / best if mfu is not None and peak and best else None


def experts(record: Record) -> list[str]:
    lines = []
    for row in record["rows"]:
        shown = row.get("shown", {})
        if row["status"] != "measured":
            lines.append(f"{row['family']}: {row['name']}: {row['status']}: {row.get('reason')}"[:200])
            continue
        told = [f"{column} {shown[column]}" for column in ("over dense", "over sorted", "over floor", "overhead ms",
                                                           "skewed", "losses", "first call s", "of least", "error",
                                                           "repeats")
                if column in shown]
        said = f": {row['reason']}" if row.get("reason") else ""        # at which rates a floor is
        lines.append(f"{row['family']}: {row['name']}: {', '.join([shown.get('ms', '-') + ' ms', *told])}{said}")
    return lines


def micro(record: Record) -> list[str]:
    best = max(record["rows"], key=lambda row: row.get("flops_per_second") or 0, default=None)
    return [f"best product {best['name']}: {text(best.get('flops_per_second'), '.0f', 1e12)} TFLOP/s"] if best else []


def telemetry(record: Record) -> list[str]:
    return [f"{row['name']}: {row['with_ms']:.3f} ms with, {row['without_ms']:.3f} without: {row['verdict']} of a step "
            f"of 20 ms" for row in record["rows"]]


def augment(record: Record) -> list[str]:
    return [f"{row['family']}, {row['name']}: {text(row.get('pictures_per_second'), ',.0f')} pictures/s"
            for row in record["rows"]]


def compared(record: Record) -> list[str]:
    floor = f"noise floor {text(record.get('floor'), '.2%')}"
    return [floor, *(
        f"{row['name']}: {text(row.get('tokens_per_second'), ',.0f')} tokens/s, gain {gain(row.get('gain'))}"
        + (f", over the first {gain(row['over_first'])}" if row.get("over_first") else "")
        + f", {text(row.get('peak_memory_bytes'), '.1f', 1e9)} GB, start {text(row.get('startup_seconds'), '.1f')} s"
        + f" ({row.get('verdict') or row['status']})" for row in record["rows"])]


def gain(found: Record | None) -> str:
    if not found:
        return "-"
    bounds = "" if found["low"] is None else f" [{found['low']:+.2%}, {found['high']:+.2%}]"
    return f"{found['estimate']:+.2%}{bounds}"


def text(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:{form}}"


def dig(record: Any, *names: str) -> Any:
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def draw(out: Path) -> None:
    """moe_train.png: the losses by step and by time, where matplotlib is installed and there is more than one point."""
    curves = {}
    for folder in sorted(out.glob("moe_*")):
        file = folder / "metrics.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        points = [(one["step"], one["time"], one["loss"]) for one in records if one.get("loss") is not None]
        if len(points) > 1:
            curves[re.sub("^moe_", "moe_router=", folder.name)] = points
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not curves:
        return
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for name, points in curves.items():
        by_step.plot([step for step, _, _ in points], [loss for *_, loss in points], label=name)
        by_time.plot([moment - points[0][1] for _, moment, _ in points], [loss for *_, loss in points], label=name)
    by_step.set(xlabel="updates", ylabel="loss, nats a token")
    by_time.set(xlabel="seconds since the first record")
    by_step.legend()
    figure.savefig(out / "moe_train.png", dpi=120)


if __name__ == "__main__":
    main()
