"""Storage that fails for a moment loses no sample."""

import pytest

from forge.data import texts
from forge.data.storage import let_go
from forge.data.texts import patiently


class Failing:
    """Fails so many times, each time for all who hold this handle."""

    opened = 0

    def __init__(self, failures):
        self.failures = failures

    def read(self, size, offset):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_a_failure_that_passes_is_waited_out(failures, tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    path.write_bytes(b"0123456789")
    opened, shared = [], texts.shared_file

    def file(location, size, version):
        opened.append(location)
        return Failing(failures) if len(opened) <= failures else shared(location, size, version)

    monkeypatch.setattr(texts, "shared_file", file)
    monkeypatch.setattr(texts, "PAUSES", (0.0, 0.0))
    let_go()
    if failures < 3:
        assert patiently((path, 10, 1), 4, 3) == b"3456"
    else:
        with pytest.raises(OSError, match="Input/output"):
            patiently((path, 10, 1), 4, 3)
    assert len(opened) == min(failures, 2) + 1
