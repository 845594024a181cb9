"""The tables, out of the rows."""

import pytest

from forge.bench.report import notes, tables

FIGURES = {"status": "measured", "verdict": None, "step_ms": 10.0, "peak_memory_bytes": None, "mfu": None,
           "startup_seconds": 1.0}


def phases(*rows):
    """The last table of rows with these phases: (columns, rows)."""
    made = [{**FIGURES, "name": f"arm {place}", "phases_ms": row} for place, row in enumerate(rows)]
    return tables({"mode": "ablation", "rows": made})[-1]


def test_every_phase_that_a_row_has_is_a_column():
    graphed = {"data_wait": 0.5, "passes": 9.0, "optimizer": 0.5}
    columns, rows = phases({"backward": 6.0, "data_wait": 0.5, "forward": 3.0, "optimizer": 0.5}, graphed)
    assert columns == ["ms of a step", "data", "forward", "backward", "one graph", "update"]
    assert rows == [["arm 0", "0.50", "3.00", "6.00", "-", "0.50"], ["arm 1", "0.50", "-", "-", "9.00", "0.50"]]


def test_a_phase_of_somebody_s_own_is_shown_by_its_name():
    assert phases({"refill": 1.0, "other": 2.0})[0] == ["ms of a step", "other", "refill"]


@pytest.mark.parametrize(("verdict", "said"), [
    ("overlap", "they overlap by 5.0 points."), ("help", "they help each other by 5.0 points."),
    ("not proven", "cannot be told from this noise.")])
def test_switches_together_are_said_to_do_what_is_proven(verdict, said):
    both = {"product_of_singles": 0.25, "all": 0.2, "verdict": verdict}
    (line,) = notes({"rows": [], "overlap": both, "throttling": None, "abstained": False, "status": "finished"})
    assert line.endswith(said) and "+20.00 %" in line and "+25.00 %" in line
