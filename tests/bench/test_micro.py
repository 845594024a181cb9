"""What a micro bench says beside its figures."""


def test_a_time_that_no_run_would_take_says_so():
    """flex computes no dropout: what is timed with it is without."""
    from conftest import composed

    from forge.bench.probes.attention import _refused
    from forge.config import realise

    config = realise(composed("attention=flex", "hardware=gpu", "model=gpt2_124m", "run_dir=x"))
    for dropout, refused in ((0.0, False), (0.1, True)):
        row = _refused({"shown": {"kernels": "one"}}, config, dropout)
        assert ("knows no dropout" in row.get("refused", "")) is refused
        assert ("refuses" in row["shown"]["kernels"]) is refused
