"""Whole runs with parallel=expert are the runs of one process, within the rounding of tests/test_equal.py."""

import json

import pytest
import torch
from conftest import composed, train_here
from ranks import train_at_ranks
from safetensors.torch import load_file
from test_equal import LINE, rounding

from forge.config import check, realise
from forge.errors import ConfigError

EXPERT = ["parallel=expert", "parallel.size=2"]
# An eps that is no smaller than gradients: then an error in a gradient moves its weight in proportion.
LR, EPS, UPDATES = 1e-3, 0.01, 6
PLAIN = [*LINE, "model.dropout=0", f"optimizer.lr={LR}"]
ADAMW = [f"optimizer.eps={EPS}"]
JUDGED = ["evaluation=heldout", "evaluation.sample=8", "evaluation.baseline=false", "evaluation.every=4"]
SHARED = ["model.routing.shared_hidden=24", "model.routing.score=sigmoid", "model.routing.balance=bias"]
CASES = {       # ranks; words of both runs; words of the ranks' run
    "2 ranks": (2, [*ADAMW, *JUDGED], ["micro_batch=2"]),
    "2 ranks, recomputed": (2, ADAMW, ["micro_batch=6", "checkpointing=full"]),
    "2 ranks, recomputed in part": (2, ADAMW, ["micro_batch=3", "checkpointing=selective", "moe_router=loop"]),
    "2 ranks, compiled": (2, ADAMW, ["compile=blocks", "micro_batch=6"]),
    "4 ranks, a shared expert": (4, [*ADAMW, *SHARED], ["micro_batch=1"]),
    "4 ranks in one group": (4, ["optimizer=muon", f"optimizer.adamw.eps={EPS}"], ["micro_batch=3", "parallel.size=4"]),
}


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """Runs by their words, trained once however many tests ask for them."""
    runs = {}

    def train(world: int, *words: str):
        if (world, *words) not in runs:
            folder, line = tmp_path_factory.mktemp("run") / "run", [*shards, *PLAIN, *words]
            run = train_here(folder, *line) if world == 1 else train_at_ranks(folder, world, *EXPERT, *line)
            assert run.code == 0, run.err
            runs[world, *words] = run
        return runs[world, *words]

    return train


def part(run, name: str) -> dict[str, torch.Tensor]:
    return load_file(run.run_dir / f"snapshots/step_{UPDATES:08d}/{name}.safetensors")


def checksums(run) -> list[str]:
    """Of weights and optimizer state after the last update."""
    files = json.loads((run.run_dir / f"snapshots/step_{UPDATES:08d}/manifest.json").read_text())["files"]
    return [files[f"{name}.safetensors"]["sha256"] for name in ("model", "update")]


def figures(run) -> list[tuple[float, float]]:
    return [(record["loss"], record["gradient_norm"]) for record in run.records if "loss" in record]


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equal_to_one_process(case, trained):
    world, both, own = case
    alone, ranks = trained(1, *both), trained(world, *both, *own)
    for update, (found, wanted) in enumerate(zip(figures(ranks), figures(alone), strict=True), 1):
        assert found == pytest.approx(wanted, rel=rounding(update), abs=0), update
    loads = [[record["expert_load_max_over_mean"] for record in run.records if "loss" in record]
             for run in (ranks, alone)]
    assert loads[0] == pytest.approx(loads[1], rel=1e-12), "counts of all ranks"


@pytest.mark.dist
def test_ranks_with_unequal_shares_of_the_heldout_text_judge_and_write_together(trained):
    world, both, own = CASES["2 ranks"]
    alone, ranks = trained(1, *both), trained(world, *both, *own)
    assert ranks.result["loss_heldout"] == pytest.approx(alone.result["loss_heldout"], rel=rounding(UPDATES + 1))
    assert ranks.result["sample"] == alone.result["sample"]


