"""A folder of copies: bounded, one maker a copy, and nothing left of processes that ended."""

import json
import multiprocessing
import os
import signal

import pytest

from forge.data.owner import is_gone, own
from forge.data.room import Room

FORK = multiprocessing.get_context("fork")


def room(folder, max_bytes=100, num_copies=10):
    return Room(folder, max_bytes, num_copies)


def claimed(room, name, size, next_use=lambda name: 0.0):
    """The file to copy into; None: it cannot be claimed."""
    found = room.claim({name: size}, next_use)
    assert found is None or found[0] == name
    return found and found[1]


def made(room, name, size, next_use=lambda name: 0.0):
    """Whether there was room, and the copy is there now."""
    part = claimed(room, name, size, next_use)
    if part is not None:
        part.write_bytes(b"x" * size)
        room.keep(name, part)
    return part is not None


def there(folder):
    return sorted(path.name for path in folder.glob("*.tar"))


def test_a_copy_has_its_name_when_it_is_whole_and_one_maker(tmp_path):
    one, other = room(tmp_path), room(tmp_path)
    part = claimed(one, "a.tar", 10)
    assert claimed(other, "a.tar", 10) is None and there(tmp_path) == []
    part.write_bytes(b"x" * 4)
    assert other.under_way("a.tar").done == 4 and other.under_way("b.tar") is None
    one.keep("a.tar", part)
    assert there(tmp_path) == ["a.tar"] and not part.exists() and other.under_way("a.tar") is None
    assert claimed(other, "a.tar", 10) is None
    part = claimed(other, "b.tar", 10)
    part.write_bytes(b"x")
    other.give_up("b.tar", part)
    assert not part.exists() and made(one, "b.tar", 10)


def test_what_is_needed_last_goes_first_and_what_is_wanted_never(tmp_path):
    one, other = room(tmp_path), room(tmp_path)
    uses = {"a.tar": 5.0, "b.tar": 9.0, "c.tar": 1.0}
    assert all(made(one, name, 30, uses.__getitem__) for name in uses)
    other.want(["b.tar"])
    assert made(one, "d.tar", 30, lambda name: uses.get(name, 0.0))
    assert there(tmp_path) == ["b.tar", "c.tar", "d.tar"]           # b comes latest, and another process reads it
    one.want(["c.tar", "d.tar"])
    assert not made(one, "e.tar", 30, lambda name: 0.0) and there(tmp_path) == ["b.tar", "c.tar", "d.tar"]
    assert not made(one, "f.tar", 101, lambda name: 0.0)


def test_no_more_copies_at_a_time_than_are_allowed(tmp_path):
    one = room(tmp_path, num_copies=2)
    parts = [claimed(one, f"{number}.tar", 1) for number in range(3)]
    assert [part is not None for part in parts] == [True, True, False]


def test_a_claim_takes_the_first_that_can_be_had_in_the_order_of_need(tmp_path):
    one, other = room(tmp_path), room(tmp_path)
    one.want(["there.tar"])
    assert made(one, "there.tar", 50)
    making = claimed(one, "making.tar", 10)
    sizes = {"there.tar": 50, "making.tar": 10, "large.tar": 41, "b.tar": 20, "a.tar": 20}
    assert [other.claim(sizes, lambda name: 0.0)[0] for _ in range(2)] == ["b.tar", "a.tar"]
    assert other.claim(sizes, lambda name: 0.0) is None
    one.give_up("making.tar", making)
    assert other.claim(sizes, lambda name: 0.0)[0] == "making.tar"


