"""This process's place among the ranks: device, mesh, part of a batch; and how all stop together."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cce_dist.tools import ranks
from cce_dist.tools.pretrain.exits import CheckpointError, UsageError, writing
from cce_dist.tools.pretrain.recipe import Recipe

FAILED = 1000  # no signal's number


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    tp: int = 1  # tensor-parallel size; these ranks are neighbours
    dp: int = 1  # data-parallel size
    mesh: DeviceMesh | None = None  # [dp, tp]; None where there is one rank only

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.mesh is not None and self.tp > 1 else None

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        return self.mesh["dp"] if self.mesh is not None and self.dp > 1 else None

    def microbatches(self, ids: np.ndarray, labels: np.ndarray, accumulate: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's ``accumulate`` microbatches of a whole batch, [s, b] each, on its device."""
        size = len(ids) // (self.dp * accumulate)
        first = self.rank // self.tp * accumulate
        for part in range(first, first + accumulate):
            part_ids, part_labels = (each[part * size : (part + 1) * size].T.copy() for each in (ids, labels))
            yield _to_device(part_ids, self.device), _to_device(part_labels, self.device)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in their order. Every rank calls it."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def together(self, act: Callable[[], Any]) -> list[Any]:
        """Have every rank act; return their results, or raise on every rank what the first to fail met."""
        result = failure = None
        try:
            result = act()
        except (UsageError, CheckpointError) as error:
            failure = error
        facts = self.gather((result, failure))
        for _, failure in facts:
            if failure is not None:
                raise failure
        return [result for result, _ in facts]

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Have the first rank act, and return its result on every rank, or raise what it met."""
        return self.together(lambda: act() if self.rank == 0 else None)[0]

    def peak_mb(self) -> float:
        """Return the ranks' largest memory so far: of a GPU's tensors, or of a process."""
        on_gpu = self.device.type == "cuda"
        own = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        peak = torch.tensor(own / 2**20, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return peak.item()


class Agreement:
    """Has all ranks stop after the same step.

    Each step begins with an all-reduce of a number: the signal that a rank has heard, or 0. Its result is read one step later,
    so that no host waits for the step that its GPU has under way.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._asked = ranks, 0
        self._failure: CheckpointError | None = None
        self._flag: Tensor | None = None

    def remember(self, number: int) -> None:
        """Note a signal that asks this rank to stop."""
        self._asked = number

    @contextlib.contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """Note that the first rank could not write to ``path``: all ranks stop a little later."""
        try:
            with writing(path):
                yield
        except CheckpointError as error:
            self._failure = self._failure or error

    def before_step(self) -> str | None:
        """Return None if all ranks take the next step, else the name of the signal that asks them to stop.

        Every rank calls it, and raises what was noted on the first one.
        """
        wish = self._asked if self._failure is None else FAILED
        if self._ranks.world_size > 1:
            flag = torch.full((), wish, dtype=torch.int32, device=self._ranks.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            flag, self._flag = self._flag, flag
            wish = 0 if flag is None else int(flag)
        if wish == FAILED:
            self.settle()
        return signal.Signals(wish).name if wish else None

    def settle(self) -> None:
        """Raise, on every rank, what was noted on the first one. Every rank calls it."""
        failure = self._ranks.gather(self._failure)[0]
        if failure is not None:
            raise failure


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory a copy would wait for all that the GPU has to do
    return tensor.to(device, non_blocking=True)


def join(recipe: Recipe) -> Ranks:
    """Join the process group, where there is one, and see that ranks, GPUs and arguments fit together."""
    # cuBLAS is deterministic with this workspace alone, and reads it when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    check_gpus(recipe, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = ranks.own_device(recipe.device)
    if int(os.environ.get("WORLD_SIZE", "1")) == recipe.num_ranks == 1:
        return Ranks(device)

    # On CPUs DTensor falls back from all-to-all to all-gather, and says so on every rank.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    ranks.join(device, recipe.timeout, bind=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if recipe.num_ranks != world_size:
        raise UsageError(f"--tp {recipe.tp} x --dp {recipe.dp} does not make the {world_size} ranks of torchrun")
    check_alike(recipe, Ranks(device, rank, world_size))
    return make_mesh(device, recipe.tp, recipe.dp, datetime.timedelta(seconds=recipe.timeout))


def check_gpus(recipe: Recipe, num_local: int) -> None:
    """Raise ``UsageError`` where this machine lacks a GPU for each of its ranks."""
    if recipe.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no GPU")
    if num_local > torch.cuda.device_count():
        raise UsageError(f"{num_local} ranks, but {torch.cuda.device_count()} GPUs on this machine")


def check_alike(recipe: Recipe, place: Ranks) -> None:
    """Raise ``UsageError``, on every rank, where ranks were started with arguments that differ.

    Folders may differ: the corpus is compared by its content, and ``--out`` by what is in it.
    """
    ours = recipe.arguments()
    for name in ("out", "cache", "corpus"):
        ours.pop(name)
    first, *others = place.gather(ours)
    for rank, other in enumerate(others, 1):
        wrong = [f"{name} {other[name]} in place of {value}" for name, value in first.items() if other[name] != value]
        if wrong:
            raise UsageError(f"ranks were started with different arguments: rank {rank} has {', '.join(wrong)}")


def make_mesh(device: torch.device, tp: int, dp: int, timeout: datetime.timedelta) -> Ranks:
    """Return this rank's place in a [dp, tp] mesh over the default group."""
    grid = torch.arange(dp * tp).view(dp, tp)
    # init_device_mesh would make these groups with the default time-out.
    groups: Any = [
        dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout, group_desc=name)[0]
        for name, lines in (("dp", grid.T), ("tp", grid))
    ]
    mesh = DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=("dp", "tp"))
    return Ranks(device, dist.get_rank(), dist.get_world_size(), tp, dp, mesh=mesh)
