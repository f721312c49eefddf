"""Train a model of transformers with each way of computing the head's gradient: does it change what is learned?

    python benchmarks/training.py --model gemma-3-270m --compile --first-seed 1 --seeds 1 --out runs/seed-1
    python benchmarks/training.py --show runs/seed-0/training.json runs/seed-1/training.json
    python benchmarks/training.py --model gemma-3-270m --methods stock --seeds 1 --capture 60 400 1200

The same model is trained from the same drawn weights on the same batches, once for each method and seed, in one process. At
every measurement the exact head computes the loss of held-out text, and the method's gradient is compared with the dense one at
the run's own weights, on the seed's first batch. Parameters are fp32 and forward runs under autocast, as with Trainer's
``bf16=True``. All batches of a seed are on the device before its first step, so that the host never waits between measurements.

--capture writes what the head gets at some steps, for ``heads.py --workload``: the cost and the errors of a filter follow from
how sure a model is of its next token, and no drawn softmax is a model's.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import cce_dist
import command
import training_report
from cce_dist.tools.arguments import device, folder, number, whole
from loop import Method
from models import CONFIGS, OURS, build, compile_layers, shifted, softcap_of, twin, ways
from problem import Problem, loss_of, reference_of
from records import describe, describe_environment, write_json
from training_report import COLUMNS, Comparison, Measurement
from training_report import Run as Record
from whole_steps import Run, Text, add_text
from workload import IGNORE_INDEX

# "filtered-12" filters with a threshold of 2^-12, "filtered-14" with 2^-14.
EPS = {f"filtered-{bits}": OURS["cce-dist-filtered"] | {"filter_eps": 2.0**-bits} for bits in (12, 14)}
TABLE: dict[str, Method] = ways(ours={name.removeprefix("cce-dist-"): options for name, options in OURS.items()} | EPS)
METHODS = ("stock", "default", "filtered")
WEIGHT_DECAY = 0.1
CAPTURED_TOKENS = 8192  # at most, of a batch


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=CONFIGS, metavar="MODEL", help=f"a model of transformers: {', '.join(CONFIGS)}")
    says = f"rows: {', '.join(TABLE)} (default: {' '.join(METHODS)})"
    add("--methods", nargs="+", choices=TABLE, metavar="METHOD", default=[*METHODS], help=says)
    add("--seeds", type=whole(1), default=2, metavar="N", help="runs of each method, a seed each (default: 2)")
    add("--first-seed", type=whole(0), default=0, metavar="SEED", help="the first of N seeds (default: 0)")
    add("--steps", type=whole(1), default=2000, help="optimizer steps of a run (default: 2000)")
    add("--batch-size", type=whole(1), default=2, help="sequences of a step (default: 2)")
    add("--lr", type=number(0, positive=True), default=3e-4, help="peak of the learning rate (default: 3e-4)")
    add("--warmup", type=whole(0), default=200, metavar="STEPS", help="steps up to the peak (default: 200)")
    add("--layers", type=whole(1), metavar="L", help="layers of the model (default: all)")
    add("--measure-every", type=whole(1), default=100, metavar="STEPS", help="steps between losses of held-out text")
    says = "steps between comparisons of gradients, a multiple of --measure-every (default: the same)"
    add("--gradients-every", type=whole(1), metavar="STEPS", help=says)
    add("--eval-batches", type=whole(1), default=8, metavar="BATCHES", help="batches of held-out text (default: 8)")
    add("--capture", nargs="+", type=whole(0), default=[], metavar="STEP", help="write captured/METHOD-SEED-STEP.pt")
    add("--compile", action="store_true", help="torch.compile around each layer")
    add("--device", type=device, help="cuda, cuda:1, cpu (default: cuda if there is one)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of forward's matmuls")
    add("--out", type=folder, default=Path("runs/training"), help="folder of training.json and training.png")
    says = "train nothing; print and draw a stored training.json, or several with different seeds or methods as one"
    add("--show", type=Path, nargs="+", metavar="JSON", help=says)
    says = f"with --show: print these columns, and draw nothing: {', '.join(COLUMNS)}"
    add("--columns", nargs="+", choices=COLUMNS, metavar="COLUMN", help=says)
    add_text(parser)
    return parser


def agreement(d_hidden: Tensor, d_weight: Tensor, problem: Problem) -> dict[str, Any]:
    """Compare gradients [N, D] and [V, D] of a loss with the dense ones; return fields of ``Measurement``.

    Besides dE and dC these are the mean of dE over tokens, in which errors of the same sign add up, and the rows of dC whose id
    is no label of the batch, which come from small probabilities alone.
    """
    truth, labels = reference_of(problem), problem.tokens[1]
    rare = torch.ones(len(truth.d_weight), dtype=torch.bool, device=labels.device)
    rare[labels[labels != IGNORE_INDEX]] = False
    pairs = {
        "dE": (d_hidden, truth.d_hidden),
        "mean dE": (d_hidden.double().mean(0), truth.d_hidden.double().mean(0)),
        "dC": (d_weight, truth.d_weight),
        "rare dC": (d_weight[rare], truth.d_weight[rare]),
    }
    found: dict[str, Any] = {"cosine": {}, "norm": {}, "dense_norm": {}, "batch_loss": truth.value.item()}
    for name, pair in pairs.items():
        gradient, true = (tensor.double().flatten() for tensor in pair)
        norm, true_norm = gradient.norm().item(), true.norm().item()
        found["cosine"][name] = (gradient @ true).item() / (norm * true_norm or math.nan)
        found["norm"][name], found["dense_norm"][name] = norm / (true_norm or math.nan), true_norm
    return found


class Learner:
    """One model, trained by one method after another: its weights are reset in place, each method has its own head."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.dtype = args, torch.device(args.device), getattr(torch, args.dtype)
        self.draw = partial(build, args.model, args.layers, torch.float32, self.device)
        self.model = self.draw()
        if args.compile:
            compile_layers(self.model)
        self.text = Text(args, self.model.config.vocab_size)
        held_out = self.text.held_out(args.eval_batches * args.batch_size, self.device)
        self.held_out = held_out.view(-1, args.batch_size, args.length)

    def start(self, seed: int) -> None:
        """Draw the first weights and the order of the batches."""
        # With deterministic algorithms and compiled layers, torch 2.11 computes wrong gradients of transformers' q_proj.
        torch.use_deterministic_algorithms(not self.args.compile, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        self.seed, self.initial = seed, self.draw(seed).state_dict()
        ids = self.text.train(0, self.args.steps * self.args.batch_size, self.device, seed)
        self.batches = ids.view(-1, self.args.batch_size, self.args.length)  # [steps, B, L]

    def take(self, method: str) -> None:
        """Reset the weights to the first ones, and train with this method from here on."""
        self.method = method
        self.model.load_state_dict(self.initial)
        self.way = TABLE[method].build(twin(self.model, self.model.model))
        matrices, vectors = ([p for p in self.model.parameters() if (p.ndim > 1) == is_one] for is_one in (True, False))
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.run = Run(self.model, torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True))

    def step(self, step: int) -> Tensor:
        """Take a step, counted from 0, and return its loss, without waiting for the device.

        The learning rate rises linearly, then falls by a cosine to a tenth of its peak.
        """
        done = (step + 1 - self.args.warmup) / max(1, self.args.steps - self.args.warmup)
        rate = 0.55 + 0.45 * math.cos(math.pi * done) if done > 0 else (step + 1) / self.args.warmup
        self.run.set_rate(self.args.lr * rate)
        return self.run.step(self._forward, self.batches[step])

    @torch.no_grad()
    def validate(self) -> float:
        """Return the exact loss of held-out text."""
        losses = []
        for ids in self.held_out:
            with self._autocast():
                hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
                options: dict[str, Any] = {"softcap": softcap_of(self.model)}
                losses.append(cce_dist.linear_cross_entropy(hidden, self.model.lm_head.weight, shifted(ids), **options))
        return torch.stack(losses).mean().item()

    def compare(self) -> dict[str, Any]:
        """Compare the method's gradients with the dense ones, and return the fields of ``Measurement`` about them."""
        ids, found = self.batches[0], []

        def cut(trunk: nn.Module, args: tuple, output: Any) -> Any:
            """Detach the trunk: hidden states become a leaf, and a tied weight gets only the head's gradient."""
            found.append(output.last_hidden_state.detach().requires_grad_())
            output.last_hidden_state = found[0]
            return output

        with self.model.model.register_forward_hook(cut):
            loss = self._forward(input_ids=ids, labels=ids)["loss"]
        weight = self.model.lm_head.weight
        d_hidden, d_weight = torch.autograd.grad(loss, (found[0], weight))
        operands = found[0].detach().to(self.dtype).flatten(0, 1), weight.detach().to(self.dtype)
        if TABLE[self.method].ours:
            cce_dist.require(self.way)
        problem = loss_of(*operands, shifted(ids).flatten(), softcap_of(self.model))
        return agreement(d_hidden.flatten(0, 1), d_weight, problem)

    @torch.no_grad()
    def capture(self, step: int) -> None:
        """Write what the head gets in a step, before it is taken: hidden states, weight and shifted labels."""
        ids = self.batches[step]
        with self._autocast():
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        hidden, labels = (tensor.flatten(0, 1)[:CAPTURED_TOKENS] for tensor in (hidden, shifted(ids)))
        weight = self.model.lm_head.weight.to(self.dtype)
        tensors = {"hidden": hidden.to(self.dtype), "weight": weight, "labels": labels}
        path = self.args.out / "captured" / f"{self.method}-{self.seed}-{step}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: tensor.cpu().clone() for name, tensor in tensors.items()}, path)

    def _forward(self, **batch: Tensor) -> Any:
        with self._autocast():
            return self.way(**batch)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype != torch.float32)