def test_what_changes_nothing_writes_nothing(tmp_path):
    one, other = room(tmp_path, num_copies=2), room(tmp_path, num_copies=1)
    assert made(one, "a.tar", 10)
    part = claimed(one, "b.tar", 10)
    before = (tmp_path / "room.json").stat()
    assert one.claim({"a.tar": 10, "b.tar": 10, "c.tar": 101}, lambda name: 0.0) is None
    assert other.claim({"c.tar": 10}, lambda name: 0.0) is None, "enough are being made"
    assert one.claim({}, lambda name: 0.0) is None
    one.give_up("none.tar", tmp_path / "none.part")
    one.discard("none.tar")
    after = (tmp_path / "room.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    part.write_bytes(b"x" * 10)
    one.keep("b.tar", part)
    assert json.loads((tmp_path / "room.json").read_text())["copies"]["b.tar"]["owner"] == ""


def test_what_a_killed_process_left_is_taken_away(tmp_path):
    def half_a_copy(ready):
        here = room(tmp_path)
        here.want(["kept.tar"])
        claimed(here, "a.tar", 60).write_bytes(b"x" * 30)
        ready.set()
        signal.pause()

    ours = room(tmp_path)
    assert made(ours, "kept.tar", 40)
    ready = FORK.Event()
    process = FORK.Process(target=half_a_copy, args=(ready,), daemon=True)
    process.start()
    assert ready.wait(20)
    assert claimed(ours, "a.tar", 60) is None and len(list(tmp_path.glob("*.part"))) == 1
    assert not made(ours, "b.tar", 60), "it reads what would have to go"
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)       # ended, though nobody has asked about it: a zombie
    assert made(ours, "b.tar", 100) and there(tmp_path) == ["b.tar"]
    assert not list(tmp_path.glob("*.part"))
    process.join()


def test_a_process_that_ends_between_the_last_two_steps_leaves_a_whole_copy(tmp_path):
    def renamed_only(part):
        here = room(tmp_path)
        path = claimed(here, "a.tar", 10)
        path.write_bytes(b"x" * 10)
        os.replace(path, here.place("a.tar"))
        os._exit(0)

    process = FORK.Process(target=renamed_only, args=(None,), daemon=True)
    process.start()
    process.join()
    ours = room(tmp_path)
    ours.want([])
    said = json.loads((tmp_path / "room.json").read_text())["copies"]["a.tar"]
    assert said["size"] == 10 and said["owner"] == "" and claimed(ours, "a.tar", 10) is None


def test_a_list_that_cannot_be_read_is_made_anew(tmp_path):
    one = room(tmp_path)
    assert made(one, "a.tar", 60)
    for broken in (b"", b"{", b"[]", b'{"copies": {"a.tar": {}}, "wanted": {}}'):
        (tmp_path / "room.json").write_bytes(broken)
        one.want(["a.tar"])
        assert not made(one, "b.tar", 60) and there(tmp_path) == ["a.tar"]
        assert json.loads((tmp_path / "room.json").read_text())["copies"]["a.tar"]["size"] == 60


def test_many_processes_share_the_room(tmp_path):
    def make(out):
        here = room(tmp_path, max_bytes=55, num_copies=3)
        claimed = []
        for name in (f"{number}.tar" for number in range(12)):
            if made(here, name, 10, lambda name: float(name.removesuffix(".tar"))):
                claimed.append(name)
            with here._state():         # without the lock, one that goes and one that comes would both be counted
                assert sum(path.stat().st_size for path in tmp_path.glob("*.tar")) <= 55
        out.put(claimed)

    out = FORK.SimpleQueue()
    processes = [FORK.Process(target=make, args=(out,), daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    claimed = [name for _ in processes for name in out.get()]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert set(claimed) == {f"{number}.tar" for number in range(12)} and len(there(tmp_path)) == 5


@pytest.mark.parametrize("host, heard, gone", [(None, 0.0, False), ("elsewhere", 0.0, True),
                                               ("elsewhere", 1e12, False)])
def test_who_is_gone(host, heard, gone):
    ours, _, rest = own().partition(" ")
    assert is_gone(f"{host or ours} {rest}", heard) == gone
    assert is_gone(f"{ours} {os.getpid()} 1", heard), "another process had this number"
