"""Measure whole steps of ``cce-dist pretrain``, to compare losses or plans: no test, a program for one or two GPUs.

    python tests/steps_for_plan.py torch sizes steps.json
    torchrun --nproc-per-node 2 tests/steps_for_plan.py megatron cuts steps.json
    torchrun --nproc-per-node 2 tests/steps_for_plan.py deepspeed batches steps.json turns
    python tests/steps_for_plan.py show steps.json more.json

"sizes" are four models with each loss, on one GPU or as an even pipeline over two. "cuts" are all cuts of one model over two
GPUs. "batches" are microbatches of 16, 4 and 1 sequences of one step, the vocabulary split over all ranks, "large-head" those
of a model with four times the vocabulary, and "tiny" those of a model for a CPU; "show" prints their table. Ids are drawn by
Zipf's law. The file gets, for each run, the seconds of each timed step and the peak of each rank. "filtered" is what a user of
``GradFilter()`` gets: exact gradients where its rule, of the sizes alone, says that they take less time. The table says where.

Programs that name the same file of turns take steps one after another, and build their models meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
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
STEPS_OF_BATCHES = {
    16: (6, 12),
    4: (3, 10),
    1: (2, 6),
}  # by sequences of a microbatch: steps that warm up, steps that are timed
LOSSES_OF_BATCHES = ("dense", "exact", "filtered")
BATCHES = {  # models whose steps are cut into microbatches; a filter pays on the second one's head
    "batches": ("base", PRESETS["base"]),
    "large-head": ("base-128k", dataclasses.replace(PRESETS["base"], num_layers=6, vocab_size=131072)),
    "tiny": ("toy", PRESETS["toy"]),
}
SIZES = {
    "wide": (PRESETS["wide"], 16),
    "wide-12": (dataclasses.replace(PRESETS["wide"], num_layers=12, seq_len=1024), 8),
    "base": (PRESETS["base"], 16),
    "base-64k": (dataclasses.replace(PRESETS["base"], num_layers=6, vocab_size=65536), 8),
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
    pp, common = size, common | {"pp": size}
    if kind == "sizes":
        for loss in ("exact", "dense"):
            for name, (shape, batch) in SIZES.items():
                yield name, Recipe(shape=shape, loss=loss, batch_size=batch * pp, accumulate=2 * pp, **common)
        return
    cut = {"shape": CUT_OF, "batch_size": CUT_BATCH, "accumulate": CUT_ACCUMULATE}
    for loss in ("exact", "dense") if engine == "megatron" else ("exact",):
        for first in range(2, CUT_OF.num_layers + 1):
            layers = f"{first},{CUT_OF.num_layers - first}"
            yield "cut-2048", Recipe(loss=loss, layers_per_stage=layers, **cut, **common)


def draw(shape: Shape, batch: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    ids = np.minimum(generator.zipf(1.2, (batch, shape.seq_len + 1)), shape.vocab_size) - 1
    return ids[:, :-1], ids[:, 1:]


class Turns:
    """Turns of programs that share the GPUs: one steps, the others build their models or wait. Without a file all step at once.

    The first rank of a program takes the file's lock. The others wait for it in gloo, so that no GPU waits.
    """

    def __init__(self, path: str | None, world: int) -> None:
        self.file = os.open(path, os.O_CREAT | os.O_WRONLY) if path else None
        self.group: Any = dist.new_group(backend="gloo") if path and world > 1 else None

    @contextlib.contextmanager
    def mine(self, rank: int) -> Iterator[None]:
        if self.file is not None and rank == 0:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self._meet()
        yield
        self._meet()
        if self.file is not None and rank == 0:
            fcntl.flock(self.file, fcntl.LOCK_UN)
            time.sleep(0.2)  # for those who wait

    def _meet(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)


def measure(recipe: Recipe, ranks: Ranks, turns: Turns, warm: int, timed: int) -> dict[str, Any]:
    """Return the seconds of each timed step, and the peak above what other runs have left."""
    on_gpu, seconds, generator = ranks.device.type == "cuda", [], np.random.default_rng(0)
    make_deterministic(recipe.seed)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    engine = getattr(import_module(f"cce_dist.pretrain.engines.{recipe.engine}"), ENGINES[recipe.engine])(recipe, ranks)
    with turns.mine(ranks.rank):
        for step in range(1, warm + timed + 1):
            batch = draw(recipe.shape, recipe.batch_size, generator)
            if step == warm and on_gpu:
                torch.cuda.reset_peak_memory_stats()
            finish(on_gpu)
            start = time.perf_counter()
            engine.step(step, *batch).loss.item()
            finish(on_gpu)
            if step > warm:
                seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else 0}


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


def keep_weights(engine: str) -> None:
    """Draw the weights of each model once. Megatron's engine copies from them, DeepSpeed's takes the model itself."""
    if engine == "torch":
        return
    module: Any = import_module(f"cce_dist.pretrain.engines.{engine}")
    drawn, draw_weights = {}, module.build_whole

    def once(recipe: Recipe) -> Any:
        if recipe.shape not in drawn:
            drawn[recipe.shape] = draw_weights(recipe)
        return drawn[recipe.shape] if engine == "megatron" else copy.deepcopy(drawn[recipe.shape])

    module.build_whole = once


def show(files: list[str]) -> None:
    """Print tokens/s and the largest peak of each engine, number of GPUs and microbatch, a column for each loss."""
    runs = [run for file in files for run in json.loads(Path(file).read_text())]
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for run in runs:
        rows.setdefault((run["engine"], run["model"], run["tp"]), {})[run["loss"]] = run
    table = []
    for (engine, model, size), by_loss in rows.items():
        speed = {loss: run["batch_size"] * run["shape"]["seq_len"] / median(run) for loss, run in by_loss.items()}
        cells = {"engine, GPUs, model, sequences": f"{engine}, {size}, {model}"}
        for loss in LOSSES_OF_BATCHES:
            peak = max(by_loss[loss]["peak_bytes"]) / 2**20 if loss in speed else 0
            cells[loss] = f"{speed[loss]:,.0f}; {peak:,.0f}" if loss in speed else "-"
        cells["it filters"] = (
            "-" if "filtered" not in speed else "yes" if by_loss["filtered"]["filters"] else "no: exact"
        )
        for one, other in (("exact", "dense"), ("filtered", "exact")):
            cells[f"{one} / {other}"] = f"{speed[one] / speed[other]:.3f}" if {one, other} <= speed.keys() else "-"
        table.append(cells)
    print("\n".join(report.table(table)))


def median(run: dict[str, Any]) -> float:
    return sorted(run["seconds"])[len(run["seconds"]) // 2]


def main(engine: str, kind: str, out: str, turns_file: str | None = None) -> None:
    warnings.filterwarnings("ignore")
    device = own_device("cuda" if torch.cuda.is_available() else "cpu")
    if in_torchrun():
        join(device, 120.0, bind=True)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    turns = Turns(turns_file, world)
    keep_weights(engine)
    found = []
    for name, recipe in recipes(engine, kind, world, device.type):
        ranks = Ranks(device, rank, world, recipe.tp, recipe.dp, recipe.pp)
        if engine == "torch" and world > 1:
            ranks = make_mesh(device, recipe.tp, recipe.dp, timedelta(seconds=120))
        run = {
            "model": name, "engine": engine, "loss": recipe.loss, "pp": recipe.pp, "tp": recipe.tp,
            "batch_size": recipe.batch_size, "accumulate": recipe.accumulate, "layers_per_stage": recipe.layers_per_stage,
            "workspace_bytes": 0, "filters": filters(recipe),
            "shape": dataclasses.asdict(recipe.shape),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        }  # fmt: skip
        warm, timed = STEPS_OF_BATCHES[16 // recipe.accumulate] if kind in BATCHES else (WARM, TIMED)
        mine = measure(recipe, ranks, turns, warm, timed)
        forget(engine, kind)
        everyone = ranks.gather(mine)
        steps = [max(times) for times in zip(*(each["seconds"] for each in everyone), strict=True)]
        found.append(run | {"seconds": steps, "peak_bytes": [each["peak_bytes"] for each in everyone]})
        if rank == 0:
            peaks = [round(each["peak_bytes"] / 2**20) for each in everyone]
            tokens = recipe.batch_size * recipe.shape.seq_len / median(found[-1])
            print(
                f"{engine} {name} {recipe.loss} {recipe.layers_per_stage}: {tokens:,.0f} tokens/s, {peaks} MiB",
                flush=True,
            )
            Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "show":
        show(sys.argv[2:])
    else:
        main(*sys.argv[1:])
