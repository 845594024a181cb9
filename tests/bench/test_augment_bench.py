"""What bench=augment says of each way to augment pictures."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from forge.bench.augment import Augmenting
from forge.bench.probes import augment
from forge.bench.report import tables
from forge.composition import own_settings

SETTINGS = {"contenders": ["fused", "kornia", "modules", "cpu"], "num_pictures": 3, "side": 12, "size": 8, "blocks": 2,
            "spare": 0, "calls": 1, "seconds": 0.001}
DRIVER = SimpleNamespace(run=SimpleNamespace(topology=SimpleNamespace(device=torch.device("cpu"))))


@pytest.fixture(scope="module")
def recipe():
    fixed = ["augment=gpu", "augment.size=8", "augment.mean=[0.5,0.5,0.5]", "augment.std=[0.5,0.5,0.5]"]
    return own_settings("train", "augment", fixed, [])


def test_every_way_is_measured_beside_kornia(recipe, monkeypatch):
    """A clock that goes by a second a call makes the figures known: a picture takes a third of a second."""
    now = iter(range(10**6))
    monkeypatch.setattr(augment.time, "perf_counter", lambda: float(next(now)))
    rows = augment.measure(DRIVER, {**SETTINGS, "recipe": recipe})
    assert [row["name"] for row in rows] == [augment.NAMES[name] for name in SETTINGS["contenders"]]
    assert all(row["pictures_per_second"] == row["p10"] == row["p90"] == 3.0 for row in rows)
    assert rows[0]["over_kornia"] == {"estimate": 1.0, "low": 1.0, "high": 1.0} and "over_kornia" not in rows[1]
    result = {"mode": "augment", "rows": [{"family": "few", **row} for row in rows]}
    ((columns, cells),) = tables(result)
    assert columns == ["few", "pictures/s", "10 % to 90 %", "over kornia", "over modules"] and len(cells) == 4


def test_a_way_that_does_not_run_is_a_row_with_its_reason(recipe, monkeypatch):
    def broken(batch):
        raise torch.OutOfMemoryError("no memory is left\nat all")

    made = augment._contender
    monkeypatch.setattr(augment, "_contender", lambda name, of: broken if name == "kornia" else made(name, of))
    rows = augment.measure(DRIVER, {**SETTINGS, "contenders": ["fused", "kornia"], "recipe": recipe})
    assert rows[1]["reason"] == "OutOfMemoryError: no memory is left" and rows[1]["status"] == "failed"
    assert rows[0]["pictures_per_second"] > 0 and "over_kornia" not in rows[0]


def test_all_ways_do_the_same_work(recipe):
    from forge.batch import Batch

    assert importlib.util.find_spec("kornia")
    batch = Batch({"pictures": torch.randint(0, 256, (3, 12, 12, 3), dtype=torch.uint8),
                   "picture_seeds": torch.arange(3)}, 0, 0)
    made = {name: augment._contender(name, recipe)(batch) for name in SETTINGS["contenders"]}
    assert made["modules"].shape == (3, 3, 8, 8) and made["cpu"].tensors["pictures"].dtype is torch.uint8
    near = made["fused"].tensors["pictures"] - made["kornia"].tensors["pictures"]
    assert made["fused"].tensors["pictures"].shape == (3, 3, 8, 8) and near.abs().max() > 0


def test_what_is_wrong_is_said():
    wrong = Augmenting([], ["flip.p=0"], 0, 1, 1, 1, 0, 1, 0.0, 1.0)
    said = " ".join(wrong.problems())
    assert all(words in said for words in ("bench.num_pictures=0", "bench.blocks=1", "bench.seconds=0.0",
                                           "bench.contenders=[]", "flip.p=0 is no setting of augment=gpu"))
