"""python -m forge.convert from=RUN to=FOLDER      a run's newest snapshot, or the one named, to Hugging Face's layout
python -m forge.convert from=FOLDER to=RUN      and back: a run directory that evaluate, sample and from= take

Tokenizer files go along. Other words override settings of the new run, as for forge.train. To train from released
weights, no conversion is needed: python -m forge.train model.weights=FOLDER.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, Exit
from forge.words import packages, reporting, split, take

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from forge.config import Config
    from forge.model.decoder import Decoder, Family

SETTINGS: dict[str, Any] = {"to": ""}
CARRIED = "huggingface"         # folder of a converted run: what came beside the weights

# The option whose settings a converted run starts from, before those of the folder replace them.
_OPTIONS: dict[Family, str] = {"gpt2": "gpt2_124m", "llama": "llama_8b", "qwen2": "llama_8b", "qwen3": "llama_8b",
                               "mixtral": "mixtral_8x7b", "olmoe": "olmoe_1b_7b", "qwen3_moe": "qwen3_30b_a3b",
                               "dots1": "dots1_142b_a14b", "deepseek_v3": "moonlight_16b_a3b"}
_WITH_PICTURES = "vlm_460m"


def main() -> None:
    with reporting(__doc__):
        sys.exit(convert(sys.argv[1:]))


def convert(arguments: list[str]) -> Exit:
    """Convert in the direction that `from` asks for. Raises ForgeError."""
    own, rest = split(arguments)
    asked, overrides = take(SETTINGS, rest)
    if "from" not in own or not asked["to"]:
        raise ConfigError(f"from= and to= are wanted.\n{__doc__}")
    source, target = Path(own["from"]), Path(asked["to"])
    if target.exists():
        raise ConfigError(f"to={target} is there already: name a folder that is not.")
    if (source / "config.json").exists():
        from_huggingface(source, target, overrides, packages(own))
    elif overrides:
        raise ConfigError(f"{overrides[0]}: settings belong to a run, and to={target} is to be a folder of weights.")
    else:
        to_huggingface(source, target, packages(own))
    print(target)
    return Exit.ANSWERED


def to_huggingface(place: Path, folder: Path, allowed: tuple[str, ...]) -> None:
    """Write the weights of a run, or of one of its snapshots, as a folder that transformers loads."""
    from forge.config import load
    from forge.model.decoder import Decoder
    from forge.model.weights import save_weights
    from forge.snapshot.folder import find_snapshot, read_manifest, run_of
    from forge.snapshot.store import read_part, verify

    run_dir = run_of(place)
    config = load(run_dir, allowed)
    if not isinstance(config.model, Decoder):
        raise ConfigError(f"from={place}: {type(config.model).__name__} has no Hugging Face layout; forge's own "
                          f"decoder has.")
    snapshot = find_snapshot(place)
    verify(snapshot, read_manifest(snapshot))
    save_weights(read_part(snapshot / "model.safetensors"), config.model, folder, _beside(run_dir, config))


def from_huggingface(folder: Path, run_dir: Path, overrides: list[str], allowed: tuple[str, ...]) -> None:
    """Write a run directory with one snapshot, at step 0, that holds the folder's weights."""
    import torch

    from forge.config import check, realise
    from forge.freeze import freeze
    from forge.hardware import Topology
    from forge.model import Parts
    from forge.model.huggingface import decoder_of, read_config
    from forge.model.weights import companions
    from forge.snapshot.store import write_snapshot
    from forge.state import Progress, RunState

    decoder = decoder_of(read_config(folder), f"{folder}/config.json")
    files = companions(folder)
    settings = _settings(replace(decoder, weights=str(folder.absolute())), run_dir, files, overrides)
    config = realise(settings, allowed)
    check(config)
    model = config.model.build(Parts(config.attention, config.operators, config.moe_router, config.loss))
    alone = Topology(torch.device("cpu"), rank=0, local_rank=0, world_size=1, mesh=None)

    (run_dir / CARRIED).mkdir(parents=True)
    for name, file in files.items():
        shutil.copyfile(file, run_dir / CARRIED / name)
    if "tokenizer.json" in files:       # what was checked is the folder's own; the run keeps its copy
        settings.data.tokenizer = str((run_dir / CARRIED / "tokenizer.json").absolute())
    write_snapshot(run_dir, RunState({"model": model, "progress": Progress()}, {}), 0, {}, alone)
    freeze(settings, run_dir)


def _settings(decoder: Decoder, run_dir: Path, files: dict[str, Path], overrides: list[str]) -> DictConfig:
    """The defaults of forge.train, with this decoder and its tokenizer."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf, open_dict

    from forge.command_line import choices_in, in_a_sentence
    from forge.config import conf_dir
    from forge.model.vlm import VLM

    option = _WITH_PICTURES if isinstance(decoder, VLM) else _OPTIONS[decoder.family]
    try:
        with initialize_config_dir(conf_dir(), version_base="1.3"):
            composed = compose("train", [f"model={option}", *overrides], return_hydra_config=True)
    except HydraException as error:
        raise ConfigError(in_a_sentence(error)) from None
    choices = choices_in(composed.hydra.runtime.choices, composed)
    with open_dict(composed):
        composed.pop("hydra")
        composed.choices = choices
        composed.run_dir = str(run_dir.absolute())
        composed.model = {"_target_": composed.model._target_, **asdict(decoder)}
        if decoder.rotary is None:
            composed.sequence_length = min(composed.sequence_length, decoder.max_length)
        if "tokenizer.json" in files:
            composed.data.tokenizer = str(files["tokenizer.json"].absolute())
    settings = OmegaConf.create(OmegaConf.to_container(composed, resolve=False))
    assert isinstance(settings, DictConfig)
    return settings


def _beside(run_dir: Path, config: Config) -> dict[str, Path]:
    """Tokenizer files and special tokens of a run: those it was converted with, those its weights came with, or those
    its data were read with."""
    from forge.data.tokenizer import BYTES
    from forge.model.weights import companions

    files: dict[str, Path] = {}
    weights = getattr(config.model, "weights", None)
    for folder in (Path(weights) if weights else None, run_dir / CARRIED):
        files |= companions(folder) if folder else {}
    if config.data.tokenizer not in (None, BYTES):
        chosen = Path(config.data.tokenizer).expanduser()
        files |= companions(chosen.parent) | {"tokenizer.json": chosen}
    return files


if __name__ == "__main__":
    main()
