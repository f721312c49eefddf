"""Calls without memory and launches: bytes that are alive, and kernels compiled ahead for a GPU that is not here."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from shards import DEVICE, needs_gpu

from cce_dist import GradFilter, linear_cross_entropy
from cce_dist.decide import Where, decide
from cce_dist.kernels import Filter, Head, Operands, Rows, ShardLogits, Spec, dry_run, exact, tokens
from cce_dist.kernels.d_weight import add_d_weight
from cce_dist.kernels.direct import launching
from cce_dist.kernels.dlogits import logits_chunk
from cce_dist.kernels.dry_run import Live, Peak
from cce_dist.kernels.memory import Sizes
from cce_dist.kernels.tiles import Planned, planned, planned_device, table_tiles

MIB, H200 = 1 << 20, Planned(9, 132)


def test_live_counts_storages() -> None:
    """Catches: a view that counts again, a tensor that counts when it is gone, an input that counts."""
    given = torch.zeros(1000, dtype=torch.uint8, device=DEVICE)
    with Live() as live:
        view = given[10:]
        made = torch.empty(500, dtype=torch.uint8, device=DEVICE)
        part = made[5:]
        assert live.current() == live.peak == 500
        other = torch.empty_like(view)
        del made, part
        assert live.current() == 990 and live.restart() == 1490
        del other
        assert live.peak == 990 and live.restart() == 990 and live.peak == 0


def peak_of(backend: str, n: int, d: int, v: int, mib: int, alone: bool = True, device: Planned | None = H200) -> Peak:
    kept = Filter(2**-10, always=True) if backend == "filter" else Filter()
    spec = Spec(ShardLogits(0, v), v, filter=kept, workspace_bytes=mib * MIB, alone=alone)
    return dry_run.peak(backend, Sizes(n, d, v, 2, alone=alone), spec, device)


def test_a_planned_gpu_decides_on_the_tiles() -> None:
    """The interpreter's tiles are small. Catches: a dry run for a GPU that takes this process's tiles or programs, and one
    that leaves them behind."""
    said, fewer = (peak_of("exact", 8192, 640, 262_144, 256, device=Planned(9, count)) for count in (132, 100))
    assert said.backward // MIB == 242 and said.forward // MIB == 17 and fewer.backward != said.backward
    assert planned_device() is None


@pytest.mark.parametrize("backend", ["exact", "filter"])
@pytest.mark.parametrize("alone", [True, False])
def test_loops_are_cut_short(backend: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a group of tokens or a chunk that allocates more than the first two and the last, which a plan goes through."""
    given = (backend, 100_001, 768, 50_257, 64, alone)
    short = peak_of(*given)
    dry_run.peak.cache_clear()
    for module in (tokens, exact):
        monkeypatch.setattr(module, "thinned", lambda items: items)
    assert peak_of(*given) == short
    dry_run.peak.cache_clear()


