"""Shards of conversations and captions, and how their samples read."""

import json

import numpy as np
from nasty_pictures import saved
from PIL import Image
from tars import tar_bytes, written

from forge.data.conversation import Conversation
from forge.data.fields import Picture
from forge.data.shards import Shards

SIZE, EACH = 8, 3       # of a square; placeholders of it


def turn(role, content):
    return {"role": role, "content": content}


def of_one_colour(number, width=SIZE, height=SIZE, place=7):
    """A PNG that shows which it is: (number, place, 9)."""
    return saved(Image.fromarray(np.full((height, width, 3), (number, place, 9), np.uint8)), "PNG")


def chat(key, *messages, pictures=()):
    """Members of one sample. pictures: bytes, in order."""
    shown = {f"{key}.img.{place}": data for place, data in enumerate(pictures)}
    return shown | {f"{key}.json": json.dumps({"messages": messages}).encode()}


def conversation(**changes):
    settings = {"messages_field": "json", "picture_size": SIZE, "tokens_per_picture": EACH, "max_tiles": 1,
                "fit": "squash", "max_length": 100, "picture_token": "<image>", "turn_start": "<|im_start|>",
                "turn_end": "<|im_end|>"}
    return Conversation(**settings | changes)


def option(tmp_path, members, of_conversation=None, names="img.*", **changes):
    """data=shards over one shard of these members (None: the one that is there); all samples are held-out ones too."""
    if members is not None:
        written(tmp_path / "shards" / "a.tar", tar_bytes(members))
    picture = Picture(names, False, "apply", "white", 1_000_000)
    settings = {"train": str(tmp_path / "shards"), "heldout": str(tmp_path / "shards"), "heldout_fraction": 0.2,
                "tokenizer": "bytes", "text_field": "txt", "pictures": {"shown": picture}, "labels": None,
                "arrays": None, "conversation": conversation(**of_conversation or {}), "weights": None,
                "key_dot": "first", "keep_empty": False, "invalid_utf8": "keep", "shuffle_shards": None, "max_bad": 1.0,
                "bad_floor": 100, "staging": None, "cache": str(tmp_path / "cache")}
    return Shards(**settings | changes)


def read(ids):
    """Ids of bytes as text; a run of placeholders as [P], the ends of a turn as [S and E], the end as [.]."""
    text = "".join({256: "P", 257: "[S", 258: "E]", 0: "[.]"}.get(each, chr(each)) for each in ids.tolist())
    return text.replace("P" * EACH, "[P]")


def trained(sample):
    return read(sample["tokens"][sample["trained"]])
