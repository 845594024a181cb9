"""conf/ and forge/ mirror each other, every option is what it claims to be, and every mistake is named."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import composed

import forge
from forge.config import check, conf_dir, realise
from forge.errors import ConfigError

NO_GROUP = ("experiment", "bench", "verify")        # the last two: what commands of these names are told, and no run
FILES = sorted(file for file in Path(conf_dir()).glob("*/*.yaml") if file.parent.name not in NO_GROUP)
# What the default model has not, and these take from the model.
OF_OTHER_MODELS = {"augment": ["augment.size=8", "augment.mean=[0,0,0]", "augment.std=[1,1,1]"],
                   "data=pictures": ["data.conversation.picture_size=8"]}
EXPERIMENTS = sorted(Path(conf_dir()).glob("experiment/**/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_option_composes_and_lives_in_the_package_of_its_group(file):
    group = file.parent.name
    more = OF_OTHER_MODELS.get(f"{group}={file.stem}", OF_OTHER_MODELS.get(group, []) if file.stem != "none" else [])
    config = realise(composed(f"{group}={file.stem}" if group != "tracker" else f"tracker=[{file.stem}]", *more))
    part = config.tracker.options[file.stem] if group == "tracker" else getattr(config, group)
    assert type(part).__module__.split(".")[:2] == ["forge", group]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_experiment_composes(file, tmp_path):
    name = file.relative_to(Path(conf_dir()) / "experiment").with_suffix("")
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(9, dtype=np.uint16))
    yours = [f"data.train={ids}"] if file.parent.name == "rows" else []
    check(realise(composed(f"experiment={name}", *yours)))


def test_the_default_run_has_no_problems():
    check(realise(composed()))


def test_every_package_of_a_group_has_options_and_every_option_a_module():
    groups = {file.parent.name for file in FILES}
    packages = {folder.name for folder in Path("forge").iterdir() if (folder / "__init__.py").exists()}
    assert groups <= packages
    for group in groups:
        text = (Path("forge") / group / "__init__.py").read_text()
        assert "Protocol" in text, f"forge/{group}/__init__.py holds the protocol"


@pytest.mark.parametrize(("overrides", "said"), [
    (["+comm.bucket_cap=50"], "comm.bucket_cap is not a setting. Did you mean 'bucket_cap_mb'?"),
    (["comm.bucket_cap_mb=big"], "comm.bucket_cap_mb='big': a whole number is wanted."),
    (["comm._target_=forge.attention.eager.Eager"], "forge.attention.eager.Eager lies outside forge.comm"),
    (["comm._target_=os.system"], "lies outside forge and allowed_packages=[]"),
    (["comm._target_=forge.comm.ddp.nothing"], "forge.comm.ddp has no nothing"),
    (["comm._target_=forge.comm.sync.Alone"], "is not a"),
    (["comm._target_=forge.comm.ddp.dataclass"], "is not a dataclass"),
    (["~comm"], "comm is not set"),
    (["+colour=red"], "colour is not a setting."),
    (["tracker.every=often"], "tracker.every='often'"),
    (["optimizer.groups=[{match: x, lr_scale: 1.0, weight_decay: null, frozen: maybe}]"], "optimizer.groups[0].frozen"),
])
def test_a_mistake_is_named(overrides, said):
    with pytest.raises(ConfigError) as raised:
        realise(composed(*overrides))
    assert said in str(raised.value)


@pytest.mark.parametrize(("overrides", "said"), [
    (["global_batch=10", "micro_batch=4"], "global_batch=10 does not divide into micro_batch=4 on 1 ranks"),
    (["hardware.processes=3"], "global_batch=8 does not divide into 3 ranks"),
    (["stop_at=501", "steps=400"], "stop_at=501"),
    (["steps=0"], "steps=0"),
    (["attention=flash", "hardware=gpu"], "attention=flash computes in half precision: add precision=bf16"),
    (["data=shards"], "forge.shards make"),
    (["model.routing.top_k=9"], "model.routing.top_k=9"),
    (["comm.bucket_cap_mb=0"], "comm.bucket_cap_mb=0"),
])
def test_parts_that_cannot_work_together_say_what_to_change(overrides, said):
    with pytest.raises(ConfigError) as raised:
        check(realise(composed(*overrides)))
    assert said in str(raised.value)


def test_no_option_needs_torch_to_be_checked():
    """The parent starts faster, and a worker sets its threads before torch reads them."""
    targets = [file.read_text().split("_target_: ")[1].split()[0] for file in FILES if "_target_: " in file.read_text()]
    modules = sorted({target.rpartition(".")[0] for target in targets})
    lines = [f"import {module}" for module in modules] + ["import forge.train, forge.worker, sys",
                                                          "sys.exit('torch' in sys.modules)"]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)]).returncode == 0


def test_nothing_but_a_kernel_needs_triton():
    """It is no dependency: PyTorch brings it along where it has a use for it."""
    folder = Path(forge.__file__).parent
    kernels = {"adamw", "choice", "combine", "cross_entropy", "gated", "gelu_norm", "grouped", "placement",
               "weight_gradient"}
    names = [".".join(("forge", *file.relative_to(folder).with_suffix("").parts)) for file in folder.rglob("*.py")]
    assert kernels == {name.rpartition(".")[2] for name in names if "triton.jit" in _source(folder, name)}
    modules = [name.removesuffix(".__init__") for name in names
               if not name.endswith("__main__") and name.removeprefix("forge.kernels.") not in kernels]
    lines = ["import sys", "sys.modules['triton'] = None", *(f"import {name}" for name in modules)]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _source(folder, name):
    return folder.parent.joinpath(*name.split(".")).with_suffix(".py").read_text()


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        check(realise(composed("global_batch=10", "micro_batch=4", "stop_at=501", "comm.bucket_cap_mb=0")))
    assert len(str(raised.value).splitlines()) >= 3


def test_no_secret_is_written(tmp_path, monkeypatch):
    from forge.freeze import freeze

    monkeypatch.setenv("FORGE_TEST_SECRET", "hunter2")
    settings = composed("data.cache=${oc.env:FORGE_TEST_SECRET}", f"run_dir={tmp_path}/run")
    assert realise(settings).data.cache == "hunter2"
    freeze(settings, tmp_path / "run")
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "hunter2" not in written and "${oc.env:FORGE_TEST_SECRET}" in written


def test_torch_finds_what_it_reads_when_it_is_imported(monkeypatch):
    """Bits that repeat need it of cuBLAS; what the user set stays."""
    monkeypatch.setattr("os.environ", {})
    realise(composed("hardware=cpu")).prepare_environment()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ and os.environ["OMP_NUM_THREADS"]
    realise(composed("hardware=cpu", "reproducible=true")).prepare_environment()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    realise(composed("hardware=cpu", "reproducible=true")).prepare_environment()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
