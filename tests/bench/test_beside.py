"""What the rows of ways that are timed beside each other say."""

import time

import pytest

from forge.bench.probes import reading
from forge.bench.probes.beside import beside, rates
from forge.bench.turns import Block, Turn


def turn(ms, done):
    return Turn([ms], [], done, {}, ms / 1e3, None, [])


def test_rates_and_how_many_times_the_other():
    blocks = [Block(["a", "b", "b", "a"], [turn(2.0, 100), turn(1.0, 100), turn(1.0, 100), turn(4.0, 100)])
              for _ in range(4)]
    a, b = rates(blocks, "bytes_per_second", "GB/s", 1e9, over="a")
    assert (a["name"], b["name"]) == ("a", "b") and a["over_a"] is None
    assert a["bytes_per_second"] == pytest.approx((50_000 + 25_000) / 2) and b["bytes_per_second"] == 100_000
    assert b["over_a"]["estimate"] == pytest.approx(100_000 / (200 / 6e-3)), "of all turns of a block, not of the best"


def test_turns_mirror_each_other_and_the_first_ones_are_dropped():
    calls = []

    def way(name):
        def work():
            calls.append(name)
            time.sleep(0.001)
            return 1.0
        return work

    blocks = beside({"a": way("a"), "b": way("b")}, seconds=0.0)
    assert len(blocks) == 4 and all(block.order == ["a", "b", "b", "a"] for block in blocks)
    assert calls == ["a", "b"] * 2 + ["a", "b", "b", "a"] * 4


def test_all_ways_read_the_same_bytes(tmp_path):
    """Or a rate would be of something else."""
    pictures = reading._jpegs()[:3]
    for number, some in enumerate((pictures, None)):
        shard = tmp_path / f"{number}" / "000000.tar"
        shard.parent.mkdir()
        reading._write(shard, some, 300_000)
        read = {name: way() for name, way in reading._ways(shard).items()}
        assert len(set(read.values())) == 1 and read["webdataset"] >= 300_000, read
