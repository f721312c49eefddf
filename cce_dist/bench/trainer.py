"""Time Hugging Face's Trainer with a real head on a small body: ``python -m cce_dist.bench.trainer``.

Each head and way trains in a process of its own, because Liger changes classes for good. Liger's other kernels are off. The
softmax of weights as they were drawn is flat: a filter's row is the best case, not a promise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from itertools import product
from typing import Any

import torch

from cce_dist.report import describe, table

HEADS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": dict(
        kind="Llama",
        hidden_size=4096,
        vocab_size=128_256,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Gemma-2-2B": dict(
        kind="Gemma2",
        hidden_size=2304,
        vocab_size=256_000,
        intermediate_size=9216,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        final_logit_softcapping=30.0,
        attn_implementation="eager",
    ),
    "tiny": dict(
        kind="Llama",
        hidden_size=32,
        vocab_size=512,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}
WAYS: dict[str, dict[str, Any] | None] = {  # options of cce_dist.convert; None: the model's own loss, or Liger's
    "stock": None,
    "liger": None,
    "cce-dist": {},
    "cce-dist, 4 GiB budget": {"workspace_bytes": 4 << 30},
    "cce-dist, filtered": {"filter": "compensated"},
}
COLUMNS = ("head", "way", "tokens_per_second", "step_ms", "peak_mib", "loss")


def model_of(head: str, device: str) -> Any:
    """Return a model of two layers in bf16, drawn on the device."""
    import transformers

    sizes = {"attn_implementation": "sdpa", **HEADS[head], "num_hidden_layers": 2, "use_cache": False}
    kind = sizes.pop("kind")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device(device):
        return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)


def measure(head: str, way: str, batch: int, length: int, steps: int) -> dict[str, Any]:
    """Train, and return the median tokens per second, the peak of memory in MiB and the last loss, or why there is none."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import cce_dist

    class Clock(TrainerCallback):
        """The times at which steps end; memory is counted from the second step."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
                if not self.ends:
                    torch.cuda.reset_peak_memory_stats()
            self.ends.append(time.perf_counter())

    on_gpu = torch.cuda.is_available()
    transformers.logging.set_verbosity_error()
    model = model_of(head, "cuda" if on_gpu else "cpu")
    options = WAYS[way]
    if options is not None:
        cce_dist.convert(model, **options)
    ids = torch.randint(HEADS[head]["vocab_size"], (batch * steps, length), generator=torch.Generator().manual_seed(0))
    others = ("rope", "rms_norm", "cross_entropy", "swiglu" if HEADS[head]["kind"] == "Llama" else "geglu")
    liger = {**dict.fromkeys(others, False), "fused_linear_cross_entropy": True}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=steps,
            bf16=on_gpu,
            optim="sgd",
            learning_rate=1e-4,
            max_grad_norm=0.0,
            logging_steps=steps,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_liger_kernel=way == "liger",
            liger_kernel_config=liger if way == "liger" else None,
            use_cpu=not on_gpu,
        )
        data: Any = [{"input_ids": x, "labels": x} for x in ids]
        trainer = Trainer(model, args, train_dataset=data, callbacks=[clock])
        trainer.train()
    if options is not None:
        cce_dist.require(model)
    seconds = statistics.median(b - a for a, b in zip(clock.ends[1:], clock.ends[2:], strict=False))
    return {
        "head": head,
        "way": way,
        "tokens_per_second": round(batch * length / seconds),
        "step_ms": round(1000 * seconds, 1),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else None,
        "loss": round(trainer.state.log_history[0]["loss"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["Llama-3-8B", "Gemma-2-2B"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", help="a JSON file for the rows")
    args = parser.parse_args()
    rows = []
    # A process that ends after one task, so that no way meets the classes that another one changed.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for head, way in product(args.heads, args.ways):
            try:
                rows.append(pool.apply(measure, (head, way, args.batch, args.length, args.steps)))
            except Exception as error:
                rows.append({"head": head, "way": way, "loss": describe(error)})
            print(f"{head}, {way}: done", file=sys.stderr)
    print("\n".join(table([{column: str(row.get(column, "-")) for column in COLUMNS} for row in rows])))
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        with open(args.out, "w") as file:
            json.dump({"device": device, "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
