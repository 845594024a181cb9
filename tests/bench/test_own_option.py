"""An option of one's own, added as docs/bench.md says."""

from planted import plant
from simulated import Machine, bench, rows_of

from forge.errors import Exit

COUNTS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Option:
    number: int
    def __call__(self, session):
        session.add({"name": "counted", "kind": "own", "status": "measured", "verdict": str(self.number)})
"""


def test_an_option_of_ones_own_is_found_beside_and_takes_settings(monkeypatch, tmp_path):
    package = plant(tmp_path, "bench", "counts", COUNTS, number=3)
    monkeypatch.syspath_prepend(tmp_path)
    code, result = bench(monkeypatch, tmp_path / "record", Machine(), "--config-dir", f"{tmp_path}/conf",
                         f"allowed_packages={package}", "bench=counts", "bench.number=5")
    assert code == Exit.ANSWERED, code
    assert rows_of(result)["counted"]["verdict"] == "5" and result["mode"] == "counts"
