"""Measure whole steps of ``cce-dist pretrain``, to compare losses or plans: no test, a program for one or two GPUs.

    torchrun --nproc-per-node 2 tests/steps_for_plan.py megatron cuts steps.json
    torchrun --nproc-per-node 2 tests/steps_for_plan.py deepspeed batches steps.json
    python tests/steps_for_plan.py show steps.json more.json

"cuts" are all cuts of one model over two GPUs. "batches" are microbatches of 16, 4 and 1 sequences of one step, the vocabulary
split over all ranks, "large-head" those of a model with four times the vocabulary, and "tiny" those of a model for a CPU;
"show" prints their table. Ids are drawn by Zipf's law. The file gets, for each run, the seconds of each timed step and the peak
of each rank. "filtered" is what a user of ``GradFilter()`` gets: exact gradients
where its rule, of the sizes alone, says that they take less time.

The losses of "batches" take steps in turns, in an order that rotates, since a host's speed drifts. A ratio is the median of
those of the rounds, with its quartiles.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cce_dist import report
from cce_dist.kernels.budget import Sizes, filter_pays
from cce_dist.pretrain.ranks import Ranks, make_mesh
from cce_dist.pretrain.recipe import ENGINES, PRESETS, Recipe, Shape
from cce_dist.pretrain.train import make_deterministic
from cce_dist.ranks import in_torchrun, join, own_device

WARM, TIMED = 3, 4
STEPS_OF_BATCHES = {16: (6, 12), 4: (3, 9), 1: (2, 6)}  # by a microbatch's sequences: warm-up steps, timed steps
LOSSES_OF_BATCHES = ("dense", "exact", "filtered")
BATCHES = {  # models whose steps are cut into microbatches; a filter pays on the second one's head
    "batches": ("base", PRESETS["base"]),
    "large-head": ("base-128k", dataclasses.replace(PRESETS["base"], num_layers=6, vocab_size=131072)),
    "tiny": ("toy", PRESETS["toy"]),
}
# Wide enough that the GPU is waited for, and not the host.
CUT_OF = Shape(hidden_size=2048, num_layers=6, num_heads=16, num_ffn=5632, seq_len=1024, vocab_size=65536)
CUT_BATCH, CUT_ACCUMULATE = 64, 4


def recipes(engine: str, kind: str, size: int, device: str) -> Iterator[tuple[str, Recipe]]:
    common: dict[str, Any] = {"engine": engine, "device": device, "dtype": "bfloat16", "warmup": 4}
    if kind in BATCHES:
        name, shape = BATCHES[kind]
        for sequences in STEPS_OF_BATCHES:
            for loss in LOSSES_OF_BATCHES:
                split: dict[str, Any] = {"batch_size": 16, "accumulate": 16 // sequences, "tp": size}
                yield f"{name}, {sequences}", Recipe(shape=shape, loss=loss, **split, **common)
        return
    cut = {"shape": CUT_OF, "batch_size": CUT_BATCH, "accumulate": CUT_ACCUMULATE, "pp": size}
    for loss in ("exact", "dense") if engine == "megatron" else ("exact",):
        for first in range(2, CUT_OF.num_layers + 1):
            layers = f"{first},{CUT_OF.num_layers - first}"
            yield "cut-2048", Recipe(loss=loss, layers_per_stage=layers, **cut, **common)


def draw(shape: Shape, batch: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    ids = np.minimum(generator.zipf(1.2, (batch, shape.seq_len + 1)), shape.vocab_size) - 1
    return ids[:, :-1], ids[:, 1:]


class Run:
    """An engine among others of this process, its steps, and its memory apart from theirs.

    Attributes:
        own: Bytes that its building and its steps have left allocated.
        peak: The most that it had during a step.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        self.recipe, self.on_gpu = recipe, ranks.device.type == "cuda"
        self.seconds: list[float] = []
        make_deterministic(recipe.seed)
        before = allocated(self.on_gpu)
        engine = getattr(import_module(f"cce_dist.pretrain.engines.{recipe.engine}"), ENGINES[recipe.engine])
        self.engine = engine(recipe, ranks)
        self.own, self.peak = allocated(self.on_gpu) - before, 0

    def step(self, number: int, batch: tuple[np.ndarray, np.ndarray], timed: bool) -> None:
        before = allocated(self.on_gpu)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        finish(self.on_gpu)
        start = time.perf_counter()
        self.engine.step(number, *batch).loss.item()
        finish(self.on_gpu)
        if timed:
            self.seconds.append(time.perf_counter() - start)
            most = torch.cuda.max_memory_allocated() if self.on_gpu else before
            self.peak = max(self.peak, self.own + most - before)
        self.own += allocated(self.on_gpu) - before


