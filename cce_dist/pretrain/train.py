"""The training loop: one batch, one loss over all ranks, one step; now and then a validation and a checkpoint.

Weights, data order and schedule are functions of seed and step alone. So runs that differ in ``--loss`` differ in nothing
else, the number of ranks changes rounding alone, and a resumed run repeats the bits of one that never stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cce_dist import FilterStats, GradFilter, VocabParallelHead
from cce_dist.pretrain import FILTERS, UsageError, checkpoint, plot
from cce_dist.pretrain.data import IGNORED, Batches, Corpus
from cce_dist.pretrain.log import Log
from cce_dist.pretrain.model import GPT, PRESETS, DenseHead, Shape, shard_model
from cce_dist.pretrain.ranks import Ranks


def train(args: argparse.Namespace, ranks: Ranks, folder: Path) -> float:
    """Train as ``args`` say on the corpus in ``folder``.

    Returns:
        The last validation loss, in nats per token; NaN if the run was finished already.

    Raises:
        UsageError: Sizes that cannot be split, a checkpoint of another run, a loss that is not finite; on every rank.
        CheckpointError: On every rank.
        OSError: On the first rank, which writes the metrics.
    """
    shape = model_shape(args, ranks)
    corpus = Corpus(folder)
    batches = Batches(corpus.train, shape.seq_len, args.seed)
    held_out = Batches(corpus.held_out, shape.seq_len, args.seed)

    make_deterministic(args.seed)
    engine = _engine(args, ranks, shape)
    same = {
        **dataclasses.asdict(shape),
        "corpus": corpus.key,
        "seed": args.seed,
        "engine": args.engine,
        **engine.layout,
    }
    state = _resume(args, ranks, engine, same)
    log = Log(args.out, state["step"], args.steps) if ranks.rank == 0 else None
    if log is not None and state["step"]:
        done = ", which was the last: --steps N goes on, --no-resume starts anew" if state["step"] >= args.steps else ""
        log.note(f"resumed after step {state['step']}{done}")

    val_loss = math.nan
    tokens, clock = 0, time.perf_counter()
    for step in range(state["step"] + 1, args.steps + 1):
        ids, labels = batches.at(state["position"], args.batch_size)
        state["position"] += args.batch_size
        loss, grad_norm, stats = engine.step(step, ids, labels)
        state["step"] = step
        tokens += labels.size

        if step % args.log_every == 0 or step == args.steps:
            loss, grad_norm = loss.item(), grad_norm.item()  # waits for the device, so the clock is right
            if not math.isfinite(loss):
                raise UsageError(f"the loss is {loss} at step {step}: lower --lr, or look at the data")
            record = {
                "step": step, "split": "train", "loss": loss, "lr": learning_rate(step, args), "grad_norm": grad_norm,
                "tokens_per_s": tokens / (time.perf_counter() - clock), "peak_mb": engine.peak_mb(),
                **engine.filter_record(stats),
            }  # fmt: skip
            if log is not None:
                log.write(record)
            tokens, clock = 0, time.perf_counter()
        if log is not None:
            log.advance()

        if step % args.eval_every == 0 or step == args.steps:
            val_loss = engine.validate(held_out)
            if log is not None:
                log.write({"step": step, "split": "val", "loss": val_loss})
                log.note(f"step {step:>6}  val loss {val_loss:.4f}")
            tokens, clock = 0, time.perf_counter()
        if args.checkpoint_every and (step % args.checkpoint_every == 0 or step == args.steps):
            checkpoint.save(args.out / "checkpoints", args.keep, engine, state)
            tokens, clock = 0, time.perf_counter()

    if log is not None:
        log.close()
        if not math.isnan(val_loss):
            print(f"val loss {val_loss:.4f}, where ln V = {math.log(shape.vocab_size):.4f}")
        try:
            plot.draw([args.out], args.out / "curves.png")
            print(f"curves in {args.out / 'curves.png'}")
        except ModuleNotFoundError as error:
            print(f"no figure, for lack of {error.name}; 'cce-dist plot {args.out}' draws it later")
    return val_loss


class TorchEngine:
    """A model, an optimizer and how they are driven: what the loop above asks of an engine, here in plain torch."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks, shape: Shape) -> None:
        self.args, self.ranks = args, ranks
        self.layout: dict[str, int] = {}  # what a checkpoint's ranks must have in common with ours: nothing
        self.model = build_model(args, ranks, shape)
        self.optimizer = make_optimizer(self.model, args)

    def step(self, step: int, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor, FilterStats | None]:
        """See ``train_step``."""
        return train_step(self.args, self.ranks, self.model, self.optimizer, step, ids, labels)

    def filter_record(self, stats: FilterStats | None) -> dict[str, float]:
        """Return what the filter did in the last microbatch of a step, over all shards and data-parallel ranks."""
        if stats is None:
            return {}
        kept, mass, largest = torch.stack(stats).view(3, 1)
        if self.ranks.world_size > 1:
            means = torch.cat([kept, mass])
            dist.all_reduce(means)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            # A shard drops its own part of a token's mass, so shards add up.
            kept, mass = means[0] / self.ranks.world_size, means[1] / self.ranks.dp
        return {
            "kept_tiles": kept.item(),
            "dropped_mass_mean": mass.item(),
            "dropped_mass_max_of_shards": largest.item(),
        }

    def validate(self, held_out: Batches) -> float:
        """See ``validate``."""
        return validate(self.args, self.ranks, self.model, held_out)

    def peak_mb(self) -> float:
        """Return the largest memory of this rank so far."""
        return peak_mb(self.ranks.device)

    def save_tensors(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.write_tensors(folder, {"model": model, "optimizer": optimizer})

    def load_tensors(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.read_tensors(folder, {"model": model, "optimizer": optimizer})
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def _engine(args: argparse.Namespace, ranks: Ranks, shape: Shape) -> Any:
    if args.engine == "megatron":
        from cce_dist.pretrain.megatron import MegatronEngine

        return MegatronEngine(args, ranks, shape)
    if args.engine == "deepspeed":
        from cce_dist.pretrain.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(args, ranks, shape)
    return TorchEngine(args, ranks, shape)


def build_model(args: argparse.Namespace, ranks: Ranks, shape: Shape) -> GPT:
    """Return the model on its device, sharded; its weights depend on torch's CPU seed alone."""
    model = GPT(shape, build_head(args, ranks, shape, want_stats=True))
    if ranks.tp_mesh is not None:
        shard_model(model, ranks.tp_mesh, args.sequence_parallel)
    model.to(ranks.device)
    if args.compile:
        for block in model.blocks:
            block.compile()
    if ranks.dp_mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=ranks.dp_mesh)
        fully_shard(model, mesh=ranks.dp_mesh)
    return model


def build_head(
    args: argparse.Namespace,
    ranks: Ranks,
    shape: Shape,
    *,
    weight: nn.Parameter | None = None,
    want_stats: bool = False,
) -> nn.Module:
    """Return the head that ``args.loss`` names, over ``weight`` if there is one.

    ``want_stats`` has a filtered head return what its filter did; the entropy comes with that, so it takes time.
    """
    grad_filter = chosen_filter(args)
    head = VocabParallelHead(
        shape.hidden_size, shape.vocab_size, mesh=ranks.tp_mesh, weight=weight, init_std=0.02, device=ranks.device,
        sequence_parallel=args.sequence_parallel and ranks.tp > 1, grad_filter=grad_filter,
        return_aux=want_stats and grad_filter is not None,
    )  # fmt: skip
    return DenseHead(head, ranks.tp_mesh, args.sequence_parallel) if args.loss == "dense" else head


def chosen_filter(args: argparse.Namespace) -> GradFilter | None:
    """Return the filter that ``args.loss`` names; None if it names none."""
    return GradFilter(args.filter_eps, **FILTERS[args.loss]) if args.loss in FILTERS else None


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of a step, counted from 1: linear warm-up, then a cosine down to a tenth of the peak."""
    if step <= args.warmup:
        return args.lr * step / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, ranks: Ranks) -> Tensor:
    """Scale all gradients so that their norm is ``max_norm`` at most, and return the norm that they had.

    Communication: one all-reduce of a number, so that every rank scales by the same bits (``clip_grad_norm_`` sums a mesh's
        dimensions one after the other); and one per norm under sequence parallelism, whose gradients are not summed yet.
    """
    square = torch.zeros((), device=ranks.device)
    gradients = []
    for parameter in model.parameters():
        gradient, num_shards = parameter.grad, 1
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            num_shards = math.prod(size for size, placement in sizes if not placement.is_replicate())
            gradient = gradient.to_local()
        if gradient is not None:
            square += gradient.float().square().sum() * (num_shards / ranks.world_size)  # every copy adds its share
            gradients.append(gradient)
    if ranks.world_size > 1:
        dist.all_reduce(square)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def model_shape(args: argparse.Namespace, ranks: Ranks) -> Shape:
    """Return the model's sizes, after checking that they can be split as asked."""
    wanted = {name: getattr(args, name) for name in ("vocab_size", "num_layers", "seq_len")}
    shape = dataclasses.replace(PRESETS[args.preset], **{k: v for k, v in wanted.items() if v is not None})
    parts = {"heads": (shape.num_heads, ranks.tp), "ffn width": (shape.num_ffn, ranks.tp)}
    if args.sequence_parallel:
        parts["sequence length"] = (shape.seq_len, ranks.tp)
    parts["batch size"] = (args.batch_size, ranks.dp * args.accumulate)
    for name, (size, ways) in parts.items():
        if size % ways:
            raise UsageError(f"{name} {size} cannot be split {ways} ways")
    if not 0 <= args.filter_eps < 1:
        raise UsageError(f"--filter-eps must be in [0, 1), got {args.filter_eps}")
    return shape


def make_deterministic(seed: int) -> None:
    """Seed torch and keep it to algorithms that repeat their bits."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def make_optimizer(model: nn.Module, args: argparse.Namespace, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return AdamW over the model's parameters; only matrices decay. ``fused`` steps in one kernel, for plain tensors."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused)


def _resume(args: argparse.Namespace, ranks: Ranks, engine: checkpoint.Engine, same: dict[str, Any]) -> dict[str, Any]:
    """Return the state to go on from; ``same`` is what may not change between a run and its resumption."""
    folder = args.out / "checkpoints"
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if not args.resume and not restarted:
            checkpoint.clear(folder)
    if ranks.world_size > 1:
        dist.barrier()
    state = checkpoint.load(folder, engine, same)
    return {"step": 0, "position": 0, "same": same} if state is None else state


def train_step(
    args: argparse.Namespace, ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, step: int,
    ids: np.ndarray, labels: np.ndarray,
) -> tuple[Tensor, Tensor, FilterStats | None]:  # fmt: skip
    """Take optimizer step number ``step``, counted from 1, on a whole batch, without waiting for the device.

    Returns:
        The batch's mean loss, the gradient's norm before clipping, and what the filter did, if there is one.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    loss, stats = _accumulate_gradients(args, ranks, model, ids, labels)
    grad_norm = clip_gradients(model, args.clip, ranks)
    optimizer.step()
    optimizer.zero_grad()
    return loss, grad_norm, stats


def _accumulate_gradients(
    args: argparse.Namespace, ranks: Ranks, model: nn.Module, ids: np.ndarray, labels: np.ndarray
) -> tuple[Tensor, FilterStats | None]:
    """Add up the gradient of the batch's mean loss; return that loss and what the filter did, if there is one.

    Every rank divides by the valid tokens of the whole batch, which it holds, so the parts add up to the mean.
    """
    num_tokens = max(1, int((labels != IGNORED).sum()))
    total = torch.zeros((), device=ranks.device)
    stats = None
    for part_ids, part_labels in microbatches(ids, labels, ranks, args.accumulate):
        with autocast(args, ranks):
            loss, stats = model(part_ids, part_labels, num_tokens)
        # FSDP averages gradients over its ranks; ours are to be summed.
        (loss * ranks.dp).backward()
        total += loss.detach()
    return _sum_over_dp(total, ranks), stats


@torch.no_grad()
def validate(args: argparse.Namespace, ranks: Ranks, model: nn.Module, held_out: Batches) -> float:
    """Return the mean loss of the first ``args.eval_batches`` held-out batches, the same ones every time."""
    batches = [held_out.at(index * args.batch_size, args.batch_size) for index in range(args.eval_batches)]
    num_tokens = max(1, sum(int((labels != IGNORED).sum()) for _, labels in batches))
    total = torch.zeros((), device=ranks.device)
    for ids, labels in batches:
        for part_ids, part_labels in microbatches(ids, labels, ranks, args.accumulate):
            with autocast(args, ranks):
                total += model(part_ids, part_labels, num_tokens)[0]
    return _sum_over_dp(total, ranks).item()


def microbatches(ids: np.ndarray, labels: np.ndarray, ranks: Ranks, accumulate: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's microbatches of a whole batch, [s, b] each, on its device."""
    size = len(ids) // (ranks.dp * accumulate)
    first = ranks.dp_rank * accumulate
    for part in range(first, first + accumulate):
        part_ids, part_labels = (each[part * size : (part + 1) * size].T.copy() for each in (ids, labels))
        yield _to_device(part_ids, ranks.device), _to_device(part_labels, ranks.device)


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory a copy would wait for all that the GPU has to do
    return tensor.to(device, non_blocking=True)


def autocast(args: argparse.Namespace, ranks: Ranks) -> torch.autocast:
    """Return the context in which the model and its loss run forward."""
    dtype = getattr(torch, args.dtype)
    return torch.autocast(ranks.device.type, torch.bfloat16, enabled=dtype != torch.float32)


def _sum_over_dp(value: Tensor, ranks: Ranks) -> Tensor:
    if ranks.dp_mesh is not None:
        dist.all_reduce(value, group=ranks.dp_mesh.get_group())
    return value


def peak_mb(device: torch.device) -> float:
    """Return the largest memory so far: of the GPU's tensors, or of this process where there is no GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