@pytest.mark.dist
def test_weights_and_moments_are_saved_whole_and_are_those_of_one_process(trained):
    """A gradient's error e, which is rounding(update) of the norm at most, moves a weight by lr * e / eps, or twice
    that, since AdamW divides by what it has just seen as well."""
    world, both, own = CASES["2 ranks"]
    alone, ranks = trained(1, *both), trained(world, *both, *own)
    norm = max(norm for _, norm in figures(alone))
    bound = sum(2 * LR * rounding(update) * norm / EPS for update in range(1, UPDATES + 1))
    for name, room in (("model", bound), ("update", rounding(UPDATES) * max(norm, norm**2))):
        found, wanted = part(ranks, name), part(alone, name)
        assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in wanted.items()}
        worst = max(float((found[key] - wanted[key]).abs().max()) for key in wanted)
        assert worst < room, name
    experts = part(alone, "model")["blocks.0.feed_forward.down"]
    assert float((experts - experts.flip(0)).abs().max()) > 100 * bound, "experts in another order would be seen"


@pytest.mark.dist
def test_a_stopped_run_goes_on_to_the_same_bits_and_at_other_ranks_within_rounding(shards, trained, tmp_path):
    world, both, own = CASES["2 ranks"]
    whole, line = trained(world, *both, *own), [*shards, *PLAIN, *both]
    assert train_at_ranks(tmp_path / "half", world, *EXPERT, *line, *own, "stop_at=3").code == 0
    snapshot = tmp_path / "half/snapshots/step_00000003"
    resumed = train_at_ranks(tmp_path / "same", world, *EXPERT, *line, *own, resume=snapshot)
    assert figures(resumed) == figures(whole)[3:]
    assert checksums(resumed) == checksums(whole)
    for ranks, words in ((1, ["parallel=data"]), (4, [*EXPERT, "parallel.size=4", "micro_batch=3"])):
        other = train_at_ranks(tmp_path / f"{ranks}", ranks, *line, *words, resume=snapshot)
        assert other.code == 0, other.err
        for update, (found, wanted) in enumerate(zip(figures(other), figures(whole)[3:], strict=True), 4):
            assert found == pytest.approx(wanted, rel=rounding(update), abs=0), ranks


@pytest.mark.dist
def test_commands_take_its_snapshot_in_one_process(trained, tmp_path, capsys):
    from forge.convert import convert
    from forge.evaluate import evaluate

    world, both, own = CASES["2 ranks"]
    ranks = trained(world, *both, *own)
    evaluate([f"from={ranks.run_dir}"])
    loss = float(capsys.readouterr().out.split()[2])
    assert loss == pytest.approx(ranks.result["loss_heldout"], abs=1e-6), "printed with six places"
    convert([f"from={ranks.run_dir}", f"to={tmp_path / 'weights'}"])
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert torch.equal(load_file(tmp_path / "weights/model.safetensors")[name],
                       part(ranks, "model")["blocks.1.feed_forward.down"][3])


@pytest.mark.dist
def test_other_bytes_on_the_way_and_the_same_result_in_halves(shards, tmp_path):
    """Weights in bfloat16 with masters, sums in float32: gradients of slices are cast as those in buckets are."""
    line = [*shards, *PLAIN, *ADAMW, "precision=bf16_master", "steps=2"]
    runs = [train_at_ranks(tmp_path / str(index), 2, *line, "micro_batch=3", *words)
            for index, words in enumerate((["parallel=data"], EXPERT))]
    assert [run.code for run in runs] == [0, 0], runs[1].err
    for found, wanted in zip(figures(runs[1]), figures(runs[0]), strict=True):
        assert found == pytest.approx(wanted, rel=2**-8), "one rounding to bfloat16"


@pytest.mark.parametrize(("words", "said"), [
    (["parallel.size=0"], "parallel.size=0: at least 1 is wanted"),
    (["hardware.processes=3", "micro_batch=1"], "parallel.size=2 does not divide the 3 ranks"),
    (["launch=torchrun", "launch.nodes=3", "hardware.processes=1"], "parallel.size=2 does not divide the 3 ranks"),
    (["hardware.processes=3", "parallel.size=3"], "does not divide model.routing.num_experts=4"),
    (["hardware.processes=2", "model.routing=null"], "this model has none: set parallel=data"),
    (["hardware.processes=2", "compile=blocks", "compile.fullgraph=true"], "set compile.fullgraph=false"),
])
def test_impossible_splits_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        check(realise(composed("hardware=cpu", "model.routing.num_experts=4", "global_batch=12", *EXPERT, *words)))
