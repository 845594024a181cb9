"""data=pictures: sets of one's own with pictures, without a word about their fields."""

import json

import pytest
from conftest import train_here

pytest.importorskip("PIL")

SMALL = ["model=vlm_tiny", "data=pictures", "batching=packed", "sequence_length=96", "global_batch=2", "micro_batch=2",
         "steps=2", "hardware=cpu", "tracker=[]", "tracker.every=1", "evaluation=none", "snapshot=none",
         "model.layers=1", "model.vision.layers=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from random import Random

    from forge.data.drawing import encoded, rendered
    from forge.data.pack import pack_samples
    from forge.data.scenes import drawn

    def samples():
        for number in range(24):
            draw = Random(number)
            scene = drawn(draw, 2)
            said = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": scene.caption}]
            yield f"{number:03}", {"jpg": encoded(rendered(scene, 40, draw), "jpg"), "txt": scene.caption.encode(),
                                   "json": json.dumps({"messages": said}).encode()}

    folder = tmp_path_factory.mktemp("own") / "set"
    pack_samples(samples(), folder, 1 << 20)
    return folder


@pytest.mark.parametrize("words", [[], ["data.conversation.messages_field=json"]])
def test_captions_and_conversations_train(words, folder, tmp_path):
    done = train_here(tmp_path / "run", *SMALL, f"data.train={folder}", f"data.cache={tmp_path / 'cache'}", *words)
    assert done.code == 0 and done.losses[2] < done.losses[1]
    assert 0 < done.records[0]["targets"] < 2 * 96
