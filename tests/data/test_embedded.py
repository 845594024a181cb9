"""The sets of pictures that forge makes: what is in their shards, that no content is on both sides, made once, read as
conversations."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import webdataset
from conftest import composed
from PIL import Image

from forge.config import realise
from forge.data.conversation import Conversation
from forge.data.digits import Digits
from forge.data.scenes import KINDS
from forge.data.shapes import Shapes
from forge.errors import UnreadableError, UnusableEnvironment

SPLITS = ("train", "heldout")
TALK = Conversation(messages_field="json", picture_size=24, tokens_per_picture=4, max_tiles=1, fit="squash",
                    max_length=400, picture_token="<image>", turn_start="<|im_start|>", turn_end="<|im_end|>")
PICTURE, START, END = 256, 257, 258
CONFIG = SimpleNamespace(model=SimpleNamespace(vocab_size=259, picture_token=PICTURE,
                                               vision=SimpleNamespace(tokens_per_picture=4)),
                         sequence_length=400, choices={})


def shapes(cache, **changes):
    settings = {"size": 24, "heldout": 0.2, "shard_mb": 1, "tokenizer": "bytes", "conversation": TALK,
                "cache": str(cache), "num_pictures": 120, "most_shapes": 3, "num_questions": 3, "seed": 0,
                "formats": ["png", "jpg"]}
    return Shapes(**settings | changes)


def digits(cache, **changes):
    settings = {"size": 24, "heldout": 0.2, "shard_mb": 1, "tokenizer": "bytes", "conversation": TALK,
                "cache": str(cache)}
    return Digits(**settings | changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(cache):
    """option -> split -> its samples, as the webdataset library reads the made shards."""
    found = {}
    for name, option in (("shapes", shapes(cache)), ("digits", digits(cache))):
        found[name] = {}
        for split in SPLITS:
            option.open(split)
            shards = sorted(cache.glob(f"{name}/*/{split}/*.tar"))
            dataset = webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False)
            found[name][split] = list(dataset)
    return found


def pixels(sample):
    (data,) = (sample[field] for field in ("jpg", "png") if field in sample)
    return np.asarray(Image.open(io.BytesIO(data)))


def text_of(tokens):
    return bytes(token for token in tokens.tolist() if token < 256).decode()


@pytest.mark.parametrize("name", ["shapes", "digits"])
def test_shards_hold_real_pictures_a_caption_and_messages(made, name):
    for sample in made[name]["train"] + made[name]["heldout"]:
        data = sample.get("jpg") or sample["png"]
        assert data.startswith(b"\xff\xd8\xff" if "jpg" in sample else b"\x89PNG")
        assert pixels(sample).shape == (24, 24, 3)
        messages = json.loads(sample["json"])["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert messages[0]["content"].startswith("<image>") and str(messages).count("<image>") == 1
        assert sample["txt"].decode().isprintable() and all(message["content"] for message in messages)
    kinds = ["jpg" in sample for split in SPLITS for sample in made[name][split]]
    assert 0.4 < np.mean(kinds) < 0.6


def test_a_picture_that_is_held_out_has_one_question_and_its_kind(made):
    num_messages = [len(json.loads(sample["json"])["messages"]) for sample in made["shapes"]["train"]]
    assert set(num_messages) == {6}
    for sample in made["shapes"]["heldout"]:
        question, answer = (message["content"] for message in json.loads(sample["json"])["messages"])
        kind = KINDS[int(sample["cls"])]
        assert ("How many" in question) == (kind == "count") and ("small or" in question) == (kind == "size")
        assert (answer == sample["txt"].decode()) == (kind == "caption")


def test_no_arrangement_is_on_both_sides(made):
    """As the pixels and the caption tell it: what there is, and which quarters are not grey."""
    def arrangements(samples):
        coloured = [np.ptp(pixels(sample).astype(int), axis=-1) > 60 for sample in samples]
        return {(sample["txt"], *(bool(part.sum() > 3) for half in np.split(at, 2) for part in np.split(half, 2, 1)))
                for sample, at in zip(samples, coloured, strict=True)}

    train, heldout = (arrangements(made["shapes"][split]) for split in SPLITS)
    assert not train & heldout and len(train) > 60 and len(heldout) > 10
    assert len(made["shapes"]["train"]) + len(made["shapes"]["heldout"]) == 120


def test_digits_are_the_real_ones_each_on_one_side(made):
    from sklearn.datasets import load_digits

    samples = [sample for split in SPLITS for sample in made["digits"][split]]
    assert len(samples) == 1797 and abs(len(made["digits"]["heldout"]) / 1797 - 0.2) < 0.03
    by_number = {int(sample["__key__"]): sample for sample in samples}
    loaded = load_digits()
    for number in range(0, 1797, 50):
        messages = json.loads(by_number[number]["json"])["messages"]
        assert [message["content"] for message in messages] == ["<image>Which digit is this?",
                                                                str(loaded.target[number])]
        small = pixels(by_number[number]).astype(float).reshape(8, 3, 8, 3, 3).mean((1, 3, 4)) / 255 * 16
        assert np.abs(small - loaded.images[number]).mean() < 1         # scaled up by a spline, and down by a mean
    contents = [{pixels(sample).tobytes() for sample in made["digits"][split] if "png" in sample} for split in SPLITS]
    assert not contents[0] & contents[1]


def test_the_same_settings_make_the_same_bytes_and_another_seed_others(made, cache, tmp_path):
    def shards(folder):
        return [path.read_bytes() for path in sorted(folder.glob("shapes/*/*/*.tar"))]

    shapes(tmp_path / "again").open("train")
    assert shards(tmp_path / "again") == shards(cache)
    shapes(tmp_path / "other", seed=1).open("train")
    assert shards(tmp_path / "other") != shards(cache)


def test_a_set_is_made_once_and_one_of_other_settings_beside_it(made, cache, monkeypatch, caplog):
    def never(self, split):
        pytest.fail("made again")

    with monkeypatch.context() as patch:
        patch.setattr(Shapes, "made", never)
        assert len(shapes(cache).open("train")) == len(made["shapes"]["train"])
        another = Conversation(**{**vars(TALK), "messages_field": None})
        assert len(shapes(cache, conversation=another).open("train")) == len(made["shapes"]["train"])
    assert len(shapes(cache, num_pictures=30).open("train")) < 30
    assert caplog.text.count("Making the pictures of data=shapes once") == 1


def test_half_a_set_is_no_set(tmp_path, monkeypatch):
    whole = Shapes.made

    def breaking(self, split):
        yield from list(whole(self, split))[:5]
        raise OSError(28, "as the system says it")

    with monkeypatch.context() as patch:
        patch.setattr(Shapes, "made", breaking)
        with pytest.raises(UnusableEnvironment, match=r"No space is left in .*set data.cache to another folder"):
            shapes(tmp_path).open("train")
    assert not list(tmp_path.glob("shapes/*[!k]"))          # nothing but the lock
    assert len(shapes(tmp_path).open("train")) > 60


def test_samples_are_conversations_with_their_picture(made, cache):
    source, samples = shapes(cache).open("heldout"), made["shapes"]["heldout"]
    assert len(source) == len(samples) and source.whole and source.picture_size == 24
    for index, sample in enumerate(samples):
        read = source[index]
        question, answer = (message["content"] for message in json.loads(sample["json"])["messages"])
        tokens, trained = read["tokens"], read["trained"]
        assert text_of(tokens) == f"user\n{question.removeprefix('<image>')}\nassistant\n{answer}"
        assert text_of(tokens[trained]) == answer and tokens[trained][-1] == END
        assert (tokens == PICTURE).sum() == 4 and read["pictures"].shape == (1, 24, 24, 3)
        difference = np.abs(read["pictures"][0].numpy().astype(int) - pixels(sample))
        assert difference.max() <= (2 if "jpg" in sample else 0)        # another JPEG decoder rounds elsewhere
        assert source.kinds[index] == KINDS[int(sample["cls"])]


def test_captions_are_read_where_no_messages_are_wanted(made, cache):
    source = shapes(cache, conversation=Conversation(**{**vars(TALK), "messages_field": None})).open("heldout")
    for index, sample in enumerate(made["shapes"]["heldout"]):
        assert text_of(source[index]["tokens"]) == sample["txt"].decode() + "\0"


def test_a_damaged_set_says_what_to_delete(tmp_path):
    option = shapes(tmp_path)
    option.open("train")
    (shard,) = tmp_path.glob("shapes/*/heldout/*.tar")
    shard.write_bytes(shard.read_bytes()[:-20000])
    with pytest.raises(UnreadableError, match=r"damaged shard.* If .*shapes.* is damaged, delete it"):
        option.open("heldout")
    shard.unlink()
    with pytest.raises(UnusableEnvironment, match="holds no heldout shards: delete it"):
        option.open("heldout")


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnusableEnvironment, match=r"pillow: pip install pillow"):
        shapes(tmp_path).open("train")
    with pytest.raises(UnusableEnvironment, match=r"data=digits needs PIL: .*forge-switchboard\[digits\]"):
        digits(tmp_path).open("train")


@pytest.mark.parametrize(("changes", "said"), [
    ({"heldout": 0.0}, "data.heldout=0.0 is no fraction"), ({"size": 4}, "data.size=4: at least 8"),
    ({"shard_mb": 0}, "data.shard_mb=0"), ({"num_pictures": 0}, "data.num_pictures=0"),
    ({"num_questions": 0}, "data.num_questions=0"), ({"formats": []}, "data.formats=[]"),
    ({"most_shapes": 5}, "data.most_shapes=5: a picture has room"),
    ({"conversation": Conversation(**{**vars(TALK), "tokens_per_picture": 9})}, "tokens_per_picture=9")])
def test_settings_without_sense_are_problems(tmp_path, changes, said):
    assert list(shapes(tmp_path).problems(CONFIG)) == []
    assert said in " ".join(shapes(tmp_path, **changes).problems(CONFIG))


def test_so_few_pictures_that_none_is_held_out_is_a_sentence(tmp_path):
    with pytest.raises(UnusableEnvironment, match=r"No picture falls to the heldout split: set data.heldout=0.01"):
        shapes(tmp_path, num_pictures=3, heldout=0.01).open("train")


@pytest.mark.parametrize("name", ["shapes", "digits"])
def test_the_defaults_fit_the_model_of_minutes(name):
    config = realise(composed(f"data={name}", "model=vlm_tiny", "batching=packed"))
    assert list(config.data.problems(config)) == []