def measure(recipes: list[Recipe], ranks: Ranks, warm: int, timed: int) -> list[dict[str, Any]]:
    """Return each recipe's seconds of each timed step, and the peak above what the others have; they step in turns."""
    runs = [Run(recipe, ranks) for recipe in recipes]
    generator = np.random.default_rng(0)
    for number in range(1, warm + timed + 1):
        batch = draw(recipes[0].shape, recipes[0].batch_size, generator)
        first = number % len(runs)
        for run in runs[first:] + runs[:first]:
            run.step(number, batch, number > warm)
    return [{"seconds": run.seconds, "peak_bytes": run.peak} for run in runs]


def allocated(on_gpu: bool) -> int:
    return torch.cuda.memory_allocated() if on_gpu else 0


def finish(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def filters(recipe: Recipe) -> bool:
    """Return whether the recipe's loss drops anything on a GPU: it has a filter, and the filter's rule says that it pays."""
    shape, tokens = recipe.shape, recipe.batch_size // (recipe.dp * recipe.accumulate) * recipe.shape.seq_len
    sizes = Sizes(tokens, shape.hidden_size, -(-shape.vocab_size // recipe.tp), getattr(torch, recipe.dtype).itemsize)
    return recipe.grad_filter is not None and (recipe.filter_always or filter_pays(sizes, True, 0))


def forget(engine: str, kind: str) -> None:
    """Take down what a framework keeps of a run; of small runs the tensors stay."""
    if engine == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    elif engine == "deepspeed":
        from deepspeed.utils import groups

        groups._release_process_group_references()
    gc.collect()
    torch.cuda.empty_cache()
    if kind in BATCHES:
        return
    # Hooks of a framework's models outlive them in circles that pass through C++.
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.is_cuda:
            each.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def share(engine: str) -> None:
    """Draw the weights of each model once, and have Megatron's engines of one process live in the same groups.

    Megatron's engine copies from the weights, DeepSpeed's takes the model itself.
    """
    if engine == "torch":
        return
    if engine == "megatron":
        from megatron.core import parallel_state

        make_groups = parallel_state.initialize_model_parallel
        parallel_state.initialize_model_parallel = lambda *sizes, **options: (
            parallel_state.model_parallel_is_initialized() or make_groups(*sizes, **options)
        )
    module: Any = import_module(f"cce_dist.pretrain.engines.{engine}")
    drawn, draw_weights = {}, module.build_whole

    def once(recipe: Recipe) -> Any:
        if recipe.shape not in drawn:
            drawn[recipe.shape] = draw_weights(recipe)
        return drawn[recipe.shape] if engine == "megatron" else copy.deepcopy(drawn[recipe.shape])

    module.build_whole = once


def show(files: list[str]) -> None:
    """Print tokens/s and the largest peak of each engine, number of GPUs and microbatch, a column for each loss.

    A filter that does not filter has none: it is the exact loss.
    """
    runs = [run for file in files for run in json.loads(Path(file).read_text())]
    runs = [run for run in runs if run["loss"] != "filtered" or run["filters"]]
    losses = [loss for loss in LOSSES_OF_BATCHES if any(run["loss"] == loss for run in runs)]
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for run in runs:
        rows.setdefault((run["engine"], run["model"], run["tp"]), {})[run["loss"]] = run
    table = []
    for (engine, model, size), by_loss in rows.items():
        speed = {loss: run["batch_size"] * run["shape"]["seq_len"] / median(run) for loss, run in by_loss.items()}
        cells = {"engine, GPUs, model, sequences": f"{engine}, {size}, {model}"}
        for loss in losses:
            peak = max(by_loss[loss]["peak_bytes"]) / 2**20 if loss in speed else 0
            cells[loss] = f"{speed[loss]:,.0f}; {peak:,.0f}" if loss in speed else "-"
        for other, one in pairwise(losses):
            cells[f"{one} / {other}"] = ratio(by_loss[one], by_loss[other]) if {one, other} <= speed.keys() else "-"
        table.append(cells)
    print("\n".join(report.table(table)))


def ratio(one: dict[str, Any], other: dict[str, Any]) -> str:
    """How many times as fast one run is: the median over rounds, and the quartiles."""
    rounds = [slow / fast for fast, slow in zip(one["seconds"], other["seconds"], strict=True)]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def median(run: dict[str, Any]) -> float:
    return sorted(run["seconds"])[len(run["seconds"]) // 2]


def main(engine: str, kind: str, out: str) -> None:
    warnings.filterwarnings("ignore")
    device = own_device("cuda" if torch.cuda.is_available() else "cpu")
    if in_torchrun():
        join(device, 120.0, bind=True)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share(engine)
    found = []
    every = list(recipes(engine, kind, world, device.type))
    together = len(LOSSES_OF_BATCHES) if kind in BATCHES else 1
    for some in (every[start : start + together] for start in range(0, len(every), together)):
        recipe = some[0][1]
        ranks = Ranks(device, rank, world, recipe.tp, recipe.dp, recipe.pp)
        if engine == "torch" and world > 1:
            ranks = make_mesh(device, recipe.tp, recipe.dp, timedelta(seconds=120))
        steps = STEPS_OF_BATCHES[16 // recipe.accumulate] if kind in BATCHES else (WARM, TIMED)
        mine = measure([recipe for _, recipe in some], ranks, *steps)
        forget(engine, kind)
        for (name, recipe), everyone in zip(some, zip(*ranks.gather(mine), strict=True), strict=True):
            found.append(record(name, recipe, device, everyone))
            if rank == 0:
                print(said(found[-1]), flush=True)
        if rank == 0:
            Path(out).write_text(json.dumps(found, indent=1) + "\n")


def record(name: str, recipe: Recipe, device: torch.device, everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the file says of a run: the slowest rank's seconds of each step, and each rank's peak."""
    return {
        "model": name,
        "engine": recipe.engine,
        "loss": recipe.loss,
        "pp": recipe.pp,
        "tp": recipe.tp,
        "batch_size": recipe.batch_size,
        "accumulate": recipe.accumulate,
        "layers_per_stage": recipe.layers_per_stage,
        "workspace_bytes": 0,
        "filters": filters(recipe),
        "shape": dataclasses.asdict(recipe.shape),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "seconds": [max(times) for times in zip(*(each["seconds"] for each in everyone), strict=True)],
        "peak_bytes": [each["peak_bytes"] for each in everyone],
    }


def said(run: dict[str, Any]) -> str:
    tokens, peaks = run["batch_size"] * run["shape"]["seq_len"] / median(run), run["peak_bytes"]
    cut = run["layers_per_stage"]
    return f"{run['engine']} {run['model']} {run['loss']} {cut}: {tokens:,.0f} tokens/s, {[p >> 20 for p in peaks]} MiB"


if __name__ == "__main__":
    if sys.argv[1] == "show":
        show(sys.argv[2:])
    else:
        main(*sys.argv[1:])
