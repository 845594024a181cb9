"""Text goes through either tokenizer and comes back, and what is missing is named."""

import json
import sys
from types import SimpleNamespace

import pytest

from forge.data.tokenizer import Bytes, open_tokenizer, vocabulary_problems
from forge.errors import ConfigError, UnreadableError, UnusableEnvironment

TEXT = "def f(x):\n    return '\u00e9\U0001F600'  # <|endoftext|> </s>\r\n"


@pytest.fixture
def trained(tmp_path):
    """Train a small byte-level BPE with these special tokens; returns the path."""
    tokenizers = pytest.importorskip("tokenizers")

    def train(*special, name="tokenizer.json"):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=list(special),
                                                 initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(["def return x y " * 50], trainer)
        tokenizer.save(str(tmp_path / name))
        return tmp_path / name

    return train


def test_bytes_there_and_back():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.end, tokenizer.files) == (256, 0, ())


def test_bytes_that_are_no_text_are_shown_as_such():
    assert Bytes().decode([65, 255, 66, 700, -1]) == "A\ufffdB\ufffd\ufffd"


def test_a_file_there_and_back(trained):
    path = trained("<|endoftext|>")
    tokenizer = open_tokenizer(str(path))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT and len(ids) < len(TEXT.encode())
    assert list(tokenizer.encode_all([TEXT, ""])) == [ids, []]
    assert tokenizer.vocab_size == max(json.loads(path.read_text())["model"]["vocab"].values()) + 1
    assert tokenizer.files == (path,)


def test_special_tokens_inside_a_text_are_text(trained):
    tokenizer = open_tokenizer(str(trained("<|endoftext|>", "</s>")))
    assert not {0, 1} & set(tokenizer.encode(TEXT))
    assert tokenizer.end == 0


def test_the_end_is_what_the_configuration_beside_it_says(trained):
    path = trained("<|endoftext|>", "</s>", "<stop>")
    assert open_tokenizer(str(path)).end == 0
    for named in ("<stop>", {"content": "<stop>"}):
        path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        tokenizer = open_tokenizer(str(path))
        assert tokenizer.end == 2 and tokenizer.files == (path, path.with_name("tokenizer_config.json"))
    path.with_name("tokenizer_config.json").write_text("[")
    assert open_tokenizer(str(path)).end == 0


def test_a_tokenizer_without_an_end_is_refused(trained):
    with pytest.raises(ConfigError, match="no token that ends a text: name one as eos_token"):
        open_tokenizer(str(trained("<pad>")))


def test_a_missing_package_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnusableEnvironment, match="pip install tokenizers"):
        open_tokenizer("tokenizer.json")


def test_a_missing_and_a_foreign_file_are_sentences(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match="there is no such file"):
        open_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.raises(UnreadableError, match=r"foreign\.json is not a tokenizer\.json"):
        open_tokenizer(str(tmp_path / "foreign.json"))


def test_a_vocabulary_larger_than_the_model_s_is_a_problem(tmp_path):
    def model(vocab_size):
        return SimpleNamespace(model=SimpleNamespace(vocab_size=vocab_size))

    assert list(vocabulary_problems("bytes", model(256))) == []
    assert list(vocabulary_problems("bytes", model(100))) == [
        "data.tokenizer=bytes has 256 tokens and model.vocab_size=100: set model.vocab_size=256"]
    pytest.importorskip("tokenizers")
    (problem,) = vocabulary_problems(str(tmp_path / "none.json"), model(256))
    assert "there is no such file" in problem
