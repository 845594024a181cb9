"""Pictures and the tokens they belong to: together in every batch, for any ranks and workers, and after a resume."""

import itertools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chats import EACH, SIZE, chat, conversation, of_one_colour, option, read, turn
from tars import flip_on_disk

from forge.batch import IGNORED, Cursor
from forge.batching.bucketed import Bucketed
from forge.batching.fixed import Fixed
from forge.batching.packed import Packed
from forge.data import NAMES
from forge.dataloader.simple import Simple
from forge.dataloader.webdataset import Workers
from forge.errors import ConfigError, UnreadableError
from forge.feed import Feed
from forge.hardware import Topology

BATCHINGS = [Packed(96, 8), Packed(64, 1000), Bucketed(96, [40, 52])]
ALONE = Topology(torch.device("cpu"), 0, 0, 1, None)
COUNT = 40


def members(count=COUNT, pictures=lambda number: number % 3):
    """Sample n has `pictures(n)` pictures, coloured (n, place, 9), and the answer n."""
    made = {}
    for number in range(count):
        shown = [of_one_colour(number, place=place) for place in range(pictures(number))]
        question = "<image>".join(["?", *"!" * len(shown)])
        made |= chat(f"{number:03}", turn("user", question), turn("assistant", str(number)), pictures=shown)
    return made


def opened(tmp_path, *arguments, **changes):
    return option(tmp_path, members(*arguments), {"max_length": 60}, **changes).open("train")


def again(tmp_path, **changes):
    """From the shard that is there."""
    return option(tmp_path, None, {"max_length": 60}, **changes).open("train")


def feed(source, batching, **changes):
    settings = {"source": source, "batching": batching, "seed": 3, "global_batch": 4, "micro_batch": 2, "data_rank": 0,
                "data_size": 1}
    return Feed(**settings | changes)


def documents(tensors):
    """(tokens, targets) of each document, in the order of the rows."""
    for row, (tokens, targets) in enumerate(zip(tensors["tokens"], tensors["targets"], strict=True)):
        length = int(tensors["lengths"][row])
        of = tensors["documents"][row] if "documents" in tensors else torch.zeros(len(tokens), dtype=torch.int32)
        for number in range(int(of[length - 1]) + 1 if length else 0):
            chosen = (of == number) & (torch.arange(len(tokens)) < length)
            yield tokens[chosen], targets[chosen]


def answers(tensors):
    """(answer, its pictures, their seeds) of each document. Whatever belongs together is checked on the way."""
    at = 0
    for tokens, targets in documents(tensors):
        answer = read(targets[targets != IGNORED]).removesuffix("E]")
        count = int((tokens == 256).sum()) // EACH
        shown = tensors["pictures"][at:at + count]
        assert read(tokens).count("[P]") == count == int(answer) % 3
        assert (shown == torch.tensor([[int(answer), place, 9] for place in range(count)],
                                      dtype=torch.uint8).reshape(-1, 1, 1, 3)).all()
        yield answer, shown, tensors["picture_seeds"][at:at + count].tolist() if "picture_seeds" in tensors else []
        at += count
    assert at == len(tensors["pictures"])


