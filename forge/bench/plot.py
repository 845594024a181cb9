"""The picture of a bench, out of result.json alone, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MISSING = ("No picture was drawn, for matplotlib is not installed: pip install 'forge-switchboard[bench]', then "
           "python -m forge.bench draw={run_dir}")
# (left out, verdict) -> colour and what it says of the switch: to be slower without it speaks for it
COLOURS = {(False, "faster"): ("tab:green", "faster"), (False, "slower"): ("tab:red", "slower"),
           (True, "slower"): ("tab:orange", "slower without it: worth keeping"),
           (True, "faster"): ("tab:purple", "faster without it: better left out")}
NOT_PROVEN = ("tab:grey", "not proven")
PLAIN = ("tab:blue", "")


def draw(result: dict[str, Any], run_dir: Path) -> str | None:
    """Write <mode>.png into the run directory. Returns why there is none, or None. Raises OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING.format(run_dir=run_dir)
    bars = _bars(result)
    if not bars:
        return f"No picture was drawn: there is nothing to compare in {run_dir / 'result.json'}."
    figure = Figure(figsize=(9, 1.8 + 0.34 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    named: set[str] = set()
    for height, (_, value, low, high, (colour, meaning)) in enumerate(bars):
        axes.barh(height, value, color=colour, alpha=0.75, label="" if meaning in named else meaning)
        named.add(meaning)
        if low is not None and high is not None:
            axes.errorbar((low + high) / 2, height, xerr=(high - low) / 2, color="black", capsize=3)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    if result.get("floor"):
        axes.axvspan(-result["floor"] * 100, result["floor"] * 100, color="grey", alpha=0.2, label="noise floor (A/A)")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)      # inside, it hides bars
    axes.set_xlabel(_unit(result["mode"]))
    device = result["device"] or {}
    axes.set_title(f"{result['mode']} on {device.get('name') or result['processor']}", fontsize=10)
    figure.savefig(run_dir / f"{result['mode']}.png", dpi=120)
    return None


def _bars(result: dict[str, Any]) -> list[tuple[str, float, float | None, float | None, tuple[str, str]]]:
    """(name, value, ends of its interval, colour and its meaning)."""
    if result["mode"] == "micro":
        return [(f"{row['family']} {row['name']}", row["of_best"] * 100, None, None, PLAIN)
                for row in result["rows"] if row.get("of_best") is not None]
    if result["mode"] == "experts":
        return [(f"{row['family']}: {row['name']}", *(row["over_dense"][end] for end in ("estimate", "low", "high")),
                 PLAIN) for row in result["rows"] if row.get("over_dense")]
    if result["mode"] == "augment":
        return [(row["name"], row["pictures_per_second"], row["p10"], row["p90"], PLAIN) for row in result["rows"]
                if "pictures_per_second" in row]
    if result["mode"] == "telemetry":
        return [(row["name"], *(row["share_of_20_ms"][end] * 100 for end in ("estimate", "low", "high")), PLAIN)
                for row in result["rows"]]
    return [(row["name"], row["gain"]["estimate"] * 100, *(None if row["gain"][end] is None else row["gain"][end] * 100
                                                           for end in ("low", "high")),
             COLOURS.get((row["kind"] == "left out", row["verdict"]), NOT_PROVEN))
            for row in result["rows"] if row.get("gain")]


def _unit(mode: str) -> str:
    return {"micro": "per cent of the best of its family", "telemetry": "per cent of a step of 20 ms",
            "experts": "times the dense layer of as many operations",
            "augment": "pictures a second, and what nine of ten turns reach and one of ten passes"}.get(
        mode, "gain in tokens a second, per cent, with 95 % intervals")
