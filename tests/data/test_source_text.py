"""The interpreter's own library is packed once, by one process, and split by file."""

import errno
import multiprocessing
import sysconfig
import time
from types import SimpleNamespace

import pytest

from forge.data import source_text as module
from forge.data.pack import chosen
from forge.data.source_text import SourceText
from forge.errors import ConfigError, UnreadableError, UnusableEnvironment

CONFIG = SimpleNamespace(model=SimpleNamespace(vocab_size=256))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of forty small files, and what does not belong to it."""
    folder = tmp_path / "lib"
    for number in range(40):
        path = folder / ("" if number % 3 else "package") / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"number = {number}\n")
    for name in ("site-packages/foreign.py", "lib2to3/tests/data/broken.py", "package/__pycache__/x.py", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("foreign\n")
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "empty.py").write_bytes(b"")
    (folder / "sitecustomize.py").symlink_to("nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def option(tmp_path, **changes):
    settings = {"tokenizer": "bytes", "cache": str(tmp_path / "cache"), "heldout": 0.2, "shard_mb": 8}
    return SourceText(**settings | changes)


def read(source):
    return [bytes(source[index]["tokens"].tolist()).decode() for index in range(len(source))]


def test_every_file_is_on_one_side(library, tmp_path):
    train, heldout = (read(option(tmp_path).open(split)) for split in ("train", "heldout"))
    assert sorted(train + heldout) == sorted(f"number = {number}\n\0" for number in range(40))
    names = {f"number = {n}\n\0": ("" if n % 3 else "package/") + f"module{n}.py" for n in range(40)}
    assert sorted(heldout) == sorted(text for text, name in names.items() if chosen(name, 0.2)) and heldout


def test_it_is_packed_once_and_says_so(library, tmp_path, monkeypatch, caplog):
    first = option(tmp_path).open("train")
    assert caplog.text.count("Packing the standard library") == 1
    monkeypatch.setattr(module, "pack", lambda *_: pytest.fail("packed again"))
    assert read(option(tmp_path).open("train")) == read(first)
    assert option(tmp_path).open("train").fingerprint == first.fingerprint


def test_another_library_gets_another_folder(library, tmp_path):
    def folders():
        return {path.name for path in (tmp_path / "cache" / "source_text").glob("[!.]*")}

    option(tmp_path).open("train")
    assert len(folders()) == 1
    (library / "module1.py").write_text("longer = 1\n")
    assert "longer = 1\n\0" in read(option(tmp_path).open("train")) + read(option(tmp_path).open("heldout"))
    assert len(folders()) == 2
    option(tmp_path, heldout=0.5).open("train")
    assert len(folders()) == 3


def _open(settings, barrier, results):
    packed = []
    pack = module.pack

    def counted(*arguments):
        packed.append(1)
        time.sleep(0.1)
        return pack(*arguments)

    module.pack = counted
    barrier.wait()
    results.put((read(settings.open("train")), len(packed)))


def test_of_several_processes_one_packs(library, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_open, args=(option(tmp_path), barrier, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(texts == found[0][0] for texts, _ in found)
    assert sorted(times for _, times in found) == [0, 0, 2]     # two splits


@pytest.mark.parametrize("code, words", [(errno.ENOSPC, "No space is left in"), (errno.EROFS, "Cannot write to")])
def test_a_full_or_read_only_disk_is_a_sentence(library, tmp_path, monkeypatch, code, words):
    def fail(*_):
        raise OSError(code, "as the system says it")

    monkeypatch.setattr(module, "pack", fail)
    with pytest.raises(UnusableEnvironment, match=f"{words} .*cache.*set data.cache to another folder"):
        option(tmp_path).open("train")
    assert not list((tmp_path / "cache" / "source_text").glob("*[!k]"))      # nothing but the lock


def test_an_interpreter_without_files_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib.zip"))
    with pytest.raises(UnusableEnvironment, match=r"holds no Python files.*use data=shards"):
        option(tmp_path).open("train")


def test_a_damaged_cache_says_what_to_delete(library, tmp_path):
    option(tmp_path).open("train")
    (shard,) = (tmp_path / "cache").glob("source_text/*/train/*.tar")
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(UnreadableError, match=r"000000\.tar, byte 3000\).*To have it made again, delete .*cache"):
        option(tmp_path).open("train")
    shard.unlink()
    with pytest.raises(UnusableEnvironment, match="holds no train shards: delete it"):
        option(tmp_path).open("train")


def test_settings_without_sense_are_problems(tmp_path):
    assert list(option(tmp_path).problems(CONFIG)) == []
    assert "data.heldout=1.5" in " ".join(option(tmp_path, heldout=1.5).problems(CONFIG))
    assert "data.shard_mb=0" in " ".join(option(tmp_path, shard_mb=0).problems(CONFIG))
    with pytest.raises(ConfigError):
        option(tmp_path, tokenizer=str(tmp_path / "none.json")).open("train")


def test_the_real_library_packs_in_seconds_and_opens_at_once(tmp_path):
    settings = option(tmp_path, heldout=0.08)
    started = time.perf_counter()
    train, heldout = settings.open("train"), settings.open("heldout")
    packed = time.perf_counter() - started
    started = time.perf_counter()
    assert settings.open("train").fingerprint == train.fingerprint
    opened = time.perf_counter() - started
    share = heldout.lengths.sum() / (train.lengths.sum() + heldout.lengths.sum())
    assert train.lengths.sum() > 5e6 and 0.02 < share < 0.2 and 0.05 < len(heldout) / (len(train) + len(heldout)) < 0.11
    assert packed < 20 and opened < 1       # 0.7 s and 0.03 s on an idle machine
