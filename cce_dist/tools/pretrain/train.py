"""The training loop: a batch, a loss over all ranks, a step; now and then a validation and a checkpoint.

Weights, data order and schedule are functions of seed and step alone: the number of ranks changes rounding alone, and a
resumed run repeats the bits of one that never stopped.

Nothing that is not finite is stored: neither a loss nor a gradient norm, nor weights that give no finite held-out loss.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from cce_dist.tools.pretrain import checkpoint, folder, plot
from cce_dist.tools.pretrain.data import Batches, Corpus
from cce_dist.tools.pretrain.engine import Engine, Step
from cce_dist.tools.pretrain.exits import SIGNALS, Stopped, UsageError, signal_handlers
from cce_dist.tools.pretrain.log import Log
from cce_dist.tools.pretrain.ranks import Agreement, Ranks
from cce_dist.tools.pretrain.recipe import Recipe, Shape

# Dense bf16 TFLOP/s by part of the device's name, from NVIDIA's data sheets; the SXM modules.
PEAKS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0}


def train(recipe: Recipe, ranks: Ranks, tokens: Path) -> None:
    """Train as the recipe says, on the corpus in the folder ``tokens``.

    Raises:
        UsageError: A folder or a checkpoint of another run, or a loss that is not finite; on every rank.
        CheckpointError: Checkpoint or metrics could not be written; on every rank.
        Stopped: After a checkpoint, because a signal asked for it; on every rank.
    """
    corpus = Corpus(tokens)
    batches, held_out = (Batches(ids, recipe.shape.seq_len, recipe.seed) for ids in (corpus.train, corpus.held_out))
    # Keep torch to algorithms that repeat their bits.
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    engine = Engine(recipe, ranks)
    with folder.hold(recipe.out, ranks) as restarted:
        run = _Run(engine, corpus, held_out, restarted)
        with signal_handlers(SIGNALS, run.agreement.remember):
            try:
                run.train(batches)
            finally:
                if run.log is not None:
                    run.log.close()


class _Run:
    """One run between two starts: its state, its log, and what it stores."""

    def __init__(self, engine: Engine, corpus: Corpus, held_out: Batches, restarted: bool) -> None:
        self.engine, self.held_out = engine, held_out
        self.recipe, self.ranks = engine.recipe, engine.ranks
        self.agreement = Agreement(self.ranks)
        self.unseen: list[tuple[int, Tensor]] = []  # steps whose numbers nobody has looked at yet
        self.state = self._resume(corpus, restarted)
        self.stored = self.state["step"]
        self.log = self._open_log() if self.ranks.rank == 0 else None

    def train(self, batches: Batches) -> None:
        """Take all steps that are left; see the module's ``train``."""
        recipe, engine, state = self.recipe, self.engine, self.state
        state["steps"] = recipe.steps
        val_loss, tokens, clock = math.nan, 0, time.perf_counter()
        for step in range(state["step"] + 1, recipe.steps + 1):
            asked = self.agreement.before_step()
            if asked is not None:
                self._stop(asked)
            ids, labels = batches.at(state["position"], recipe.batch_size)
            state["position"] += recipe.batch_size
            done = engine.step(step, ids, labels)
            state["step"] = step
            tokens += labels.size
            self.unseen.append((step, done.loss + done.grad_norm))

            is_last = step == recipe.steps
            logged = step % recipe.log_every == 0 or is_last
            judged = step % recipe.eval_every == 0 or is_last
            stores = recipe.checkpoint_every and (step % recipe.checkpoint_every == 0 or is_last)
            if logged or judged or stores or len(self.unseen) == 256:
                self._check_finite()  # waits for the device, so the clock is right
            if logged:
                record = self._describe(step, done, tokens, time.perf_counter() - clock)
                self._record(Log.write, record)
            self._record(Log.advance)
            if judged:
                val_loss = self._judge()
                uniform = math.log(recipe.shape.vocab_size)
                self._record(Log.write, {"step": step, "split": "val", "loss": val_loss, "uniform": uniform})
                self._record(Log.note, f"step {step:>6}  val loss {val_loss:.4f}")
            if stores:
                self._store(is_judged=judged)
            if logged or judged or stores:  # tokens_per_s is of steps alone
                tokens, clock = 0, time.perf_counter()
        self.agreement.settle()
        self._finish(val_loss)

    def _resume(self, corpus: Corpus, restarted: bool) -> dict[str, Any]:
        """Return the state to go on from: of the newest checkpoint, or of a run that begins."""
        recipe, engine, ranks = self.recipe, self.engine, self.ranks
        # Checkpoints of earlier versions may be of other engines.
        same = dataclasses.asdict(recipe.shape) | {"corpus": corpus.key, "seed": recipe.seed, "engine": "torch"}
        path = recipe.out / "checkpoints"
        if ranks.rank == 0 and not recipe.resume and not restarted:
            checkpoint.clear(path)
        ranks.gather(None)
        state = checkpoint.load(path, engine.load_tensors, same, ranks)
        return {"step": 0, "position": 0, "steps": recipe.steps} | (state or {}) | {"same": same}

    def _open_log(self) -> Log | None:
        recipe, step, planned = self.recipe, self.state["step"], self.state["steps"]
        with self.agreement.noting(recipe.out / "metrics.jsonl"):
            log = Log(recipe, step)
            if step:
                last = ", which was the last: --steps N goes on, --no-resume starts anew"
                log.note(f"resumed after step {step}{last if step >= recipe.steps else ''}")
            if planned != recipe.steps > step:
                before = dataclasses.replace(recipe, steps=planned).learning_rate(step)
                log.note(
                    f"--steps was {planned} and is {recipe.steps}: the learning rate's cosine now ends at step {recipe.steps}, "
                    f"so that step {step + 1} has {recipe.learning_rate(step + 1):.2e} after {before:.2e}"
                )
            return log

    def _record(self, act: Callable[..., None], *args: Any) -> None:
        """Write to the log, on the first rank. Where that fails, what stands in the file stays as it is."""
        log, self.log = self.log, None
        if log is not None:
            with self.agreement.noting(self.recipe.out / "metrics.jsonl"):
                act(log, *args)
                self.log = log

    def _check_finite(self) -> None:
        """Raise ``UsageError``, on every rank, at the first step whose loss or gradient was not finite."""
        if not self.unseen:
            return
        device = self.ranks.device
        sums = torch.stack([each.to(device, torch.float32).reshape(()) for _, each in self.unseen]).tolist()
        for (step, _), value in zip(self.unseen, sums, strict=True):
            if not math.isfinite(value):
                raise UsageError(
                    f"the loss or its gradient is not finite at step {step}: nothing from this step on is stored, "
                    f"{self._newest()}; lower --lr, or look at the data"
                )
        self.unseen.clear()

    def _judge(self, num_batches: int | None = None) -> float:
        """Return the loss on held-out text; raise ``UsageError``, on every rank, if it is not finite."""
        loss = self.engine.validate(self.held_out, num_batches)
        if not math.isfinite(loss):
            raise UsageError(
                f"the weights after step {self.state['step']} give a loss of {loss}: they are not stored, "
                f"{self._newest()}; lower --lr, or look at the data"
            )
        return loss

    def _newest(self) -> str:
        return f"the newest checkpoint is of step {self.stored}" if self.stored else "there is no checkpoint"

    def _store(self, *, is_judged: bool) -> None:
        """Write a checkpoint of weights that give a finite loss."""
        if not is_judged:
            self._judge(num_batches=1)
        path = self.recipe.out / "checkpoints"
        checkpoint.save(path, self.recipe.keep, self.engine.save_tensors, self.state, self.ranks)
        self.stored = self.state["step"]

    def _stop(self, asked: str) -> NoReturn:
        """End the run between two steps, because a signal asks for it."""
        step, how = self.state["step"], "--checkpoint-every 0 keeps nothing"
        if self.recipe.checkpoint_every:
            if step > self.stored:
                self._check_finite()
                self._store(is_judged=False)
            how = "its checkpoint is stored, and the same command goes on" if step else "nothing was done yet"
        raise Stopped(f"stopped by {asked} after step {step}: {how}")

    def _describe(self, step: int, done: Step, tokens: int, seconds: float) -> dict[str, Any]:
        """Return the metrics of a step: ``tokens`` were seen in the last ``seconds``. Every rank calls it."""
        rate = tokens / seconds
        record = {
            "step": step,
            "split": "train",
            "loss": done.loss.item(),
            "lr": self.recipe.learning_rate(step),
            "grad_norm": done.grad_norm.item(),
            "tokens_per_s": rate,
            "peak_mb": self.ranks.peak_mb(),
        }
        peak = peak_flops(self.recipe, self.ranks.device)
        if peak is not None:
            record["mfu"] = rate * flops_per_token(self.recipe.shape) / (peak * self.ranks.world_size)
        return record

    def _finish(self, val_loss: float) -> None:
        """Close the log, draw the curves if this machine can, and say where everything is."""
        if self.log is None:
            return
        recipe = self.recipe
        self.log.close()
        if not math.isnan(val_loss):
            print(f"val loss {val_loss:.4f}, where ln V = {math.log(recipe.shape.vocab_size):.4f}")
        there = ["metrics.jsonl"]
        try:
            plot.draw([recipe.out], recipe.out / "curves.png")
            there.append("curves.png")
        except (ModuleNotFoundError, OSError, ValueError) as error:
            advice = " (pip install matplotlib)" if isinstance(error, ModuleNotFoundError) else ""
            print(f"no figure: {error}{advice}; 'cce-dist plot {recipe.out}' draws it later")
        there += [f"checkpoints/step-{self.stored:08d}"] * bool(self.stored) + ["tensorboard"] * recipe.tensorboard
        print(f"finished: {recipe.out} holds {', '.join(there)}")


def flops_per_token(shape: Shape) -> float:
    """Return the FLOPs of a token's forward and backward pass, recomputation not counted.

    A matrix takes two FLOPs a weight forward and four backward. Causal attention multiplies with half of the sequence on
    average, twice. Source, but for the half: PaLM (Chowdhery et al., 2022, appendix B).
    """
    hidden = shape.hidden_size
    layer = 4 * hidden * hidden + 3 * hidden * shape.num_ffn
    weights = shape.num_layers * layer + hidden * shape.vocab_size
    return 6.0 * weights + 6.0 * shape.num_layers * hidden * shape.seq_len


def peak_flops(recipe: Recipe, device: torch.device) -> float | None:
    """Return a device's FLOP/s at its best; None where nobody knows, such as for a CPU or in fp32."""
    if recipe.peak_tflops is not None:
        return recipe.peak_tflops * 1e12
    if device.type != "cuda" or recipe.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value * 1e12 for part, value in PEAKS.items() if part in name), None)
