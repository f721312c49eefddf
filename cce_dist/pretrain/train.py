"""The training loop: one batch, one loss over all ranks, one step; now and then a validation and a checkpoint.

Weights, data order and schedule are functions of seed and step alone. So runs that differ in ``--loss`` differ in nothing
else, the number of ranks changes rounding alone, and a resumed run repeats the bits of one that never stopped.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from cce_dist.pretrain import checkpoint, plot
from cce_dist.pretrain.capture import captured
from cce_dist.pretrain.data import Batches
from cce_dist.pretrain.engines import Engine, Step
from cce_dist.pretrain.log import Log
from cce_dist.pretrain.recipe import Recipe, UsageError


def train(engine: Engine, corpus: str, batches: Batches, held_out: Batches) -> float:
    """Train as the engine's recipe says. ``corpus`` is the key of the corpus that both batches are from.

    Returns:
        The last validation loss, in nats per token; NaN if the run was finished already.

    Raises:
        UsageError: A checkpoint of another run, or a loss that is not finite; on every rank.
        CheckpointError: On every rank.
        OSError: On the first rank, which writes the metrics.
    """
    recipe = engine.recipe
    state = _resume(engine, corpus)
    log = _open_log(recipe, state["step"]) if engine.ranks.rank == 0 else None
    val_loss = math.nan
    tokens, clock = 0, time.perf_counter()
    for step in range(state["step"] + 1, recipe.steps + 1):
        ids, labels = batches.at(state["position"], recipe.batch_size)
        state["position"] += recipe.batch_size
        with captured(engine, step):
            done = engine.step(step, ids, labels)
        state["step"] = step
        tokens += labels.size

        is_last, paused = step == recipe.steps, False
        if step % recipe.log_every == 0 or is_last:
            record = _record(engine, step, done, tokens, clock)
            if log is not None:
                log.write(record)
            paused = True
        if log is not None:
            log.advance()
        if step % recipe.eval_every == 0 or is_last:
            val_loss = engine.validate(held_out)
            if log is not None:
                log.write({"step": step, "split": "val", "loss": val_loss})
                log.note(f"step {step:>6}  val loss {val_loss:.4f}")
            paused = True
        if recipe.checkpoint_every and (step % recipe.checkpoint_every == 0 or is_last):
            checkpoint.save(recipe.out / "checkpoints", recipe.keep, engine.save_tensors, state)
            paused = True
        if paused:  # tokens_per_s is of steps alone
            tokens, clock = 0, time.perf_counter()
    if log is not None:
        _finish(log, recipe, val_loss)
    return val_loss


def make_deterministic(seed: int) -> None:
    """Seed torch and keep it to algorithms that repeat their bits."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _resume(engine: Engine, corpus: str) -> dict[str, Any]:
    """Return the state to go on from: of the newest checkpoint, or of a run that begins."""
    recipe, ranks = engine.recipe, engine.ranks
    # A run and its resumption must have all of these in common.
    same = dataclasses.asdict(recipe.shape) | {"corpus": corpus, "seed": recipe.seed, "engine": recipe.engine}
    same |= engine.layout
    folder = recipe.out / "checkpoints"
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if not recipe.resume and not restarted:
            checkpoint.clear(folder)
    if ranks.world_size > 1:
        dist.barrier()
    state = checkpoint.load(folder, engine.load_tensors, same)
    return {"step": 0, "position": 0, "same": same} if state is None else state


def _record(engine: Engine, step: int, done: Step, tokens: int, clock: float) -> dict[str, Any]:
    """Return the metrics of a step: ``tokens`` were seen since ``clock``. Every rank calls it."""
    loss, grad_norm = done.loss.item(), done.grad_norm.item()  # waits for the device, so the clock is right
    if not math.isfinite(loss):
        raise UsageError(f"the loss is {loss} at step {step}: lower --lr, or look at the data")
    record = {
        "step": step, "split": "train", "loss": loss, "lr": engine.recipe.learning_rate(step), "grad_norm": grad_norm,
        "tokens_per_s": tokens / (time.perf_counter() - clock), "peak_mb": engine.peak_mb(),
    }  # fmt: skip
    if done.filter_stats is None:
        return record
    names = ("kept_tiles", "dropped_mass_mean", "dropped_mass_max_of_shards")
    merged = engine.merge_stats(done.filter_stats)
    return record | {name: value.item() for name, value in zip(names, merged, strict=True)}


def _open_log(recipe: Recipe, step: int) -> Log:
    log = Log(recipe.out, step, recipe.steps)
    if step:
        done = ", which was the last: --steps N goes on, --no-resume starts anew" if step >= recipe.steps else ""
        log.note(f"resumed after step {step}{done}")
    return log


def _finish(log: Log, recipe: Recipe, val_loss: float) -> None:
    """Close the log and draw the curves, if this machine can."""
    log.close()
    if not math.isnan(val_loss):
        print(f"val loss {val_loss:.4f}, where ln V = {math.log(recipe.shape.vocab_size):.4f}")
    try:
        plot.draw([recipe.out], recipe.out / "curves.png")
        print(f"curves in {recipe.out / 'curves.png'}")
    except ModuleNotFoundError as error:
        print(f"no figure, for lack of {error.name}; 'cce-dist plot {recipe.out}' draws it later")
