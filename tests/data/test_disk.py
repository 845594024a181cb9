"""Folders are whole or absent, and what a disk refuses is a sentence."""

import errno
import os
import pwd

import pytest

from forge.data.disk import cache_folder, made_once, replacing, require_space, writing
from forge.errors import UnusableEnvironment


def test_the_cache_is_where_the_setting_or_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/fast")
    assert str(cache_folder(None)) == "/var/fast/forge"
    assert str(cache_folder("~/mine")) == "/home/someone/mine"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert str(cache_folder(None)) == "/home/someone/.cache/forge"
    monkeypatch.chdir(tmp_path)
    assert cache_folder("here") == tmp_path / "here"


def test_a_user_without_a_home_is_a_sentence(monkeypatch):
    def nobody(_):
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(UnusableEnvironment, match=r"set data\.cache or XDG_CACHE_HOME"):
        cache_folder(None)


def test_a_folder_is_made_once_and_whole(tmp_path):
    def make(folder):
        (folder / "file").write_text("whole")

    folder = made_once(tmp_path / "deep" / "made", make)
    assert (folder / "file").read_text() == "whole"
    assert made_once(folder, lambda _: pytest.fail("made again")) == folder
    assert os.stat(folder).st_mode & 0o777 == 0o777 & ~os.umask(os.umask(0o22))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_nothing(tmp_path, error):
    def fail(folder):
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(type(error)):
        made_once(tmp_path / "made", fail)
    with pytest.raises(type(error)), replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]


def test_the_folder_of_a_faster_process_is_taken(tmp_path):
    def late(folder):
        (folder / "file").write_text("late")
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "file").write_text("first")

    assert (made_once(tmp_path / "made", late) / "file").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".made.lock", "made"]


def test_disks_that_refuse_are_sentences(tmp_path):
    with pytest.raises(UnusableEnvironment, match=r"No space is left in .*: free some, or go elsewhere"), \
            writing(tmp_path, "go elsewhere"):
        raise OSError(errno.EDQUOT, "quota")
    with pytest.raises(UnusableEnvironment, match=r"Cannot write to .* \(Read-only file system\): go elsewhere"), \
            writing(tmp_path, "go elsewhere"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    with pytest.raises(UnusableEnvironment, match="free some, or go elsewhere"):
        require_space(tmp_path / "not" / "there" / "yet", 1 << 60, "go elsewhere")
    require_space(tmp_path, 1, "go elsewhere")