@pytest.mark.parametrize("backend", ["exact", "filter"])
def test_parts_are_gone_while_d_hidden_is_summed(backend: str) -> None:
    """Catches: parts of the last wave of d_hidden that count while ranks sum d_hidden; they are gone by then."""
    summed, alone = (peak_of(backend, 2048, 768, 16384, 64, alone=alone) for alone in (False, True))
    assert summed.saved < summed.summing < summed.backward - 12 * MIB
    assert alone.summing == alone.backward


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_collectives_find_multiprocessors(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loop over tiles in a process with other ranks: their collectives wait until it ends."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: num_ranks)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.empty(rows, cols, dtype=torch.bfloat16, device="meta")

    hidden_RD, weight_VD, logits_RV = matrix(1024, 768), matrix(50_304, 768), matrix(1024, 50_304)
    index, num_labelled = (torch.empty(size, dtype=torch.int32, device="meta") for size in (1024, 1))
    rows, x = Rows(index, num_labelled, hidden_RD), Operands(hidden_RD, weight_VD, Head(), index.long(), 0, 50_304)
    tiles, grids = table_tiles(9, 16), list[int]()
    with planned(H200), launching(lambda kernel, args, grid, options: grids.append(grid[0])):
        logits_chunk(x, rows, 0, logits_RV, tiles)
        add_d_weight(torch.empty_like(weight_VD), logits_RV, rows, None, tiles.grad_weight, add=False)
    num_tiles = [8 * 197, 393 * 3]  # of 128 x 256
    assert grids == ([H200.num_programs] * 2 if num_ranks == 1 else num_tiles)


@needs_gpu
@pytest.mark.parametrize("mib", [64, 256, 1024])
@pytest.mark.parametrize("grad_filter", [None, GradFilter(always=True)], ids=["exact", "filter"])
def test_the_allocator_agrees(mib: int, grad_filter: GradFilter | None) -> None:
    """Catches a call that allocates what its dry run does not, groups of tokens too."""
    num_tokens, hidden_size, num_columns = 8192, 1024, 100_000
    drawn = (torch.randn(rows, hidden_size, device="cuda") for rows in (num_tokens, num_columns))
    hidden, weight = (x.mul_(0.1).bfloat16().requires_grad_() for x in drawn)
    labels = torch.randint(num_columns, (num_tokens,), device="cuda")
    call: dict[str, Any] = {"workspace_bytes": mib * MIB, "grad_filter": grad_filter}
    peaks, at_rest = [], torch.cuda.memory_allocated() + MIB
    for _ in range(2):  # the first call compiles
        gc.collect()  # of cycles that hold gradients of earlier calls
        until = time.monotonic() + 5
        while torch.cuda.memory_allocated() > at_rest and time.monotonic() < until:
            time.sleep(0.1)  # the thread of autograd may hold a gradient for a moment after backward
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, **call), (hidden, weight))
        peaks.append(torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads))
        del grads
    sizes, kept = Sizes(num_tokens, hidden_size, num_columns, 2, alone=True), Filter()
    if grad_filter is not None:
        kept = Filter(grad_filter.eps, always=True)
    spec = Spec(ShardLogits(0, num_columns), num_columns, filter=kept, workspace_bytes=mib * MIB, alone=True)
    way = decide(sizes, spec, Where("triton", "torch.bfloat16", upstream="number"))
    if way.passes == "one":
        said = dry_run.groups_peak(sizes, way.groups, spec, None)
    else:
        peak = dry_run.peak(way.backend, sizes, spec, None)
        said = max(peak.forward - hidden.nbytes - weight.nbytes, peak.backward)
    assert abs(said - peaks[1]) <= max(0.03 * peaks[1], 16 * MIB), (said // MIB, peaks[1] // MIB)


@pytest.mark.slow
def test_launches_find_their_kernels_compiled() -> None:
    """Catches: a dry run that misses a variant, and one that breaks off; an error in a thread that its launch does not raise;
    kernels that are compiled ahead though nobody wants it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "compile_ahead_for_gpu.py"
    command = [sys.executable, "-W", "ignore", script, "1", "0", "1,_grad_hidden_kernel"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    ahead, not_ahead, _ = said.stdout.split("=== ")[1:]
    steps = dict(part.strip().split("\n", 1) for part in ahead.split("== ")[1:])
    assert len(steps) == 15, said.stderr
    assert all(line.endswith("twice 0 late") for line in steps.values()), ahead
    # A call of a kind that has come before has nothing to compile.
    assert steps["default"] == steps["default again"]
    assert steps["scale"] == steps["another scale"], "a number is a kind of its own"
    assert not_ahead.count("== ") == 15 and "late _labels_kernel _gather_targets_kernel" in not_ahead, said.stderr
    # A kernel that does not compile is told by its launch.
    assert said.returncode == 1
    assert "add_d_hidden" in said.stderr and "RuntimeError: _grad_hidden_kernel does not compile" in said.stderr