@pytest.mark.parametrize("batching", BATCHINGS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_answer_comes_once_with_its_pictures_on_whatever_rank(batching, size, tmp_path):
    source = opened(tmp_path)
    seeds = {}
    for epoch in (0, 1):
        each = [feed(source, batching, data_rank=rank, data_size=size, micro_batch=1) for rank in range(size)]
        found = [one for share in each for index in range(len(share.plan(epoch)))
                 for batch in share[Cursor(epoch, index)].batches for one in answers(batch.tensors)]
        assert sorted(int(answer) for answer, _, _ in found) == list(range(COUNT))
        seeds |= {(epoch, answer): drawn for answer, _, drawn in found}
    everywhere = [seed for drawn in seeds.values() for seed in drawn]
    assert len(set(everywhere)) == len(everywhere) == 2 * sum(number % 3 for number in range(COUNT))
    plain = feed(source, Packed(64, 2))         # seeds depend on seed, epoch and sample alone
    for batch in (batch for index in range(len(plain.plan(1))) for batch in plain[Cursor(1, index)].batches):
        assert all(seeds[1, answer] == drawn for answer, _, drawn in answers(batch.tensors))
    (other, *_) = feed(source, Packed(64, 2), seed=4)[Cursor()].batches
    assert not {seed for _, _, drawn in answers(other.tensors) for seed in drawn} & set(everywhere)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("batching", BATCHINGS[::2], ids=str)
def test_workers_and_a_resume_change_nothing(batching, tmp_path):
    each = feed(opened(tmp_path), batching)
    plain = list(itertools.islice(Simple().build(each, ALONE), 12))
    assert len(each.plan(0)) < 12           # so that they cross an epoch's edge
    for count, start in ((2, 0), (1, 3), (0, 7)):
        reader = Workers(count, 0.5, 2, True, False).build(each, ALONE)
        reader.seek(plain[start - 1].cursor if start else Cursor())
        for one, other in zip(itertools.islice(reader, 12 - start), plain[start:], strict=True):
            for batch, twin in zip(one.batches, other.batches, strict=True):
                assert batch.tensors.keys() == twin.tensors.keys() and batch.num_targets == twin.num_targets
                assert all(batch.tensors[name].equal(tensor) for name, tensor in twin.tensors.items())
        reader.close()


@pytest.mark.parametrize("batching", [BATCHINGS[0], BATCHINGS[2]], ids=str)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_batch_of_text_has_the_tensors_all_the_same(batching, tmp_path):
    """Every rank runs the tower, whatever it was given; also a rank whose rows are empty."""
    source = option(tmp_path, members(6, lambda number: int(number == 5)), {"max_length": 60}).open("train")
    empty = batching.collate([(), ()], source)
    assert empty["pictures"].shape == (0, SIZE, SIZE, 3) and empty["pictures"].dtype == torch.uint8
    assert empty["picture_samples"].shape == (0, 2) and (empty["targets"] == IGNORED).all()
    reader = Workers(1, 0.5, 2, True, False).build(feed(source, batching, global_batch=1, micro_batch=1), ALONE)
    batches = [batch for work in itertools.islice(reader, 6) for batch in work.batches]
    reader.close()
    assert {"pictures", "picture_seeds"} <= set.intersection(*(set(batch.tensors) for batch in batches))
    assert {batch.tensors["pictures"].dtype for batch in batches} == {torch.uint8}
    assert {batch.tensors["picture_seeds"].dtype for batch in batches} == {torch.int64}
    assert all(batch.tensors["pictures"].is_contiguous() for batch in batches)


@pytest.mark.parametrize("batching", BATCHINGS, ids=str)
def test_the_names_of_what_samples_and_batches_have_are_those_that_no_field_may_take(batching, tmp_path):
    source = opened(tmp_path)
    rows = list(batching.plan(source, 0, 0, 4)[0])
    made = feed(source, batching)[Cursor()].batches[0].tensors
    assert {"tokens", "targets"} < source[0].keys() | batching.collate(rows, source).keys() | made.keys() <= NAMES


def test_the_samples_of_pictures_are_those_of_the_plan(tmp_path):
    source, batching = opened(tmp_path), BATCHINGS[0]
    rows = batching.plan(source, 0, 0, 8)[0]
    wanted = [[piece.sample, number] for row in rows for piece in row
              for number in range(len(source[piece.sample]["pictures"]))]
    assert batching.collate(rows, source)["picture_samples"].tolist() == wanted


def test_what_the_augmentation_reads_is_what_comes(tmp_path):
    def negative(batch):
        batch.tensors["picture_seeds"].neg_()
        return batch

    each = feed(opened(tmp_path), BATCHINGS[0], read=negative)
    plain = feed(each.source, BATCHINGS[0])
    for batch, twin in zip(each[Cursor()].batches, plain[Cursor()].batches, strict=True):
        assert batch.tensors["picture_seeds"].equal(-twin.tensors["picture_seeds"])


# ---- what must not be

def test_rows_that_cut_are_refused(tmp_path):
    source = opened(tmp_path)
    with pytest.raises(ConfigError, match=r"batching=fixed cuts .*data\.conversation.* set batching=packed"):
        Fixed(32, True).plan(source, 0, 0, 2)
    (problem,) = Fixed(32, True).problems(SimpleNamespace(data=SimpleNamespace(conversation=conversation())))
    assert "batching=fixed cuts" in problem
    assert not [*Fixed(32, True).problems(SimpleNamespace(data=SimpleNamespace()))]
    longest = int(source.lengths.max())
    for short in (Packed(longest - 2, 8), Bucketed(longest - 2, [8])):
        with pytest.raises(ConfigError, match=rf"{longest} tokens does not fit.*set sequence_length={longest - 1}"):
            short.plan(source, 0, 0, 2)
    Packed(longest - 1, 8).plan(source, 0, 0, 2)


class Pictured:
    """A source that says of itself that it cannot be cut, and has one picture for `num_placeholders` placeholders."""

    whole, picture_size, picture_token, tokens_per_picture, fingerprint = True, SIZE, 256, EACH, ""

    def __init__(self, num_placeholders):
        self.tokens = torch.tensor([*[256] * num_placeholders, 65, 66])
        self.lengths = np.array([len(self.tokens)])

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {"tokens": self.tokens, "pictures": torch.zeros(1, SIZE, SIZE, 3, dtype=torch.uint8)}


@pytest.mark.parametrize("number", [0, EACH - 1, EACH + 1, 2 * EACH])
@pytest.mark.parametrize("batching", [Packed(20, 1), Bucketed(20, [8])], ids=str)
def test_another_number_of_placeholders_is_found_on_the_host(number, batching):
    source = Pictured(number)
    with pytest.raises(UnreadableError, match=rf"has {number} placeholders \(id 256\) and 1 pictures, which want"):
        batching.collate(batching.plan(source, 0, 0, 1)[0], source)


@pytest.mark.parametrize("batching", [Packed(20, 1), Bucketed(20, [8])], ids=str)
def test_placeholders_are_never_predicted(batching):
    """Also of a source that does not say what is trained on."""
    source = Pictured(EACH)
    tensors = batching.collate(batching.plan(source, 0, 0, 1)[0], source)
    assert tensors["targets"][tensors["targets"] != IGNORED].tolist() == [65, 66]


# ---- bad pictures

def broken(tmp_path, *numbers):
    """Changes a byte in the first picture of these samples, once the shard is indexed."""
    shard = tmp_path / "shards" / "a.tar"
    for number in numbers:
        flip_on_disk(shard, shard.read_bytes().index(of_one_colour(number, place=0)) + 60)


@pytest.mark.parametrize("batching", BATCHINGS, ids=str)
def test_a_conversation_with_a_bad_picture_is_replaced_by_a_whole_one(batching, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    opened(tmp_path)
    broken(tmp_path, 4, 14)
    source = again(tmp_path)
    each = feed(source, batching)
    found = [one for index in range(len(each.plan(0))) for batch in each[Cursor(0, index)].batches
             for one in answers(batch.tensors)]
    shown = sorted(int(answer) for answer, _, _ in found)
    assert len(shown) == COUNT and not {4, 14} & set(shown)
    assert caplog.text.count("Dropped a sample, another takes its place") == 2
    for number in (4, 14):
        sample = source[number]
        instead = int(read(sample["tokens"][sample["trained"]]).removesuffix("E]"))
        assert source.lengths[instead] == len(sample["tokens"]) <= source.lengths[number]
        others = np.delete(source.lengths, number)
        assert source.lengths[instead] == max(others[others <= source.lengths[number]])
        assert len(sample["pictures"]) == instead % 3 and sample["pictures"][:, 0, 0, 0].eq(instead).all()


def test_a_shorter_conversation_takes_the_place_whole(tmp_path):
    opened(tmp_path, 3, lambda number: 3 - number)
    broken(tmp_path, 0)
    source = again(tmp_path)
    assert source.lengths[1] < source.lengths[0]
    assert all(source[0][name].equal(source[1][name]) for name in ("tokens", "trained", "pictures"))
    batching = Packed(int(source.lengths[0]) - 1, 1)        # a row that it does not fill
    rows = [row for batch in batching.plan(source, 0, 0, 1) for row in batch]
    tensors = batching.collate(rows, source)
    assert sorted(read(targets[targets != IGNORED]) for targets in tensors["targets"]) == ["1E]", "1E]", "2E]"]
    assert len(tensors["pictures"]) == 2 + 2 + 1


def test_where_nothing_is_as_short_the_sample_stays_without_what_is_trained(tmp_path):
    def few(number):
        return 1

    opened(tmp_path, 3, few)
    broken(tmp_path, 0, 1, 2)
    source = again(tmp_path)
    for number in range(3):
        sample = source[number]
        assert len(sample["tokens"]) == source.lengths[number] and not sample["trained"].any()
        assert sample["pictures"].eq(128).all() and len(sample["pictures"]) == 1
    tensors = BATCHINGS[0].collate(BATCHINGS[0].plan(source, 0, 0, 1)[0], source)
    assert (tensors["targets"] == IGNORED).all() and len(tensors["pictures"]) == 3


def test_too_many_bad_pictures_end_the_run(tmp_path):
    opened(tmp_path)
    broken(tmp_path, 1, 4, 7)
    source = again(tmp_path, max_bad=0.01, bad_floor=2)
    source[0]
    with pytest.raises(UnreadableError, match=r"3 of \d+ samples are bad, more than data\.max_bad=0\.01 and data"):
        source[1]       # 4 and 7 would take its place


# ---- what is said before a run

def said(tmp_path, of_conversation=None, vocab_size=259, sequence_length=100, model=None, **changes):
    vision = SimpleNamespace(tokens_per_picture=EACH)
    model = model or SimpleNamespace(vocab_size=vocab_size, vision=vision, picture_token=256)
    config = SimpleNamespace(model=model, sequence_length=sequence_length, choices={"model": "vlm_tiny"},
                             batching=SimpleNamespace(takes_fields=True))
    return [*option(tmp_path, {"a.json": b"{}"}, of_conversation, **changes).problems(config)]


def test_a_conversation_that_fits_has_no_problems(tmp_path):
    assert said(tmp_path) == [] and said(tmp_path, pictures=None, model=SimpleNamespace(vocab_size=259)) == []


@pytest.mark.parametrize(("settings", "words"), [
    ({"vocab_size": 258}, ["model.vocab_size=258", "set model.vocab_size=259"]),
    ({"sequence_length": 99}, ["data.conversation.max_length=100", "sequence_length=99"]),
    ({"of_conversation": {"max_length": 1}}, ["data.conversation.max_length=1:"]),
    ({"of_conversation": {"max_length": EACH}}, ["data.conversation.tokens_per_picture=3 leaves no room"]),
    ({"of_conversation": {"max_tiles": 0}}, ["data.conversation.max_tiles=0: at least 1"]),
    ({"of_conversation": {"picture_size": 0}}, ["data.conversation.picture_size=0: at least 1"]),
    ({"of_conversation": {"tokens_per_picture": 4}}, ["tokens_per_picture=4 and the model makes 3"]),
    ({"model": SimpleNamespace(vocab_size=300)}, ["model=vlm_tiny takes no pictures", "data.pictures=null"]),
    ({"model": SimpleNamespace(vocab_size=300, vision=SimpleNamespace(tokens_per_picture=EACH), picture_token=5)},
     ["model.picture_token=5", "set model.picture_token=256"]),
])
def test_what_does_not_fit_is_a_problem_that_names_the_setting(settings, words, tmp_path):
    (problem,) = said(tmp_path, **settings)
    assert all(word in problem for word in words)


def test_several_pictures_of_a_field_are_for_conversations(tmp_path):
    (problem,) = said(tmp_path, conversation=None)
    assert "the field shown cannot be all of img.*" in problem
