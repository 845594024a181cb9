"""Token files made of shards of text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from forge.data.disk import ANOTHER_OUT, cache_folder, replacing, writing
from forge.data.source import encoded
from forge.data.storage import Location
from forge.data.texts import Texts, open_texts
from forge.data.token_format import Sidecar, Width, sidecar_of, write_sidecar
from forge.data.tokenizer import Bytes, FromFile, open_tokenizer
from forge.data.tokens import made_by
from forge.errors import ConfigError


def tokenise(shards: Sequence[Location], field: str, tokenizer: str, out: Path, overwrite: bool) -> Sidecar:
    """Write `out` and its sidecar: the ids of every text, each followed by the tokenizer's end. Raises ForgeError; what
    was at `out` is then still there."""
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} is there already: choose another OUT, or replace it with overwrite=true.")
    opened = open_tokenizer(tokenizer)
    texts = open_texts(shards, field, cache_folder(None))
    dtype: Width = "uint8" if opened.vocab_size <= 1 << 8 else "uint16" if opened.vocab_size <= 1 << 16 else "uint32"
    digest, documents, tokens = hashlib.blake2b(digest_size=16), 0, 0
    with writing(out.parent, ANOTHER_OUT):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            for ids in _ids(texts, opened):
                written = np.array(ids, np.dtype(dtype).newbyteorder("<")).tobytes()
                file.write(written)
                digest.update(written)
                documents, tokens = documents + 1, tokens + len(ids)
            sidecar_of(out).unlink(missing_ok=True)     # between the two renames, the old one would lie about the new
        made = Sidecar(dtype, tokens, documents, opened.vocab_size, opened.end, made_by(tokenizer), digest.hexdigest())
        write_sidecar(out, made)
    return made


def _ids(texts: Texts, tokenizer: Bytes | FromFile) -> Iterable[list[int]]:
    if isinstance(tokenizer, FromFile):
        return encoded(texts, tokenizer)
    return ([*texts[index], tokenizer.end] for index in range(len(texts)))
