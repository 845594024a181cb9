"""Weights from and to folders in Hugging Face's layout. Only safetensors files are opened: others can hold code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forge.errors import ConfigError, UnreadableError, UnusableEnvironment
from forge.model.decoder import Decoder
from forge.model.huggingface import disagreements, predictors, read_config, settings_of
from forge.model.layouts import BIAS, Layout, Shape, layouts
from forge.model.vision_families import is_vision
from forge.moe_router.memory import Memory
from forge.notes import say

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
                   "preprocessor_config.json", "processor_config.json")
_REMEMBERED = tuple(f".feed_forward.{name}" for name in Memory._fields)        # by a mixture of experts
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHARD_BYTES = 5 * 10**9        # of a released file, so that hosts and file systems with limits take it


class Checkpoint:
    """The tensors of a folder by name; each is read when asked for. Raises UnreadableError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        for path, names in _shards(folder):
            file = _open(path)
            held = set(file.keys())
            for name in held if names is None else names:
                if name not in held:
                    raise UnreadableError(f"{path} has no tensor {name}, which {INDEX} says it has.")
                self._files[name] = file
        self.shapes: dict[str, Shape] = {
            name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}
        other = [name for name, file in self._files.items() if file.get_slice(name).get_dtype() not in _FLOATS]
        self.not_floats = set(other)

    def __call__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise UnreadableError(f"{self.folder}: {name} cannot be read: {error}.") from None
        return tensor


def load_weights(network: nn.Module, decoder: Decoder, folder: Path) -> None:
    """Put the folder's weights into a decoder's network, which keeps its dtype and device. Raises ConfigError where
    the folder holds another model, UnreadableError where it cannot be read whole; then nothing is changed."""
    complaints = list(disagreements(decoder, folder))
    if complaints:
        raise ConfigError("\n".join(complaints))
    learnt = network.state_dict()
    checkpoint = Checkpoint(folder)
    unread = _unread(checkpoint, decoder)
    shapes = {name: tuple(tensor.shape) for name, tensor in learnt.items()}
    layout = _checked_layout(checkpoint, decoder, shapes, unread)
    if unread:
        say(f"{folder} also predicts further tokens than the next, with weights such as {min(unread)}. This decoder "
            f"does not, so they are not read.")
    for name, rule in layout.rules.items():
        learnt[name].copy_(rule.read(checkpoint))


def save_weights(weights: dict[str, Tensor], decoder: Decoder, folder: Path, beside: dict[str, Path]) -> None:
    """Write a new folder that load_weights and transformers read. It appears whole or not at all.

    weights: the state of the decoder's network. beside: files that go along, as `companions` finds them, by their new
    names; of a config.json only the ids of special tokens. Raises ConfigError where the folder is there already, or the
    family's layout cannot hold the decoder; UnusableEnvironment where it cannot be written.
    """
    settings, layout = settings_of(decoder), layouts(decoder)[0]
    learnt = _with_a_place(weights, layout, decoder)
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a folder that is not.")
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.") if weights else "float32"
    stated = read_config(beside["config.json"].parent) if "config.json" in beside else {}
    settings |= {"torch_dtype": dtype, **_special_tokens(stated)}
    if is_vision(settings):
        settings["text_config"] |= _special_tokens(stated.get("text_config", {}))
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        _write_shards(_on_disk(learnt, layout), partial)
        for name in beside.keys() - {"config.json"}:
            shutil.copyfile(beside[name], partial / name)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UnusableEnvironment(f"{folder} cannot be written: {error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def companions(folder: Path) -> dict[str, Path]:
    """The files of a folder that turn text into its model's tokens, and its config.json; by name."""
    return {name: folder / name for name in (*TOKENIZER_FILES, "config.json") if (folder / name).is_file()}


def _shards(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """(file, the tensors to take from it, or None for all)"""
    if (folder / INDEX).exists():
        files: dict[str, list[str]] = {}
        for name, file in _weight_map(folder / INDEX).items():
            files.setdefault(file, []).append(name)
        for file, names in files.items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise UnreadableError(f"{folder / INDEX} names {file!r}, which is not a safetensors file beside it.")
            yield folder / file, names
    elif (folder / SINGLE).exists():
        yield folder / SINGLE, None
    else:
        pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(kind))
        why = (f" {pickled[0]} is a pickle, which can hold code, so it is never opened: convert it to safetensors "
               f"where you trust it." if pickled else "")
        raise UnreadableError(f"{folder} has neither {SINGLE} nor {INDEX}.{why}")


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"{path} is not an index of safetensors files: {error!r}.") from None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise UnreadableError(f"{path} is not an index of safetensors files: its weight_map names no files.")
    return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UnreadableError(f"{path} is missing.") from None
    except (SafetensorError, OSError) as error:
        raise UnreadableError(f"{path} is damaged, or not a safetensors file: {error}.") from None


