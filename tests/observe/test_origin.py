"""What a figure comes from."""

import subprocess

import torch

from forge.observe.origin import processor, source, versions


def committed(folder):
    """The commit of a new repository with one file."""
    folder.mkdir()
    (folder / "code.py").write_text("")
    name = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "first"], ["rev-parse", "HEAD"]):
        said = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout
    return said.strip()


def test_the_commit_is_that_of_the_folder_s_own_repository(tmp_path):
    commit = committed(tmp_path / "checkout")
    assert source(tmp_path / "checkout") == {"commit": commit, "changed": False}
    (tmp_path / "link").symlink_to(tmp_path / "checkout")
    assert source(tmp_path / "link") == {"commit": commit, "changed": False}
    (tmp_path / "checkout/code.py").write_text("1")
    assert source(tmp_path / "checkout") == {"commit": commit, "changed": True}


def test_code_below_somebody_else_s_repository_is_not_of_their_commit(tmp_path):
    committed(tmp_path / "theirs")
    (tmp_path / "theirs/site-packages").mkdir()
    assert source(tmp_path / "theirs/site-packages") is None and source(tmp_path) is None


def test_versions_are_those_that_run():
    assert versions()["torch"] == torch.__version__ and versions()["forge"] and processor()
