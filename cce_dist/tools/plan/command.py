"""The command line of ``cce-dist plan``: from flags to a plan, and a plan as tables, JSON and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from cce_dist.tools.arguments import figure, whole, wholes
from cce_dist.tools.plan.devices import DEVICES, Device, measure
from cce_dist.tools.plan.layers import RANKS, RECOMPUTE, Layout
from cce_dist.tools.plan.planning import GLOBAL_TOKENS, LOSSES, METHODS, MIB, VOCAB_MULTIPLE, Plan, grow, plan
from cce_dist.tools.plan.sizes import MODELS, Model, named, read_config
from cce_dist.tools.report import OURS_COLOR, picture, table

# By item: weights and optimizer in greys, activations in browns, the head in blues.
COLORS = {
    "weights": "#c9ced6",
    "main_grad": "#aab2bd",
    "gradients": "#aab2bd",
    "optimizer": "#8b95a3",
    "activations": "#d9b382",
    "hidden states": "#c98f52",
    "head's gradient": "#9ec5e8",
    "statistics": "#6ba7db",
    "lists": "#3f86c6",
    "workspace": OURS_COLOR,
}
HEAD_COLOR, LAYER_COLOR = OURS_COLOR, "#d9b382"
BY_HAND = ("hidden_size", "vocab_size", "num_layers", "num_heads", "ffn_size")  # sizes without a default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model: a name, a config.json, or sizes, which override those of a name")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    which.add_argument("--models", nargs="+", metavar="NAME", help="print only the largest batch of each model")
    which.add_argument("--config", type=Path, metavar="FILE", help="config.json of Hugging Face, or its folder")
    for name in (*BY_HAND, "num_kv_heads", "head_size"):
        model.add_argument(f"--{name.replace('_', '-')}", type=whole(), metavar="N")

    layout = parser.add_argument_group("layout")
    layout.add_argument("--tokens", type=whole(), default=8192, metavar="N", help="tokens of a sequence")
    layout.add_argument("--micro-batch", type=whole(), default=1, metavar="B", help="sequences of a microbatch")
    for name, what in RANKS.items():
        layout.add_argument(f"--{name}", type=whole(), default=1, help=what)
    layout.add_argument("--zero-stage", type=int, choices=range(4), default=1, help="what data-parallel ranks split")
    layout.add_argument("--no-sequence-parallel", action="store_true", help="activations are whole on every rank")
    layout.add_argument("--recompute", choices=RECOMPUTE, default="none", help="recompute layers' activations")
    layout.add_argument("--eager", action="store_true", help="add the time of elementwise kernels in plain torch")
    layout.add_argument("--attention", action="store_true", help="add attention's products of queries and keys")
    layout.add_argument("--framework", choices=METHODS, default="megatron", help="compare with this framework's losses")
    layout.add_argument("--workspace", type=whole(), metavar="MIB", help="budget of our losses (default: their choice)")

    where = parser.add_argument_group("device")
    where.add_argument("--gpu", default="h200", metavar="GPU", help=f"one of {', '.join(DEVICES)}")
    where.add_argument("--measure", action="store_true", help="measure this machine's GPU instead")

    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--scale", type=wholes, default=(), metavar="G,G", help="predict a step on G GPUs each")
    shown.add_argument("--loss", choices=LOSSES, help="with --scale: only this loss")
    shown.add_argument("--global-tokens", type=whole(), default=GLOBAL_TOKENS, metavar="N", help="of a step of --scale")
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument("--picture", type=figure, metavar="PNG", help="draw the last stage's memory and the cut")


def run(args: argparse.Namespace) -> int:
    """Print a plan. Returns the exit code. A user's mistake is reported in one line."""
    if args.picture:
        import matplotlib  # noqa: F401 - if it is missing, say so before any work
    try:
        device = measure() if args.measure else named(DEVICES, args.gpu, "GPU")
        workspace = args.workspace and args.workspace << 20
        if args.models:
            if args.json or args.picture or args.scale:
                raise ValueError("--models prints one table; leave out --json, --picture and --scale")
            print("\n".join(table([_batches(args, name, device, workspace) for name in args.models])))
            return 0
        model, layout = _model_and_layout(args)
        found = plan(model, layout, device, workspace)
        steps = grow(model, layout, device, args.scale, workspace, args.global_tokens)
        steps = [step for step in steps if args.loss in (None, step["loss"])]
        title = args.model or (args.config and args.config.name) or "sizes by hand"
        if args.json:
            print(json.dumps(found.record() | {"scale": steps}, indent=1))
        else:
            print("\n\n".join(_text(found, title, args.workspace, steps)))
        if args.picture:
            draw(args.picture, found, title)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print(f"cce-dist {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"cce-dist plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _model_and_layout(args: argparse.Namespace) -> tuple[Model, Layout]:
    if args.tokens % args.cp:
        raise ValueError(f"--tokens {args.tokens} cannot be split over --cp {args.cp} ranks")
    layout = Layout(
        **{name: getattr(args, name) for name in (*RANKS, "recompute", "zero_stage", "framework")},
        sequence_parallel=not args.no_sequence_parallel,
        num_tokens=args.tokens // args.cp * args.micro_batch,
        seq_len=args.tokens if args.attention else 0,
        elementwise=1.0 if args.eager else 0.0,
    )
    return _model(args), layout


def _model(args: argparse.Namespace) -> Model:
    sizes = {name: getattr(args, name) for name in (*BY_HAND, "num_kv_heads", "head_size")}
    given = {name: value for name, value in sizes.items() if value is not None}
    if args.config:
        if given:
            raise ValueError(f"--config has its own sizes; leave out --{min(given).replace('_', '-')}")
        try:
            return read_config(args.config)
        except (OSError, ValueError) as error:
            raise ValueError(f"--config {args.config}: {getattr(error, 'strerror', None) or error}") from error
    if args.model:
        return dataclasses.replace(named(MODELS, args.model, "model"), **given)
    missing = [f"--{name.replace('_', '-')}" for name in BY_HAND if name not in given]
    if missing:
        raise ValueError(f"no model: --model, --config, or sizes by hand; missing {', '.join(missing)}")
    return Model(**given)


def _batches(args: argparse.Namespace, name: str, device: Device, workspace: int | None) -> dict[str, str]:
    """Return the row of a model: the largest batch, in tokens on all GPUs, that fits with each loss."""
    args = argparse.Namespace(**vars(args) | {"model": name})
    found = plan(*_model_and_layout(args), device, workspace)
    ranks = found.layout.dp * found.layout.cp
    batches = {each.loss: each.largest_tokens * ranks for each in found.losses}
    row = {"model": name, "parameters": f"{found.model.params / 1e9:.2f} B"}
    row |= {loss: f"{batch:,}" for loss, batch in batches.items()}
    for loss in ("dense", "fused"):
        row[f"budget / {loss}"] = f"{batches['budget'] / batches[loss]:.1f}" if batches[loss] else "-"
    return row


def _text(found: Plan, title: str, workspace: int | None, steps: list[dict[str, Any]]) -> list[str]:
    layout, layer, device = found.layout, found.layer, found.device
    splits = ", ".join(f"{name} {getattr(layout, name)}" for name in RANKS)
    vocabulary = f"a vocabulary of {found.given_vocab_size:,}"
    if found.model.vocab_size > found.given_vocab_size:
        vocabulary += f", which Megatron pads to {found.model.vocab_size:,}, a multiple of {VOCAB_MULTIPLE} x tp"
    parts = [
        f"{title}: {found.model.params / 1e9:.2f} B parameters; {layout.num_tokens:,} tokens a microbatch; {splits}; ZeRO "
        f"{layout.zero_stage}; {layout.num_gpus} GPUs\n{vocabulary}\n"
        f"{device.name}: {device.flops / 1e12:.0f} Tflop/s, {device.bandwidth / 1e12:.1f} TB/s, "
        f"{device.memory / 2**30:.0f} GiB; {device.bus / 1e9:.0f} GB/s in a node, {device.network / 1e9:.0f} GB/s "
        f"between nodes ({device.provenance})\n"
        f"a layer: {found.model.layer_params / 1e6:.1f} M parameters, {layer.seconds * 1e3:.2f} ms, "
        f"{layer.collectives * 1e3:.2f} of them collectives; the body: {found.body * 1e3:.1f} ms",
        "\n".join(table([_row(found, each, workspace) for each in found.losses])),
        "Last stage at its peak, MiB:\n" + "\n".join(table(_memory(found))),
    ]
    if layout.pp > 1:
        parts.append("Cut to use:\n" + "\n".join(_cuts(found)))
    if steps:
        what = "The same batch on more GPUs; exposed: ms of communication that no computation overlaps:"
        parts.append("\n".join([what, *table([_scaled(step) for step in steps])]))
    peaks = {each.loss: f"{sum(each.last_stage.values()) / MIB / 1024:,.1f} GiB" for each in found.losses}
    return [*parts, f"a step of {layout.num_tokens:,} tokens: stock {peaks['dense']}, this {peaks['budget']}"]


def _row(found: Plan, each: Any, workspace: int | None) -> dict[str, str]:
    cost = each.cost
    exposed = sum(one.exposed for one in cost.collectives)
    row = {
        "loss": f"{each.loss} ({cost.loss})" if each.loss in ("dense", "fused") else each.loss,
        "ms": f"{cost.seconds * 1e3:.2f}" + (f" to {cost.at_most * 1e3:.2f}" if cost.at_most > cost.seconds else ""),
        "exposed ms": f"{exposed * 1e3:.2f}",
        "layers": f"{each.layers:.2f}",
        "MiB": f"{cost.workspace / MIB:,.0f}",
    }
    if each.loss == "budget":
        row["loss"] = f"budget ({f'{workspace} MiB' if workspace else 'default'})"
    if found.layout.pp == 1:
        row["body + head ms"] = f"{(found.body + cost.seconds) * 1e3:.1f}"
    else:
        row["imbalance, even cut"] = f"{each.default_cut.imbalance:.1%}"
        row["best cut"] = f"{each.cut.imbalance:.1%}"
    return row | {"largest microbatch": f"{each.largest_tokens:,}" if each.largest_tokens else "none fits"}


def _memory(found: Plan) -> list[dict[str, str]]:
    rows = []
    present = [item for item in COLORS if any(each.last_stage.get(item) for each in found.losses)]
    for item in present:
        sizes = {each.loss: f"{each.last_stage.get(item, 0) / MIB:,.0f}" for each in found.losses}
        rows.append({"item": item, **sizes})
    for name, stage in (("sum", "last_stage"), ("first stage, sum", "first_stage")):
        if name == "sum" or found.layout.pp > 1:
            sums = {each.loss: f"{sum(getattr(each, stage).values()) / MIB:,.0f}" for each in found.losses}
            rows.append({"item": name, **sums})
    return rows


def _cuts(found: Plan) -> list[str]:
    lines = []
    for each in found.losses:
        advice = each.cut.advice(found.layout)
        last = advice["decoder_last_pipeline_num_layers"]
        lines.append(f"  {each.loss}: {', '.join(map(str, each.cut.layers))} layers")
        lines.append(f"    Megatron    --pipeline-model-parallel-layout '{advice['pipeline_model_parallel_layout']}'")
        if last is not None:
            lines.append(f"    or          --decoder-last-pipeline-num-layers {last}")
        if "deepspeed_weights" in advice:
            runs = [(weight, len(list(same))) for weight, same in groupby(advice["deepspeed_weights"])]
            weights = " + ".join(f"[{weight}] * {count}" for weight, count in runs)
            lines.append(f"    DeepSpeed   layer_weights({weights}): embedding, layers, head")
        titan = {name: value for name, value in advice.items() if name.startswith("pipeline_parallel_")}
        lines.append("    torchtitan  " + ", ".join(f"{name} = {value}" for name, value in titan.items()))
    return lines


def _scaled(step: dict[str, Any]) -> dict[str, str]:
    return {
        "GPUs": f"{step['gpus']:,}",
        "tp x pp x dp": f"{step['tp']} x {step['pp']} x {step['dp']}",
        "microbatches": str(step["microbatches"]),
        "loss": step["loss"],
        "head ms": f"{step['head_ms']:.2f}",
        "head exposed": f"{step['head_exposed_ms']:.2f}",
        "layers exposed": f"{step['layers_exposed_ms']:.2f}",
        "gradients exposed": f"{step['gradients_exposed_ms']:.1f}",
        "bubble": f"{step['bubble']:.1%}",
        "step ms": f"{step['step_ms']:,.0f}",
        "tokens/s": f"{step['tokens_per_second']:,.0f}",
    }


def draw(path: Path, found: Plan, title: str) -> None:
    """Write the picture; needs matplotlib."""
    layout = found.layout
    cut_rows = len(found.losses) + 1 if layout.pp > 1 else 0
    height = 1.2 + 0.42 * len(found.losses) + (0.8 + 0.42 * cut_rows if cut_rows else 0)
    heading = (
        f"{title}, {layout.num_tokens:,} tokens, tp {layout.tp}, pp {layout.pp}, dp {layout.dp}; {found.device.name}"
    )
    with picture(path, heading, (9.5, height)) as figure:
        if not cut_rows:
            _bars(figure.subplots(), found)
            return
        above, below = figure.subplots(2, 1, height_ratios=[len(found.losses), cut_rows])
        _bars(above, found)
        _stages(below, found)


def _bars(axis: Any, found: Plan) -> None:
    losses = found.losses
    names = [each.loss for each in losses]
    left = [0.0] * len(losses)
    for item, color in COLORS.items():
        widths = [each.last_stage.get(item, 0) / MIB / 1024 for each in losses]
        if any(widths):
            axis.barh(names, widths, left=left, color=color, height=0.7, label=item)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for position, total in enumerate(left):
        axis.text(total * 1.01, position, f"{total:.1f}", va="center", fontsize=7)
    axis.set_xlim(0, max(left) * 1.08)
    axis.invert_yaxis()
    axis.set_xlabel("last stage at its peak, GiB", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _stages(axis: Any, found: Plan) -> None:
    """Draw a row for each cut, with the stages' times from left to right."""
    fused = next(each for each in found.losses if each.loss == "fused")
    rows = [("fused, even cut", fused, fused.default_cut)]
    rows += [(f"{each.loss}, best cut", each, each.cut) for each in found.losses]
    slot = 1.04 * max(max(cut.seconds) for _, _, cut in rows)
    pp = found.layout.pp
    for position, (_, each, cut) in enumerate(rows):
        for rank, seconds in enumerate(cut.seconds):
            layers = sum(cut.layers[rank::pp])
            head = each.cost.seconds if rank == pp - 1 else 0.0
            start, body = rank * slot, seconds - head
            axis.barh(position, body, left=start, color=LAYER_COLOR, edgecolor="white", height=0.7)
            axis.text(start + body / 2, position, str(layers or ""), ha="center", va="center", fontsize=7)
            if head:
                axis.barh(position, head, left=start + body, color=HEAD_COLOR, edgecolor="white", height=0.7)
        # A line in each slot shows the slowest stage, for which all others wait.
        for rank in range(pp):
            end = rank * slot + max(cut.seconds)
            axis.plot([end, end], [position - 0.4, position + 0.4], color="black", linewidth=0.8)
        axis.text(pp * slot, position, f" mean + {cut.imbalance:.0%}", va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.set_xticks([(rank + 0.5) * slot for rank in range(pp)], [f"stage {rank + 1}" for rank in range(pp)])
    axis.set_xlim(0, (pp + 0.35) * slot)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8, length=0)
    axis.set_xlabel("time of a microbatch: layers (their number), then the head; lines: the slowest stage", fontsize=8)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