def _unread(checkpoint: Checkpoint, decoder: Decoder) -> set[str]:
    """The tensors of layers after the decoder's own that predict further tokens."""
    last = decoder.layers + predictors(read_config(checkpoint.folder))
    prefixes = tuple(f"model.layers.{layer}." for layer in range(decoder.layers, last))
    return {name for name in checkpoint.shapes if name.startswith(prefixes)}


def _checked_layout(checkpoint: Checkpoint, decoder: Decoder, shapes: dict[str, Shape], unread: set[str]) -> Layout:
    """The layout of this folder. Raises UnreadableError where tensors are missing, left over or of another shape."""
    def wanted_by(layout: Layout) -> dict[str, Shape]:
        return {name: shape for ours, rule in layout.rules.items() for name, shape in rule.shapes(shapes[ours]).items()}

    layout = min(layouts(decoder), key=lambda one: len(wanted_by(one).keys() - checkpoint.shapes.keys()))
    wanted, found = wanted_by(layout), checkpoint.shapes
    left_over = {name for name in found.keys() - wanted.keys() - unread - layout.idle.keys()
                 if not layout.surplus.fullmatch(name)}
    if decoder.tied and layout.head in left_over:
        left_over -= _equal_head(checkpoint, layout)
    common = wanted.keys() & found.keys()
    complaints = [
        *_listed("misses", wanted.keys() - found.keys()),
        *_listed("also holds", left_over),
        *_listed("holds in another shape", (f"{name} {list(found[name])} (wanted: {list(wanted[name])})"
                                            for name in common if found[name] != wanted[name])),
        *_listed("holds in another format than floating point", common & checkpoint.not_floats)]
    if complaints:
        raise UnreadableError(f"{checkpoint.folder} does not hold this model: it {'; it '.join(complaints)}.")
    return layout


def _equal_head(checkpoint: Checkpoint, layout: Layout) -> set[str]:
    """A tied model's head, where the folder holds it too, and it is the embedding."""
    name, = layout.rules["embedding.weight"].shapes((0, 0))
    equal = name in checkpoint.shapes and torch.equal(checkpoint(layout.head), checkpoint(name))
    return {layout.head} if equal else set()


def _listed(what: str, names: Iterable[str]) -> list[str]:
    """['misses a, b, c and 9 more'], or [] where there are none."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return [f"{what} {', '.join(ordered[:3])}{more}"] if ordered else []


def _with_a_place(weights: dict[str, Tensor], layout: Layout, decoder: Decoder) -> dict[str, Tensor]:
    """Without what only training remembers, and without selection biases that change nothing, where the family has
    none. Raises ConfigError where they do."""
    unplaced = {name for name in weights.keys() - layout.rules.keys() if name.endswith(_REMEMBERED)}
    moved = sorted(name for name in unplaced if name.endswith(f".feed_forward.{BIAS}") and weights[name].any())
    if moved:
        raise ConfigError(f"The layout model.family={decoder.family} has no place for selection biases, and "
                          f"model.routing.balance=bias has moved {moved[0]} away from 0.")
    return {name: tensor for name, tensor in weights.items() if name not in unplaced}


def _on_disk(weights: dict[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    missing, unknown = layout.rules.keys() - weights.keys(), weights.keys() - layout.rules.keys()
    if missing or unknown:
        complaints = _listed("miss", missing) + _listed("also hold", unknown)
        raise ConfigError(f"These are not the weights of this model: they {'; they '.join(complaints)}.")
    for name, rule in layout.rules.items():
        for there, tensor in rule.write(weights[name].detach()).items():
            yield there, tensor.cpu().contiguous()
    dtype = next(iter(weights.values())).dtype
    for name, shape in layout.idle.items():
        yield name, torch.full(shape, float(name.endswith("weight")), dtype=dtype)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """One file, or several of about _SHARD_BYTES with an index. Only one shard at a time is in memory."""
    shards: list[list[str]] = []
    total, pending, size = 0, dict[str, Tensor](), 0

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > _SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.clone()      # rows cut from one parameter share its memory, which save_file refuses
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    files = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for number, file in enumerate(files):
        (folder / f"shard-{number}").rename(folder / file)
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _special_tokens(stated: dict[str, Any]) -> dict[str, Any]:
    """Ids of the tokens that begin, end and pad a text. None rather than the defaults of transformers, which are those
    of one vocabulary."""
    return {name: stated.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
