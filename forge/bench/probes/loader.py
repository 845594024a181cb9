"""How many rows a second the data loader gives, and how many the model takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from forge.batch import Cursor, Work
from forge.bench.probes import Row
from forge.build import build_feed

if TYPE_CHECKING:
    from forge.bench.driver import Driver


def measure(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    """One reader of its own, on this rank's share: first as a run starts, then again over the same rows."""
    run = driver.run
    feed, updates = build_feed(run.config, run.topology), settings["updates"]
    turn = driver.turn(1, max(3, updates // 4))
    rows = feed.global_batch // feed.data_size
    taken = rows * len(turn["lengths"]) / sum(turn["lengths"]) * 1e3
    begun = time.perf_counter()
    reader = run.config.dataloader.build(feed, run.topology)
    try:
        reader.seek(Cursor())
        works = iter(reader)
        _read(next(works))
        first = time.perf_counter() - begun
        table: list[Row] = [{"name": "first update", "seconds": first,
                             "shown": {"": f"{first * 1e3:.1f} ms after asking"}}]
        table.append(_row("as a run reads", [_timed(works) for _ in range(updates)], rows, taken))
    finally:
        reader.close()
    again = run.config.dataloader.build(feed, run.topology)
    try:
        again.seek(Cursor())
        works = iter(again)
        _read(next(works))
        table.append(_row("the same rows again", [_timed(works) for _ in range(updates)], rows, taken))
    finally:
        again.close()
    return table


def _row(name: str, ms: list[float], rows: int, taken: float) -> Row:
    given = rows * len(ms) / sum(ms) * 1e3
    return {"name": name, "rows_per_second": given, "model_rows_per_second": taken, "headroom": given / taken,
            "samples_ms": ms, "shown": {"rows/s": f"{given:,.0f}", "the model takes": f"{taken:,.0f}",
                                        "headroom": f"{given / taken:.1f}x"}}


def _timed(works: Any) -> float:
    begun = time.perf_counter_ns()
    _read(next(works))
    return (time.perf_counter_ns() - begun) / 1e6


def _read(work: Work) -> None:
    for _ in work.batches:
        pass
