"""from= and resume=: what a run may take from another, and what it may not do to it."""

import json

import pytest
from conftest import TINY, forge, train_apart, train_here

from forge.command_line import CommandLine, choices_of
from forge.errors import ConfigError, UnreadableError
from forge.freeze import owned
from forge.snapshot.folder import read_manifest, whole_snapshots


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    """Four steps, with a snapshot after two and four."""
    return train_here(tmp_path_factory.mktemp("lineage") / "run", *shards, "steps=4", "snapshot=inline",
                      "snapshot.every=2", "snapshot.keep=2")


def test_a_file_can_only_choose_options(run, tmp_path):
    """What a foreign config.yaml names reaches Hydra only where it is an option of a group."""
    folder = tmp_path / "evil"
    folder.mkdir()
    text = (run.run_dir / "config.yaml").read_text().replace("choices: {}", "choices:\n  attention: eager")
    (folder / "config.yaml").write_text(text + "  +hydra.callbacks.x: '{_target_:os.system,command:touch owned}'\n"
                                        "  hydra.run.dir: /tmp/owned\n  model: 'moe_tiny +x=1'\n")
    assert choices_of(folder, []) == ["attention=eager"]


def test_resume_may_name_a_snapshot(run, tmp_path):
    older = whole_snapshots(run.run_dir)[0]
    with pytest.raises(ConfigError, match="newer snapshot, step_00000004"):
        CommandLine.parse([f"resume={older}"])
    assert CommandLine.parse([f"resume={older}", f"run_dir={tmp_path}/new"]).snapshot == older
    assert CommandLine.parse([f"resume={run.run_dir}"]).snapshot == whole_snapshots(run.run_dir)[-1]


def test_a_sweep_does_not_resume(run):
    with pytest.raises(ConfigError, match="sweep with from="):
        CommandLine.parse(["-m", f"resume={run.run_dir}", "optimizer.lr=1e-3,1e-4"])


def test_a_run_is_not_overwritten_by_another(run, shards, tmp_path):
    other = train_here(tmp_path / "other", *shards, "steps=2", "snapshot=inline")
    before = (other.run_dir / "config.yaml").read_text()
    done = forge("train", f"resume={run.run_dir}", f"run_dir={other.run_dir}", "steps=6")
    assert done.returncode == 2 and "already holds a run" in done.stderr
    assert (other.run_dir / "config.yaml").read_text() == before


def test_a_run_goes_on_elsewhere_with_its_figures(run, shards, tmp_path):
    done = forge("train", *TINY, *shards, f"resume={run.run_dir}", f"run_dir={tmp_path}/on", "steps=6",
                 "snapshot=inline")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "on" / "result.json").read_text())
    assert result["steps"] == 6 and result["tokens"] == 6 * 12 * 32
    assert result["loss_first"] == run.result["loss_first"]


def test_no_secret_is_written_by_from(run, tmp_path):
    done = forge("train", f"from={run.run_dir}", "data.cache=${oc.env:FORGE_TEST_SECRET}", f"run_dir={tmp_path}/again",
                 "launch=torchrun", "launch.nodes=1", env={"FORGE_TEST_SECRET": str(tmp_path / "hunter2")})
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "again" / "config.yaml").read_text()
    assert "hunter2" not in written and "${oc.env:FORGE_TEST_SECRET}" in written


def test_a_run_that_is_done_is_left_as_it_is(run):
    before = (run.run_dir / "result.json").read_text()
    done = forge("train", f"resume={run.run_dir}")
    assert done.returncode == 2 and "at step 4 already" in done.stderr
    assert (run.run_dir / "result.json").read_text() == before


def test_a_directory_has_one_run_at_a_time(tmp_path):
    with owned(tmp_path / "run"), pytest.raises(ConfigError, match="another process is running here"), \
            owned(tmp_path / "run"):
        pass
    with owned(tmp_path / "run"):
        pass


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"format": "forge snapshot", "version": 1, "files": []}',
                                      '{"format": "forge snapshot", "version": 1, "identity": {}, "files": {"a": 1}}',
                                      '{"format": "forge snapshot", "version": 2}', "[" * 100000])
def test_a_manifest_that_says_nothing_is_refused(manifest, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(UnreadableError):
        read_manifest(tmp_path)


@pytest.mark.dist
def test_three_ranks_resume_to_the_same_bits(shards, tmp_path):
    """DDP sums its first update in other buckets than the later ones: losses would hide it, weights do not."""
    line = [*shards, "hardware.processes=3", "micro_batch=null", "snapshot=inline", "snapshot.every=3", "steps=6",
            "comm.bucket_cap_mb=1", "model.width=256", "model.hidden=256", "snapshot.keep=9"]
    whole = train_apart(tmp_path / "whole", *line)
    assert whole.code == 0, whole.err
    half = tmp_path / "whole" / "snapshots" / "step_00000003"
    resumed = train_apart(tmp_path / "resumed", *line, f"resume={half}")
    assert resumed.code == 0, resumed.err
    files = [json.loads((folder / "snapshots" / "step_00000006" / "manifest.json").read_text())["files"]
             for folder in (tmp_path / "whole", tmp_path / "resumed")]
    assert files[0]["model.safetensors"] == files[1]["model.safetensors"]
    assert files[0]["update.safetensors"] == files[1]["update.safetensors"]


@pytest.mark.dist
def test_a_resume_that_the_workers_refuse_leaves_the_run_as_it_was(shards, tmp_path):
    """Whether a snapshot fits the options is known only where its tensors are read, after the run is frozen."""
    run = train_apart(tmp_path / "run", *shards, "steps=2", "snapshot=inline")
    before = (run.run_dir / "config.yaml").read_text()
    refused = forge("train", f"resume={run.run_dir}", "steps=3", "precision=bf16_master")
    assert refused.returncode == 2 and "no float32 masters" in refused.stderr, refused.stderr
    assert (run.run_dir / "config.yaml").read_text() == before
    assert not list(run.run_dir.glob("config.before_*"))
    assert forge("train", f"resume={run.run_dir}", "steps=3").returncode == 0
