"""forge.shards: a folder becomes shards, shards are described, and damage is found to the byte."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import webdataset
from data.tars import flip_on_disk

from forge.data import disk, pack
from forge.data.index import load
from forge.shards import USAGE, main


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    """Sixty texts at several depths, and files that are none."""
    folder = tmp_path / "texts"
    for number in range(60):
        path = folder / ("deep/er" if number % 2 else ".") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number} " * (number + 1))
    (folder / "utf16.txt").write_text("text", "utf-16")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "latin2.txt").write_bytes(b"\xe9")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "notes.md").write_text("# notes")
    (folder / "gone.txt").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.txt")
    return folder


@pytest.fixture
def forge_shards(capsys):
    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        seen = capsys.readouterr()
        return int(ended.value.code or 0), seen.out, seen.err

    return run


@pytest.fixture
def made(folder, tmp_path, forge_shards):
    assert forge_shards("make", folder, tmp_path / "out", "size_mb=0.004")[0] == 0
    return tmp_path / "out"


def read(folder):
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    return sorted(sample["txt"].decode() for sample in webdataset.WebDataset(shards, shardshuffle=False))


def test_every_text_is_packed_once_and_the_rest_is_counted(folder, tmp_path, forge_shards):
    code, out, _ = forge_shards("make", folder, tmp_path / "out", "heldout=0.2", "size_mb=0.005")
    assert code == 0
    train, heldout = read(tmp_path / "out" / "train"), read(tmp_path / "out" / "heldout")
    assert sorted(train + heldout) == sorted(f"text {n} " * (n + 1) for n in range(60)) and 4 < len(heldout) < 25
    assert len(list((tmp_path / "out" / "train").glob("*.tar"))) > 2
    assert "2 not UTF-8" in out and "1 empty" in out and "zero bytes" in out and "1 unreadable" in out
    assert "1 no regular files" in out
    assert f"data=shards data.train={tmp_path}/out/train data.heldout={tmp_path}/out/heldout" in out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["heldout", "train"]


def test_shards_are_the_same_bytes_each_time(folder, tmp_path, forge_shards):
    for name in "ab":
        forge_shards("make", folder, tmp_path / name)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.tar")} for name in "ab")
    assert first == second and first


@pytest.mark.parametrize("pattern, expected", [("*.md", 1), ("deep/*.txt", 30), ("*", 61)])
def test_a_pattern_chooses_files(folder, tmp_path, forge_shards, pattern, expected):
    said = forge_shards("make", folder, folder / "out", f"pattern={pattern}", "heldout=0")
    assert len(read(folder / "out" / "train")) == expected
    again = forge_shards("make", folder, folder / "out", f"pattern={pattern}", "heldout=0", "overwrite=true")
    assert len(read(folder / "out" / "train")) == expected and again == said      # OUT itself is not looked at


@pytest.mark.parametrize("heldout, expected", [("0.01", (2, 1)), ("0.99", (1, 2)), ("0", (3, 0))])
def test_few_files_still_give_both_sides_something(tmp_path, forge_shards, heldout, expected):
    (tmp_path / "few").mkdir()
    for name in ("x1", "x2", "x3"):
        (tmp_path / "few" / f"{name}.txt").write_text(name)
    assert forge_shards("make", tmp_path / "few", tmp_path / "out", f"heldout={heldout}")[0] == 0
    assert tuple(len(read(tmp_path / "out" / split)) if (tmp_path / "out" / split).exists() else 0
                 for split in ("train", "heldout")) == expected


def test_existing_shards_are_replaced_only_when_told(folder, made, forge_shards):
    before = (made / "train" / "000000.tar").read_bytes()
    (made / "mine").write_text("keep")
    code, _, err = forge_shards("make", folder, made)
    assert code == 2 and f"{made}/train is there already" in err and "overwrite=true" in err
    assert (made / "train" / "000000.tar").read_bytes() == before
    assert forge_shards("make", folder, made, "overwrite=true", "heldout=0")[0] == 0
    assert len(read(made / "train")) == 60
    assert sorted(path.name for path in made.iterdir()) == ["mine", "train"]


@pytest.mark.parametrize("words, sentence", [
    ((), "make wants a FOLDER and an OUT"), (("texts", "out", "more"), "make wants a FOLDER and an OUT"),
    (("texts", "out", "hedlout=0.1"), "hedlout is not a setting of make. Did you mean 'heldout'?"),
    (("texts", "out", "heldout=some"), "heldout=some: a number is wanted"),
    (("texts", "out", "heldout=1"), "heldout=1.0 is no fraction"),
    (("texts", "out", "heldout=nan"), "heldout=nan is no fraction"), (("texts", "out", "size_mb=0"), "size_mb=0.0"),
    (("texts", "out", "size_mb=inf"), "size_mb=inf"),
    (("texts", "out", "overwrite=maybe"), "overwrite=maybe: true or false is wanted"),
    (("nowhere", "out"), "nowhere is not a folder"), (("texts", "out", "pattern=*.rst"), "no files that match"),
    (("texts", "texts/notes.md"), "notes.md is a file"), (("texts", "out", "pattern=latin*"), "2 not UTF-8"),
    (("texts", "out", "pattern=7.txt"), "has a single text, 'deep/er/7.txt', so none can be held out")])
def test_misuse_is_a_sentence(folder, tmp_path, forge_shards, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = forge_shards("make", *words)
    assert code == 2 and sentence in err and not out
    assert not (tmp_path / "out").exists()


def test_too_little_space_is_seen_before_packing(folder, tmp_path, forge_shards, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    code, _, err = forge_shards("make", folder, tmp_path / "new" / "out")
    assert code == 5 and "its disk has 0 MB free" in err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("code, sentence", [(errno.ENOSPC, "No space is left in"), (errno.EACCES, "Cannot write to")])
def test_a_disk_that_fills_up_leaves_what_was_there(folder, made, forge_shards, monkeypatch, code, sentence):
    before = {path.name: path.read_bytes() for path in made.rglob("*.tar")}

    def full(*_):
        raise OSError(code, "as the system says it")

    monkeypatch.setattr(pack, "save", full)
    exit_code, _, err = forge_shards("make", folder, made, "overwrite=true")
    assert exit_code == 5 and sentence in err and str(made) in err
    assert {path.name: path.read_bytes() for path in made.rglob("*.tar")} == before
    assert sorted(path.name for path in made.iterdir()) == ["heldout", "train"]


def test_a_disk_that_really_fills_up_is_one_sentence(folder, tmp_path):
    program = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
               "from forge.shards import main; main(sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", program, "make", folder, tmp_path / "out"], capture_output=True,
                          text=True, timeout=60, cwd=Path(__file__).parents[1])
    assert done.returncode == 5 and done.stderr.count("\n") == 1 and "Cannot write to" in done.stderr
    assert not (tmp_path / "out").exists()


def test_info_describes(made, forge_shards):
    code, out, _ = forge_shards("info", made)
    assert code == 0
    assert "samples  60" in out and "txt      in 60 samples" in out and "least 7," in out and "most 480" in out
    code, out, _ = forge_shards("info", made / "train" / "000000.tar")
    assert code == 0 and "shards   1," in out


def test_info_stops_at_damage(made, forge_shards):
    shard = made / "train" / "000000.tar"
    shard.write_bytes(shard.read_bytes()[:-12000])
    code, _, err = forge_shards("info", made)
    assert code == 4 and str(shard) in err and "forge.shards check" in err


def test_check_finds_nothing_in_sound_shards(made, forge_shards):
    code, out, err = forge_shards("check", made)
    assert code == 0 and not out and err.endswith("shards: sound\n") and err.count("\n") == 1


def test_check_names_each_fault(made, forge_shards):
    shards = sorted((made / "train").glob("*.tar"))
    offsets = load(shards[0].with_name("000000.tar.index"), shards[0]).offsets
    flipped = bytearray(shards[0].read_bytes())
    flipped[offsets[0] + 3] ^= 1
    header = offsets[4] - 512
    flipped[header] ^= 1
    shards[0].write_bytes(flipped)
    shards[1].write_bytes(shards[1].read_bytes()[:3000])
    shards[2].unlink()
    shards[2].symlink_to("nowhere")
    code, out, err = forge_shards("check", made)
    lines = out.splitlines()
    assert code == 3
    assert f"{shards[0]}, byte {header}: bad header: its checksum does not match" in lines

    def told(start, part):
        return any(line.startswith(f"{start}") and part in line for line in lines)

    assert told(f"{shards[0]}, byte {offsets[0]}: the ", "not those that were indexed")
    assert told(f"{shards[0]}, byte {offsets[4]}: member", "not here now")
    assert told(f"{shards[1]}, byte ", "the file ends")
    assert told(f"{shards[2]}, byte 0: Cannot read", "No such file")
    assert all(line.startswith(str(made)) for line in lines) and f"{len(lines)} faults in 3 of them" in err


def test_check_says_where_checksums_are_missing(made, forge_shards):
    (made / "heldout" / "000000.tar.index").unlink()
    code, _, err = forge_shards("check", made)
    assert code == 0 and "1 of them have no index with checksums, so only their structure was checked" in err


def test_check_sees_a_cut_between_the_parts_of_a_sample(tmp_path, forge_shards):
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False, mtime=0) as writer:
        for number in range(3):
            writer.write({"__key__": str(number), "cls": b"1", "txt": b"text"})
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:5 * 1024])
    code, out, _ = forge_shards("check", tmp_path / "a.tar")
    assert code == 3 and "byte 5120: the last sample, '2', lacks txt: the file was cut" in out
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:4 * 1024])
    code, out, err = forge_shards("check", tmp_path / "a.tar")
    assert code == 0 and not out and err.startswith("note: ") and "may have been cut here" in err


def test_check_sees_samples_that_are_scattered(tmp_path, forge_shards):
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False, mtime=0) as writer:
        for sample in ({"cls": b"1"}, {"txt": b"text"}):
            for number in range(2):
                writer.write({"__key__": str(number), **sample})
    code, out, _ = forge_shards("check", tmp_path)
    assert code == 3 and out.count("begins a second time") == 2


def test_index_writes_what_check_compares_with(made, forge_shards):
    for index in made.rglob("*.index"):
        index.unlink()
    code, out, _ = forge_shards("index", made)
    assert code == 0 and "60 members: indexed" in out and "faults" not in out
    shard = made / "heldout" / "000000.tar"
    index = load(shard.with_name("000000.tar.index"), shard)
    assert index.characters.tolist() == index.sizes.tolist() and index.size == shard.stat().st_size
    assert forge_shards("check", made)[0] == 0
    flip_on_disk(shard, int(index.offsets[0]))
    code, out, _ = forge_shards("check", made)
    assert code == 3 and out == (f"{shard}, byte {index.offsets[0]}: the {index.sizes[0]} bytes of member "
                                 f"{index.names[0]!r} are not those that were indexed\n")


@pytest.mark.parametrize("command", ["index", "info", "check"])
def test_what_names_no_shard_is_a_sentence(tmp_path, forge_shards, command):
    for words, sentence in (((tmp_path / "none",), "does not exist"), ((tmp_path,), "holds no .tar files"),
                            ((), "Name a shard")):
        code, _, err = forge_shards(command, *words)
        assert code == 2 and sentence in err


def test_usage(forge_shards):
    assert forge_shards("--help") == (0, USAGE, "")
    assert forge_shards("make", "-h") == (0, USAGE, "")
    code, out, err = forge_shards("mkae")
    assert code == 2 and "no command 'mkae'" in err and USAGE.strip() in err and not out


def test_the_command_starts_without_torch():
    program = "import sys, forge.shards, forge.data.folder, forge.data.inspection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1]).returncode == 0
    done = subprocess.run([sys.executable, "-m", "forge.shards"], capture_output=True, text=True, timeout=60,
                          cwd=Path(__file__).parents[1])
    assert done.returncode == 2 and done.stderr == USAGE
