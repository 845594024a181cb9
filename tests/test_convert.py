"""forge.convert: a run to Hugging Face's layout and back, bit for bit, with the tokenizer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import forge, train_here
from decoders import SMALL, parts
from pictures import ORDERS, small
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forge import convert
from forge.batch import Batch
from forge.errors import ConfigError, Exit, UnreadableError
from forge.restore import restored


@pytest.fixture
def run_dir(tmp_path, shards):
    run = train_here(tmp_path / "run", *shards, "steps=2", "snapshot=inline")
    assert run.code == 0, run.err
    return run.run_dir


def _convert(place, target, *words):
    return convert.convert([f"from={place}", f"to={target}", *words])


def _folder(decoder, folder):
    """A folder of random weights, with two files of a tokenizer."""
    from forge.model.weights import save_weights

    torch.manual_seed(0)
    save_weights(decoder.build(parts()).state_dict(), decoder, folder, {})
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    return load_file(folder / "model.safetensors")


def test_a_run_becomes_a_folder_that_transformers_loads(run_dir, tmp_path, capsys):
    assert _convert(run_dir, tmp_path / "f") == Exit.ANSWERED
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "f")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "f", attn_implementation="eager")
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with restored(run_dir, [], ()) as run, torch.no_grad():
        ours = run.model.logits(Batch({"tokens": tokens}, 0, 0))
        assert (ours - theirs(tokens).logits).norm() <= 1e-5 * ours.norm()


def test_a_snapshot_can_be_named(run_dir, tmp_path):
    (snapshot,) = (run_dir / "snapshots").iterdir()
    _convert(snapshot, tmp_path / "f")
    assert (tmp_path / "f/model.safetensors").exists()


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "dots1", "deepseek_v3", "llava", "internvl"])
def test_there_and_back_keeps_every_bit_and_the_tokenizer(name, tmp_path):
    decoder = replace(small(name) if name in ORDERS else SMALL[name], vocab_size=300)
    wanted = _folder(decoder, tmp_path / "f")
    _convert(tmp_path / "f", tmp_path / "run", "seed=7")
    _convert(tmp_path / "run", tmp_path / "g")
    found = load_file(tmp_path / "g/model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert (tmp_path / "g/tokenizer_config.json").read_text() == '{"eos_token": "x"}'
    assert json.loads((tmp_path / "g/config.json").read_text()) == json.loads((tmp_path / "f/config.json").read_text())


def test_what_was_converted_can_be_sampled(tmp_path):
    _folder(replace(SMALL["gpt2"], vocab_size=300), tmp_path / "f")
    assert forge("convert", f"from={tmp_path}/f", f"to={tmp_path}/run").returncode == 0
    done = forge("sample", f"from={tmp_path}/run", "prompt=def ", "length=3", "hardware=cpu")
    assert done.returncode == 0 and done.stdout.startswith("def "), done.stderr


def _unwritten(words, target, error, match):
    with pytest.raises(error, match=match):
        convert.convert(words)
    assert not Path(target).exists()


def test_mistakes_are_named_and_nothing_is_written(run_dir, tmp_path):
    to = f"to={tmp_path}/f"
    _unwritten([to], f"{tmp_path}/f", ConfigError, "from= and to= are wanted")
    _unwritten([f"from={tmp_path}", to], f"{tmp_path}/f", ConfigError, "neither a run directory")
    _unwritten([f"from={run_dir}", to, "seed=1"], f"{tmp_path}/f", ConfigError, "seed=1: settings belong to a run")
    (run_dir / "snapshots/step_00000002/model.safetensors").write_bytes(b"damaged")
    _unwritten([f"from={run_dir}", to], f"{tmp_path}/f", UnreadableError, "whole")
    _folder(replace(SMALL["gpt2"], vocab_size=300), tmp_path / "g")
    _unwritten([f"from={tmp_path}/g", to, "sead=1"], f"{tmp_path}/f", ConfigError, "sead")
    with pytest.raises(ConfigError, match="is there already"):
        _convert(run_dir, tmp_path / "g")
    (tmp_path / "g/model.safetensors").write_bytes(b"damaged")
    _unwritten([f"from={tmp_path}/g", to], f"{tmp_path}/f", UnreadableError, "not a safetensors file")