def train_all(learner: Learner, args: argparse.Namespace, advance: Callable[[], Any]) -> Iterator[Record]:
    """Yield each run as it ends, all methods of a seed before the next seed; call ``advance`` after each step."""
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        torch.manual_seed(seed)
        learner.start(seed)
        for method in args.methods:
            record = Record(method, seed)
            try:
                learner.take(method)
                train(learner, args, record, advance)
            except Exception as error:  # other libraries raise anything, and the other methods go on
                if TABLE[method].ours or method == "stock":
                    raise
                record.problem = describe(error)
            yield record


def train(learner: Learner, args: argparse.Namespace, record: Record, advance: Callable[[], Any]) -> None:
    """Take all steps. Measure before the first step, after the last, and every so many steps."""
    losses: list[Tensor] = []
    for step in range(args.steps + 1):
        is_last = step == args.steps
        if step % args.measure_every == 0 or is_last:
            measured = Measurement(step, math.nan)
            if losses:
                measured.train_loss = torch.stack(losses).mean().item()
            measured.val_loss = learner.validate()
            record.measurements.append(measured)
            if not math.isfinite(measured.val_loss):
                record.problem = f"the validation loss is {measured.val_loss} after step {step}"
                return
            if step % (args.gradients_every or args.measure_every) == 0 or is_last:
                vars(measured).update(learner.compare())
            losses = []
        if not is_last:
            if step in args.capture:
                learner.capture(step)
            losses.append(learner.step(step))
            advance()
    first, last = record.measurements[0].val_loss, record.measurements[-1].val_loss
    if args.steps >= 100 and last > first - 0.1:  # losses of runs that learn nothing compare nothing
        went = f"from {first:.2f} to {last:.2f} in {args.steps} steps"
        record.problem = f"nothing was learned: the validation loss went {went}"


