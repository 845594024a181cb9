"""Bad samples are counted over all workers and ranks, and the bound holds for the sum."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import train_here
from ranks import train_at_ranks

from forge.data.dropping import Bound, Dropped
from forge.data.index import open_index
from forge.data.pack import pack
from forge.errors import UnreadableError
from forge.hardware import Topology
from forge.observe.drops import Drops

CHANGED = "a change since it was indexed"
LINE = ["data=shards", "batching=packed", "steps=4", "data.max_bad=0.0", "tracker.every=2"]


@pytest.fixture
def folder(tmp_path):
    """Two shards of 24 texts of 60 bytes; three of the second have changed since they were indexed."""
    for number in range(2):
        texts = [(f"{number}{key:02}", f"{number} {key:02} ".encode() * 10) for key in range(24)]
        pack(texts, tmp_path / "packed" / str(number), 1 << 20)
        (path,) = (tmp_path / "packed" / str(number)).glob("*.tar")
        (tmp_path / "shards").mkdir(exist_ok=True)
        path = path.rename(tmp_path / "shards" / f"{number}.tar")
    index, data, times = open_index(path, tmp_path), bytearray(path.read_bytes()), path.stat()
    for member in (1, 9, 20):
        data[int(index.offsets[member]) + 3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))       # as a failing disk does
    return tmp_path / "shards"


def words(folder, floor, *more):
    return [*LINE, f"data.train={folder}", f"data.heldout={folder}", f"data.bad_floor={floor}", *more]


def told(result):
    return Counter({(reason, shard.rpartition("/")[2]): count for reason, shards in result["dropped"]["reading"].items()
                    for shard, count in shards.items()})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sum_over_workers_is_in_the_result_and_the_summary(folder, tmp_path, workers):
    line = words(folder, 100, "dataloader=webdataset", f"dataloader.workers={workers}")
    run = train_here(tmp_path / "run", *line)
    assert run.code == 0, run.err
    result = run.result["dropped"]
    assert set(told(run.result)) == {(CHANGED, "1.tar")} and result["opening"] == {}
    assert result["samples_read"] > 24
    count = told(run.result)[CHANGED, "1.tar"]
    assert f"of {result['samples_read']:,} samples: {count:,} for {CHANGED}" in (run.run_dir / "report.md").read_text()


@pytest.mark.dist
def test_the_sum_over_ranks_is_that_of_one_rank_and_the_bound_is_on_it(folder, tmp_path):
    """Both ranks meet some, so that no rank alone passes a bound of one less than the sum."""
    shared = ["dataloader=webdataset", "dataloader.workers=1", "micro_batch=2"]
    alone = train_here(tmp_path / "alone", *words(folder, 100))
    count = told(alone.result).total()
    fine = train_at_ranks(tmp_path / "fine", 2, *words(folder, count, *shared))
    assert fine.code == 0, fine.err
    assert told(fine.result) == told(alone.result) and count >= 3
    assert fine.result["dropped"]["samples_read"] == alone.result["dropped"]["samples_read"]
    ended = train_at_ranks(tmp_path / "ended", 2, *words(folder, count - 1, *shared))
    assert ended.code == 4 and f"{count:,} of " in ended.err and "samples are bad, more than data.max_bad" in ended.err


@pytest.mark.parametrize("overlap", ["none", "prefetch"])
def test_a_resumed_run_goes_on_counting(overlap, folder, tmp_path):
    """And what was read ahead of the snapshot is counted once, when it is trained on."""
    line = words(folder, 100, "snapshot=inline", f"overlap={overlap}", "batching=fixed")
    whole = train_here(tmp_path / "whole", *line)
    assert told(whole.result).total() >= 3
    first = train_here(tmp_path / "part", *line, "stop_at=2")
    assert 0 < told(first.result).total() < told(whole.result).total()
    resumed = train_here(tmp_path / "again", *line, f"resume={first.result['snapshot']}")
    assert resumed.result["dropped"] == whole.result["dropped"]
    again = train_here(tmp_path / "twice", *line, f"resume={resumed.result['snapshot']}", "steps=6")
    assert told(again.result).total() > told(whole.result).total()


@pytest.mark.dist
def test_ranks_of_any_number_go_on_counting_what_others_counted(folder, tmp_path):
    line = words(folder, 100, "snapshot=inline", "batching=fixed", "micro_batch=2")
    whole = train_here(tmp_path / "whole", *line)
    first = train_at_ranks(tmp_path / "first", 2, *line, "stop_at=2")
    alone = train_here(tmp_path / "alone", *line, "stop_at=3", f"resume={first.result['snapshot']}")
    last = train_at_ranks(tmp_path / "last", 2, *line, resume=alone.result["snapshot"])
    assert last.result["dropped"] == whole.result["dropped"] and told(whole.result).total() >= 3


def test_bad_samples_before_a_resume_count_for_the_bound(folder, tmp_path):
    line = words(folder, 100, "snapshot=inline", "batching=fixed")
    first = train_here(tmp_path / "part", *line, "stop_at=2")
    floor = told(train_here(tmp_path / "whole", *line).result).total() - 1
    again = train_here(tmp_path / "again", *line, f"data.bad_floor={floor}", f"resume={first.result['snapshot']}")
    assert again.code == 4 and f"{floor + 1:,} of " in again.err


def test_a_snapshot_from_before_they_were_kept_is_resumed(folder, tmp_path):
    line = words(folder, 100, "snapshot=inline")
    first = train_here(tmp_path / "part", *line, "stop_at=2")
    manifest = Path(first.result["snapshot"], "manifest.json")
    told_of = json.loads(manifest.read_text())
    del told_of["files"]["dropped_00000.safetensors"]
    manifest.write_text(json.dumps(told_of))
    manifest.with_name("dropped_00000.safetensors").unlink()
    again = train_here(tmp_path / "again", *line, f"resume={manifest.parent}")
    assert again.code == 0, again.err
    assert again.result["steps"] == 4


def test_one_process_ends_at_once(folder, tmp_path):
    run = train_here(tmp_path / "run", *words(folder, 0))
    assert run.code == 4 and "1.tar, byte" not in run.err and f"for {CHANGED}" in run.err


def test_the_sentence_that_ends_a_run_names_what_was_bad_before_and_elsewhere():
    dropped = Dropped(["a.tar", "b.tar"], Bound(0.1, 0))
    drops = Drops(dropped, 1, Topology(torch.device("cpu"), 0, 0, 1))
    drops.load_state_dict({"samples": 90, "bad": [["empty text", "old.tar", 40]]})
    drops.bad.update([("empty text", 1)])
    with pytest.raises(UnreadableError, match=(
            r"^44 of 91 samples are bad, .* allow: 1 for empty text \(1 in b.tar\); before the run was resumed: 40 for "
            r"empty text in old.tar; 3 on other ranks, see log.txt\.")):
        drops._judge(dropped, 44, 91)
