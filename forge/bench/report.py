"""The tables of a bench, for the terminal and for report.md, out of result.json alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Table = tuple[list[str], list[list[str]]]

NAME_WIDTH = 24         # of names that are wrapped between their words
FRAME = 3               # what the frame adds to a column
WIDTH = 130             # of tables in a file
# phase -> its column, in the order of a step; a phase that is not here has its own name, behind these
PHASES = {"data_wait": "data", "copy": "copy", "forward": "forward", "backward": "backward", "passes": "one graph",
          "optimizer": "update", "other": "other"}


def print_report(result: Result, run_dir: Path) -> None:
    """To the terminal: the table, what it rests on, and where the record is."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for line in head(result):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    for table in tables(result):
        for columns, rows, widths in _fitted(table, console.width):
            grid = Grid()
            for place, (column, width) in enumerate(zip(columns, widths, strict=True)):
                grid.add_column(column, justify="left" if place == 0 else "right", overflow="fold", width=width)
            for row in rows:
                grid.add_row(*(cell.replace("[", r"\[") for cell in row))
            console.print(grid)
    for line in notes(result):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(f"Record  {run_dir / 'result.json'}", soft_wrap=True, highlight=False, markup=False)


def _fitted(table: Table, most: int) -> Iterator[tuple[list[str], list[list[str]], list[int]]]:
    """The table, or, where it is wider than `most` columns of text, several of its columns each under the same names:
    a name or a figure that is cut into pieces cannot be read. With the width of each column."""
    columns, rows = table
    word = max(len(word) for row in rows for word in row[0].split())
    name = min(max(len(row[0]) for row in rows), max(word, NAME_WIDTH), most // 2)
    widths = [min(max(len(column), *(len(row[place]) for row in rows)), most - name - 2 * FRAME - 1)
              for place, column in enumerate(columns)]
    places: list[int] = []
    for place in range(1, len(columns)):
        if places and name + sum(widths[other] for other in [*places, place]) + FRAME * (len(places) + 2) + 1 > most:
            yield _part(table, places, [name, *(widths[other] for other in places)])
            places = []
        places.append(place)
    yield _part(table, places, [name, *(widths[other] for other in places)])


def _part(table: Table, places: list[int], widths: list[int]) -> tuple[list[str], list[list[str]], list[int]]:
    columns, rows = table
    return [columns[place] for place in [0, *places]], [[row[place] for place in [0, *places]] for row in rows], widths


def write_report(path: Path, result: Result) -> None:
    """report.md: the same, and every configuration's words. Raises OSError."""
    lines = [f"# {result['mode']}: {result['status']}", "", *head(result), ""]
    for columns, rows in tables(result):
        lines += [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows] + [""]
    lines += [*(f"* {line}" for line in notes(result)), "", "## What ran", "", "| arm | words |", "|---|---|"]
    lines += [f"| {name} | {' '.join(arm['words']) or '(defaults)'} |" for name, arm in result["arms"].items()]
    lines += ["", "Versions: " + ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number),
              "", "Every step's length, the frozen configurations and the clocks are in result.json.", ""]
    path.write_text("\n".join(lines))


def head(result: Result) -> list[str]:
    """Where it ran, and how small a difference counts."""
    device = result["device"]
    lines = []
    if device:
        name = device["name"] or f"{result['processor']} ({device['threads']} threads)"
        lines.append(f"{device['count']} x {name}, torch {result['versions']['torch']}")
    if result["mode"] == "experts":
        losses = ", ".join(f"{name}={result['settings'][name]:g}" for name in ("aux_loss", "z_loss"))
        lines.append(f"The gate's weights are {result['settings']['gate']}; the column losses is of {losses}")
    if result["mode"] in ("ablation", "path", "aa"):
        lines.append(f"Noise floor (A/A) {percent(result.get('floor'), sign=False)}; smallest gain this run can prove "
                     f"{percent(result.get('smallest_provable_gain'), sign=False)}")
    return lines


def notes(result: Result) -> list[str]:
    """What a reader of the table has to know."""
    lines = [f"{row.get('family', '')} {row['name']}: {' '.join(row['reason'].split())}".strip()
             for row in result["rows"] if row.get("reason")]
    unverified = {row["verify_reason"] for row in result["rows"] if row.get("verify") == "unverified"}
    lines += [f"unverified: {reason}" for reason in sorted(unverified)]
    crossed = _crossed(result["rows"])
    if crossed:
        lines.append(f"tokens/s and gain point in opposite directions at {', '.join(crossed)}: tokens/s of two rows "
                     f"are of different moments, and a gain compares neighbouring turns. The gain counts.")
    if result.get("overlap"):
        lines.append(_together(result["overlap"]))
    if result["throttling"]:
        lines.append(f"The device was slowed down by its {', '.join(result['throttling'])}.")
    disturbed = sum(row.get("disturbed_blocks") or 0 for row in result["rows"])
    if disturbed:
        lines.append(f"{disturbed} blocks were disturbed and do not count (see comparisons in result.json).")
    if result.get("picture_reason"):
        lines.append(result["picture_reason"])
    if result["abstained"]:
        lines.append(f"Not judged: {result['reason']}")
    elif result["status"] != "finished":
        lines.append(f"Not to its end ({result['status']})" + (f": {result['reason']}" if result["reason"] else "."))
    return lines


