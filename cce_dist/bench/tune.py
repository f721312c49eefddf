"""``cce-dist tune``: measure tile sizes of the kernels on this GPU, and keep the best in a file.

For each product in turn it tries every candidate against the best so far, in alternating steps of the public loss. The loss
reads the file that the variable ``CCE_DIST_TILES`` names.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from cce_dist.arguments import whole
from cce_dist.bench.shapes import SHAPES

if TYPE_CHECKING:
    from torch import Tensor

    from cce_dist.bench.problem import Problem
    from cce_dist.kernels.tiles import Tile, Tiles

VARIABLE = "CCE_DIST_TILES"
MIN_GAIN = 0.005  # a candidate must be faster by this much, so that noise does not choose
SIDES = ((64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
INNERS = (32, 64, 128)
WARPS, STAGES = (4, 8), (2, 3, 4)
GROUPS = (4, 8, 16, 32)

# best, candidate -> time of the candidate over that of the best; inf: failed
Race = Callable[["Tiles", "Tiles"], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cce-dist tune``."""
    add = parser.add_argument
    shown = "heads to tune for (default: llama-3-8b)"
    add("--shapes", nargs="+", choices=SHAPES, default=["llama-3-8b"], metavar="SHAPE", help=shown)
    add("--tokens", type=whole(1), default=8192, metavar="N", help="number of tokens")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of hidden states and weight")
    add("--repeats", type=whole(1), default=7, help="steps of each candidate")
    add("--out", type=Path, default=Path("tiles.json"), help="file to write; what it holds for other devices stays")


def run(args: argparse.Namespace) -> int:
    """Search, and write what was found. Returns 0."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("cce-dist tune: needs a GPU, tile sizes are a property of the device")
    from cce_dist.bench.problem import loss_of
    from cce_dist.bench.workload import make_workload
    from cce_dist.kernels.tiles import choose_tiles

    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    start, before = choose_tiles(dtype, device), os.environ.get(VARIABLE)
    workloads = (make_workload(SHAPES[shape], args.tokens, dtype=dtype, device=device) for shape in args.shapes)
    problems = [loss_of(*workload[:3]) for workload in workloads]
    name = torch.cuda.get_device_name(device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            race = _race_on_gpu(problems, name, args.dtype, Path(folder), args.repeats)
            best = search(start, race, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
    merge_into(args.out, name, args.dtype, best)
    print(f"{args.out}: {name}, {args.dtype}\nexport {VARIABLE}={args.out.resolve()}")
    return 0


def search(start: Tiles, race: Race, progress: Callable[[str], None] = lambda line: None) -> Tiles:
    """Coordinate descent over the fields of ``Tiles``, in their order, once through."""
    best = start
    for field in best._fields:
        for variants in (_resized, _rescheduled) if field != "group" else (lambda group: GROUPS,):
            for value in variants(getattr(best, field)):
                candidate = best._replace(**{field: value})
                ratio = race(best, candidate) if candidate != best else 1.0
                if ratio < 1 - MIN_GAIN:
                    progress(f"{field}: {value}, time x {ratio:.3f}")
                    best = candidate
    return best


def _resized(tile: Tile) -> list[Tile]:
    return [tile._replace(rows=rows, cols=cols, inner=inner) for (rows, cols), inner in product(SIDES, INNERS)]


def _rescheduled(tile: Tile) -> list[Tile]:
    return [tile._replace(warps=warps, stages=stages) for warps, stages in product(WARPS, STAGES)]


def merge_into(path: Path, device: str, dtype: str, tiles: Tiles) -> None:
    """Write the tiles of one device and dtype into a file, next to those of others."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content.setdefault(device, {})[dtype] = tiles._asdict()  # a tile is written as the list of its numbers
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _race_on_gpu(problems: list[Problem], device: str, dtype: str, folder: Path, repeats: int) -> Race:
    from cce_dist import linear_cross_entropy
    from cce_dist.bench.loop import measure
    from cce_dist.bench.methods import Method
    from cce_dist.bench.problem import reference_of, trial_of

    references = [reference_of(problem) for problem in problems]

    def method(tiles: Tiles) -> Method:
        # Each has a file of its own, since the loss remembers what it read.
        file = folder / f"{hash(tiles)}.json"
        merge_into(file, device, dtype, tiles)

        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            os.environ[VARIABLE] = str(file)
            return linear_cross_entropy(hidden, weight, labels, backend="triton")

        return Method(lambda: loss)

    def race(best: Tiles, candidate: Tiles) -> float:
        log_ratio = 0.0
        for problem, reference in zip(problems, references, strict=True):
            both = {"best": method(best), "candidate": method(candidate)}
            where = problem.upstream.device
            rows = measure(both, lambda m: trial_of(m.build(), problem, reference, False), repeats, where, None).rows  # noqa: B023
            if any(row.problem for row in rows):  # too many registers, too much shared memory, tiles that do not fit
                return math.inf
            of_best, of_candidate = (row.total.median for row in rows)
            log_ratio += math.log(of_candidate / of_best)
        return math.exp(log_ratio / len(problems))

    return race
