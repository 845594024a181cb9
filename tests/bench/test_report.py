"""The tables, out of the rows."""

import pytest

from forge.bench.report import _crossed, _fitted, _shortened, notes, tables

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


def test_a_wide_table_is_cut_between_columns_and_no_cell_is():
    row = ["step_1", "9,000", "+24.00 % [+23.50, +24.60]", "+24.00 % [+23.50, +24.60]", "out of memory"]
    parts = list(_fitted((["", "tokens/s", "gain", "over the first", "verdict"], [row]), 80))
    assert [cell for _, (cells,), _ in parts for cell in cells[1:]] == row[1:] and len(parts) == 2
    assert all(sum(widths) + 3 * len(widths) + 1 <= 80 for *_, widths in parts)
    assert all(len(cell) <= width for _, (cells,), widths in parts for cell, width in zip(cells, widths, strict=True))
    assert len(list(_fitted((["", "tokens/s"], [row[:2]]), 80))) == 1


def test_steps_of_one_folder_are_named_without_it():
    names = lambda *given: [row["name"] for row in _shortened([{"name": name} for name in given])]  # noqa: E731
    assert names("experiment=nine/step_0", "experiment=nine/step_1") == ["step_0", "step_1"]
    assert names("baseline", "experiment=nine/step_1") == ["baseline", "experiment=nine/step_1"]


def test_rows_whose_figures_seem_to_contradict_each_other_are_named():
    rows = [{"name": "baseline", "tokens_per_second": 100.0, "against": None}]
    rows += [{"name": name, "tokens_per_second": rate, "against": "baseline", "gain": {"estimate": 0.1}}
             for name, rate in (("a", 90.0), ("b", 110.0))]
    assert _crossed(rows) == ["a"]