def _crossed(rows: list[Result]) -> list[str]:
    """The rows that have more tokens/s than what they are held against, and lose by their gain, or the reverse."""
    rates = {row["name"]: row["tokens_per_second"] for row in rows if row.get("tokens_per_second")}
    return [row["name"] for row in rows if row.get("gain") and row["name"] in rates and row["against"] in rates
            and (rates[row["name"]] - rates[row["against"]]) * row["gain"]["estimate"] < 0]


def _shortened(rows: list[Result]) -> list[Result]:
    """The rows of a path whose steps all lie in one folder, under names without it."""
    folders = {row["name"].rpartition("/")[0] for row in rows}
    start = f"{min(folders)}/" if len(folders) == 1 and folders != {""} and " " not in min(folders) else ""
    return [{**row, "name": row["name"].removeprefix(start)} for row in rows]


def _together(both: Result) -> str:
    points = abs(both["product_of_singles"] - both["all"]) * 100
    told = {"overlap": f"they overlap by {points:.1f} points.", "help": f"they help each other by {points:.1f} points."}
    return (f"All switches together gain {percent(both['all'])}; the product of the single gains would be "
            f"{percent(both['product_of_singles'])}: "
            + told.get(both["verdict"], "whether they overlap or help each other cannot be told from this noise."))


def tables(result: Result) -> list[Table]:
    makers: dict[str, Callable[[Result], list[Table]]] = {"telemetry": _telemetry, "micro": _micro, "experts": _micro,
                                                          "augment": _micro}
    return [table for table in makers.get(result["mode"], _compared)(result) if table[1]]


def _compared(result: Result) -> list[Table]:
    """What each arm gains, what it costs, and where its time goes."""
    rows = _shortened(result["rows"])
    first, verified = any("over_first" in row for row in rows), any(row.get("verify") for row in rows)
    measured = any(row.get("mfu_measured") is not None for row in rows)
    gains = [[row["name"], number(row.get("tokens_per_second"), 0), interval(row.get("gain")),
              *([interval(row.get("over_first"))] if first else []), verdict(row),
              *([row.get("verify") or "-"] if verified else [])] for row in rows]
    ran = [row for row in rows if row.get("phases_ms")]
    costs = [[row["name"], number(row["step_ms"], 2), number(row["peak_memory_bytes"], 2, 1e9),
              percent(row["mfu"], sign=False),
              *([percent(row["mfu_measured"], sign=False)] if measured else []), number(row["startup_seconds"], 1)]
             for row in ran]
    there = {phase for row in ran for phase in row["phases_ms"]}
    columns = [*(phase for phase in PHASES if phase in there), *sorted(there - PHASES.keys())]
    phases = [[row["name"], *(number(row["phases_ms"].get(phase), 2) for phase in columns)] for row in ran]
    return [(["", "tokens/s", "gain", *(["over the first"] if first else []), "verdict",
              *(["results"] if verified else [])], gains),
            (["", "step ms", "GB", "MFU", *(["of measured rate"] if measured else []), "start s"], costs),
            (["ms of a step", *(PHASES.get(phase, phase) for phase in columns)], phases)]


def verdict(row: Result) -> str:
    if row["status"] != "measured":
        return str(row["status"])
    return str(row["verdict"] or "-")


def _telemetry(result: Result) -> list[Table]:
    return [(["telemetry", "with, ms a step", "without", "cost, ms", "share of the step", "of a 20 ms step", "verdict"],
             [[row["name"], number(row["with_ms"], 3), number(row["without_ms"], 3), _bounds(row["cost_ms"], 4),
               _bounds(row["share"], 2, 100, " %"), _bounds(row["share_of_20_ms"], 2, 100, " %"), row["verdict"]]
              for row in result["rows"]])]


def _micro(result: Result) -> list[Table]:
    """One table a family, or a shape."""
    made = []
    for family in dict.fromkeys(row["family"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["family"] == family]
        columns = list(dict.fromkeys(name for row in rows for name in row["shown"]))
        made.append(([family, *columns], [[row["name"], *(row["shown"].get(name, "-") for name in columns)]
                                          for row in rows if row["shown"]]))
    return made


def number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def percent(value: float | None, sign: bool = True) -> str:
    return "-" if value is None else f"{value * 100:{'+' if sign else ''}.2f} %"


def interval(gain: Result | None) -> str:
    """+24.0 % [23.5, 24.6]"""
    if gain is None:
        return "-"
    bounds = "" if gain["low"] is None else f" [{gain['low'] * 100:+.2f}, {gain['high'] * 100:+.2f}]"
    return percent(gain["estimate"]) + bounds


def _bounds(value: Result, digits: int, scale: float = 1.0, unit: str = "") -> str:
    estimate, low, high = (value[name] * scale for name in ("estimate", "low", "high"))
    return f"{estimate:.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"
