"""What commands beside forge.train compose."""

import os
import sys

import pytest

from forge.composition import own_settings, training_settings
from forge.errors import ConfigError


def test_the_line_that_was_typed_and_the_environment_stay_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["forge.bench", "bench=aa"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    settings = training_settings(["attention=eager", f"run_dir={tmp_path}"])
    assert (settings.choices.attention, settings.run_dir) == ("eager", str(tmp_path))
    with pytest.raises(ConfigError, match="attention=eagr is not an option"):
        training_settings(["attention=eagr"])
    assert sys.argv == ["forge.bench", "bench=aa"] and "HYDRA_FULL_ERROR" not in os.environ
    assert not list(tmp_path.iterdir())


def test_an_error_of_settling_is_raised_as_it_is(tmp_path):
    with pytest.raises(ConfigError, match="run_dir names no folder"):
        training_settings(["run_dir="])


@pytest.mark.parametrize(("name", "group", "typed", "said"), [
    ("verify", "verify", "verify.rwos=3", "verify.rwos is not a setting of it. Did you mean 'verify.rows'? "
                                          "Settings: verify.rows, verify.updates,"),
    ("bench/aa", "bench", "bench.timing.blcks=3", "bench.timing.blcks is not a setting of it. Did you mean "
                                                  "'bench.timing.blocks'? Settings: bench.timing.blocks,"),
    ("bench/aa", "bench", "bench.timng.blocks=3", "Settings: bench.max_floor,")])
def test_a_setting_that_is_none_is_answered_with_those_beside_it(name, group, typed, said):
    with pytest.raises(ConfigError) as raised:
        own_settings(name, group, [typed], [], " of it")
    assert said in str(raised.value) and str(raised.value).endswith(".")


def test_options_beside_conf_are_found(tmp_path):
    (tmp_path / "verify").mkdir()
    (tmp_path / "verify/mine.yaml").write_text("_target_: mine.Mine\nsize: 3\n")
    assert own_settings("verify", "verify", ["verify=mine"], [str(tmp_path)]) == {"_target_": "mine.Mine", "size": 3}


def test_composing_silences_no_logger():
    """Hydra would: it disables all loggers there are, and raises the root's level."""
    import logging

    from forge.composition import training_settings

    logger = logging.getLogger("forge")
    before = logging.getLogger().level
    training_settings(["run_dir=x"])
    assert not logger.disabled and logging.getLogger().level == before
