"""The comparison for a reader: a table on the terminal, and report.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.verify.conclude import UPDATES
from forge.verify.rule import Compared

if TYPE_CHECKING:
    from forge.verify.record import Record

HEAD = ("pass", "loss", "gradients", "E(A)", "E(B)", "E(B)/E(A)", "nearest to its limit")
LEGEND = ("A: baseline; B: candidate. loss, gradients: relative change from A to B. E: distance of all gradients to "
          "float64.")
MOST = 12               # tensors in report.md; result.json has all


def rows(record: Record) -> list[tuple[str, ...]]:
    """One a pass, in the order of HEAD. loss, gradients: the relative change between the two sides."""
    made = [_row(name, one) for name, one in record.passes.items() if isinstance(one, Compared)]
    return [row for place, row in enumerate(made)
            if row[0] != "deployed" or all(row[1:] != other[1:] for other in made[:place])]


def _row(name: str, one: Compared) -> tuple[str, ...]:
    loss = max((distance.apart for distance in one.losses), default=None)
    of_truth = ("-", "-") if name in UPDATES else (_short(one.baseline_error), _short(one.candidate_error))
    if one.bits:
        return (name, "-" if loss is None else "same bits", "same bits", *of_truth, _short(one.ratio), "-")
    return (name, _short(loss), _short(one.effect), *of_truth, _short(one.ratio),
            f"{one.worst.name} ({one.worst.excess:.2g} of it)")


def print_table(record: Record) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if rows(record):
        table = Table(caption=LEGEND, caption_justify="left")
        for column in HEAD:
            table.add_column(column, justify="left" if column in (HEAD[0], HEAD[-1]) else "right", overflow="fold")
        for row in rows(record):
            table.add_row(*row)
        console.print(table)
    for line in lines(record):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(f"Report: {record.run_dir / 'report.md'}", soft_wrap=True, highlight=False)


def lines(record: Record) -> list[str]:
    """The verdict, its reason, and the notes."""
    assert record.verdict is not None
    changed = ", ".join(str(change) for change in record.pair.changes) or "nothing"
    return [f"Changed: {changed}", *record.pair.notes, *record.notes,
            f"VERDICT  {record.verdict.verdict}", record.verdict.reason]


def write_report(record: Record) -> None:
    text = [f"# {record.run_dir.name}: {record.verdict.verdict if record.verdict else record.status}", "",
            *(f"{line}\n" for line in lines(record))]
    if rows(record):
        text += ["## Passes", "", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
        text += [f"| {' | '.join(row)} |" for row in rows(record)] + ["", LEGEND, ""]
    for name, one in record.passes.items():
        text += _tensors(name, one) if isinstance(one, Compared) else []
    made_by = {**record.versions, "commit": record.commit}
    text += ["## Where", "", ", ".join(f"{name} {number}" for name, number in made_by.items() if number), ""]
    (record.run_dir / "report.md").write_text("\n".join(text))


def _tensors(name: str, one: Compared) -> list[str]:
    """Those nearest to their limit, or beyond it."""
    if one.bits:
        return []
    near = sorted(one.tensors, key=lambda distance: -distance.excess)[:MOST]
    head = ["tensor", "update", "elements", "baseline's error", "candidate's error", "allowed", "apart"]
    return [f"## {name}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(
        f"| {each.name} | {each.update} | {each.elements} | {_short(each.baseline)} | {_short(each.candidate)} | "
        f"{_short(each.allowed)} | {_short(each.apart)} |" for each in near), ""]


def _short(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"