def compare(args: argparse.Namespace) -> Comparison:
    """Train each method with each seed; write ``args.out/training.json`` after every run."""
    if args.model is None:
        raise command.Refused(f"--model names one of {', '.join(CONFIGS)}")
    if (args.gradients_every or args.measure_every) % args.measure_every:
        raise command.Refused("--gradients-every must be a multiple of --measure-every")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # cuBLAS is deterministic with this workspace alone, and reads it when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    args.out.mkdir(parents=True, exist_ok=True)
    learner = Learner(args)
    config = learner.model.config
    sizes = {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "seq_len": args.length,
        "vocab_size": config.vocab_size,
    }
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    comparison = Comparison(describe_environment(learner.device), options, sizes, missing={})
    with tqdm(total=args.seeds * len(args.methods) * args.steps, unit="step", disable=None) as bar:
        for record in train_all(learner, args, bar.update):
            comparison.runs.append(record)
            write_json(args.out / "training.json", comparison)
            tqdm.write(training_report.line(record))
    return comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these arguments (default: the process's own), and return its exit code."""
    args = parser().parse_args(argv)
    if args.show:
        try:
            comparison = training_report.joined(args.show)
        except (OSError, ValueError) as error:
            raise command.Refused(error) from error
        if args.columns:
            print("\n".join(training_report.summary(comparison, args.columns)))
            return 0
    else:
        comparison = compare(args)
    figure = args.show[0].with_suffix(".png") if args.show else args.out / "training.png"
    print(training_report.table(comparison))
    training_report.draw(comparison, figure)
    print(f"\n{figure}, {figure.with_suffix('.json')}")
    return int(any(run.problem for run in comparison.runs if run.method in METHODS))


if __name__ == "__main__":
    sys.exit(main())
