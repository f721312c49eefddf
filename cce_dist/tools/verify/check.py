"""One case on one group of ranks: ours against the dense reference in float64, within twice the error of dense PyTorch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import groups, reference
from cce_dist.filter import GradFilter
from cce_dist.loss import TIE, LinearCrossEntropyOutput, linear_cross_entropy
from cce_dist.shard import VocabShard
from cce_dist.tools.verify.cases import Case, Problem

# Rounding that a sum in another order may add, relative to the largest value: a few units in the last place.
EPS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
OWN_ARGUMENTS = ("grad_filter", "sequence_parallel", "input_grad", "workspace_bytes")


class Error(NamedTuple):
    """Largest error of one quantity against the bound that it must keep."""

    quantity: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


def compare(quantity: str, ours: Tensor, baseline: Tensor, truth: Tensor, dtype: torch.dtype) -> Error:
    """max|ours - truth| against 2 max|baseline - truth| + eps max|truth|; non-finite values must be the truth's.

    Source of the rule: flash-attention's and QuACK's tests.
    """
    ours, baseline, truth = (x.detach().double().cpu() for x in (ours, baseline, truth))
    if ours.shape != truth.shape:
        raise AssertionError(f"{quantity} has shape {tuple(ours.shape)}, expected {tuple(truth.shape)}")
    finite = truth.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return Error(quantity, float("inf"), 0.0)
    ours, baseline, truth = ours[finite], baseline[finite], truth[finite]
    if truth.numel() == 0:
        return Error(quantity, 0.0, 0.0)
    noise = (baseline - truth).abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    bound = 2 * noise + EPS[dtype] * truth.abs().max().item()
    return Error(quantity, (ours - truth).abs().max().item(), bound)


def assert_no_worse(
    ours: Tensor, baseline: Tensor, truth: Tensor, dtype: torch.dtype | None = None, quantity: str = "value"
) -> None:
    """Raise AssertionError unless ``compare`` holds; eps is that of ``dtype`` (default: ours')."""
    result = compare(quantity, ours, baseline, truth, dtype or ours.dtype)
    assert result.ok, f"{result.quantity}: error {result.error:.3g} > bound {result.bound:.3g}"


def run_case(
    case: Case, group: dist.ProcessGroup | None, device: str, backend: str = "auto", salt: int = 0
) -> list[Error]:
    """Run a case on the ranks of ``group`` (None: this process alone); every rank calls it. ``salt`` varies the data.

    Compares loss, aux outputs and gradients; then bits over ranks, of a second run and of a second backward.
    """
    backend = ("torch" if device == "cpu" else "triton") if backend == "auto" else backend
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + salt)
    problem = rounded(case.problem(generator), case.dtype)
    num_tokens, vocab_size = len(problem.labels), problem.weight.shape[0]
    upstream = None if case.upstream is None else case.upstream(generator, num_tokens)
    bounds = case.shards(vocab_size, ranks)
    truth = _expected(case, problem, upstream, bounds, torch.float64, device)
    baseline = _expected(case, problem, upstream, bounds, torch.bfloat16 if case.autocast else case.dtype, device)

    shard = VocabShard(*bounds[rank], vocab_size, group)
    run = partial(_ours, case, problem, upstream, shard, rank, device, backend)
    first = run()
    dtype = torch.bfloat16 if case.autocast else case.dtype
    errors = []
    for name, ours in first.items():
        filtered = f"plain {name}" in truth
        expected = [baseline[name], truth[name]]
        if filtered:
            expected += [truth[f"plain {name}"], baseline[f"filtered {name}"], truth[f"filtered {name}"]]
        padding, ours, expected = of_rank(name, ours, expected, case.options, shard)
        errors += padding
        if name == "label_is_max":
            errors.append(_wrong_ties(ours, truth, baseline))
            continue
        held_in = dtype if name in ("dE", "dC", "dbias") else torch.float32
        if filtered:
            errors += _filter_errors(name, ours, *expected[:3], case)
            if backend == "torch" and name != "dbias":  # the definition, where dbias is exact
                errors.append(compare(f"{name} as defined", ours, expected[3], expected[4], held_in))
            continue
        errors.append(compare(name, ours, expected[0], expected[1], held_in))
    return errors + same_bits(first, run, further_runs(device), ("loss",), group)


def further_runs(device: str) -> int:
    """Return how often a case runs after its first run. On a GPU the second run is recorded and the third one replayed."""
    return 2 if device == "cuda" else 1


def of_rank(
    name: str, ours: Tensor, wholes: list[Tensor], options: dict, shard: VocabShard
) -> tuple[list[Error], Tensor, list[Tensor]]:
    """Bring a value of this rank and whole ones to one shape; gradients of padding must be exactly 0."""
    if name in ("dC", "dbias"):
        rows = slice(shard.start, shard.start + shard.num_valid)
        padding = Error(f"{name} of padding", ours[shard.num_valid :].abs().sum().item(), 0.0)
        return [padding], ours[: shard.num_valid], [whole[rows] for whole in wholes]
    if name == "dE" and shard.group is not None:
        if options.get("sequence_parallel"):
            wholes = [whole.chunk(shard.group_size)[shard.group.rank()] for whole in wholes]
        if options.get("input_grad") == "partial":
            ours = ours.double()
            dist.all_reduce(ours, group=shard.group)
    return [], ours, wholes


def gradients_twice(objective: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients, after checking that a second backward has their bits."""
    first, second = (torch.autograd.grad(objective, inputs, retain_graph=again) for again in (True, False))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True)), "second backward differs"
    return first


def same_bits(
    first: dict[str, Tensor], run: Callable[[], dict[str, Tensor]], runs: int, shared: Iterable[str],
    group: dist.ProcessGroup | None,
) -> list[Error]:  # fmt: skip
    """Count the values whose bits differ in further runs, and those of ``shared`` whose bits differ on a rank of ``group``."""
    errors = []
    for number in range(runs):
        again = run()
        differ = sum(not torch.equal(bits(first[name]), bits(again[name])) for name in first)
        errors.append(Error(f"bits of run {number + 2}", float(differ), 0.0))
        del again  # or the next run's tensors would be somewhere else
    if group is not None:
        differ = 0
        for ours in (first[name].contiguous() for name in shared):
            everyone = [torch.empty_like(ours) for _ in range(group.size())]
            dist.all_gather(everyone, ours, group=group)
            differ += sum(not torch.equal(bits(theirs), bits(ours)) for theirs in everyone)
        errors.append(Error("bits over ranks", float(differ), 0.0))
    return errors


def _wrong_ties(ours: Tensor, truth: dict[str, Tensor], baseline: dict[str, Tensor]) -> Error:
    """Tokens that are wrongly said to have their label on top, or not, though the two logits differ by more than rounding."""
    largest, at_label = truth["max_logit"], truth["target_logit"]
    noise = (baseline["max_logit"] - largest).abs().nan_to_num(0.0, 0.0, 0.0).max() if largest.numel() else 0.0
    close = (largest - at_label).abs() <= 2 * noise + 4 * TIE * largest.abs().clamp(min=1)
    wrong = (ours != truth["label_is_max"]) & ~close & largest.isfinite() & at_label.isfinite()
    return Error("label_is_max", float(wrong.sum()), 0.0)


def _filter_errors(name: str, ours: Tensor, baseline: Tensor, truth: Tensor, plain: Tensor, case: Case) -> list[Error]:
    """Norms of what a filter changed, and for dE of its sum over tokens, against those of the plain filter of elements.

    With compensation half of dE's error must be gone (a quarter of it where tokens weigh differently), a quarter of dC's, and
    nearly all of the sum's.
    """
    grad_filter = case.options["grad_filter"]
    filtered = grad_filter.hidden if name == "dE" else grad_filter.weight

    def error(quantity: str, over: Callable[[Tensor], Tensor], part: float) -> Error:
        got, exact, rounded, dropped = (over(x.double().cpu()) for x in (ours, truth, baseline, plain))
        noise = 2 * (rounded - exact).norm() + EPS[case.dtype] * exact.norm()
        bound = part * filtered * (dropped - exact).norm() + noise
        return Error(quantity, (got - exact).norm().item(), bound.item())

    left = 0.5 if case.upstream is None and name == "dE" else 0.75
    errors = [error(name, lambda x: x, left if grad_filter.compensate else 1.0)]
    whole_batch = case.upstream is None and not case.options.get("sequence_parallel")
    if name == "dE" and grad_filter.compensate and whole_batch:
        errors.append(error("sum of dE", lambda x: x.sum(0), 0.02))
    return errors


def rounded(problem: Problem, dtype: torch.dtype) -> Problem:
    """The data as the tested dtype holds it, so that the truth is the truth of the same numbers."""
    bias = None if problem.bias is None else problem.bias.to(dtype).double()
    return Problem(problem.hidden.to(dtype).double(), problem.weight.to(dtype).double(), problem.labels, bias)


def _objective(case: Case, out: LinearCrossEntropyOutput, upstream: Tensor | None) -> Tensor:
    loss = out.loss if upstream is None else out.loss * upstream
    if case.objective == "loss":
        return loss.sum()
    assert out.entropy is not None
    return (
        loss.sum()
        + (out.nll + 0.3 * out.lse.sin() + 0.5 * out.target_logit - 0.7 * out.entropy + 0.2 * out.z_loss).sum()
    )


def _expected(
    case: Case, problem: Problem, upstream: Tensor | None, bounds: list, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Loss, aux outputs and gradients of the dense reference in a dtype."""
    hidden, weight, labels, bias = _tensors(case, problem, dtype, device)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    options = {name: value for name, value in case.options.items() if name not in OWN_ARGUMENTS}
    out = reference.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, **options)
    if upstream is not None:
        upstream = upstream.to(device, out.loss.dtype).view(out.loss.shape)
    grads = torch.autograd.grad(_objective(case, out, upstream), inputs)
    values = {name: value for name, value in out._asdict().items() if value is not None}
    values |= zip(("dE", "dC", "dbias"), grads, strict=False)
    grad_filter = case.options.get("grad_filter")
    if grad_filter is not None and grad_filter.eps > 0 and case.objective == "loss":
        mean = torch.full_like(labels, 1, dtype=out.loss.dtype) / (labels != -100).sum()
        how = {name: options[name] for name in ("label_smoothing", "softcap", "z_loss_weight") if name in options}
        # An element that is within rounding of the threshold may be dropped.
        plain = GradFilter(grad_filter.eps * (1 + 1e-4), compensate=False)
        for kind, of in (("plain", plain), ("filtered", grad_filter)):
            filtered = reference.filtered_gradients(
                hidden, weight, labels, mean if upstream is None else upstream, of, [start for start, _ in bounds],
                linear_bias=bias, **how,
            )  # fmt: skip
            values |= zip((f"{kind} dE", f"{kind} dC", f"{kind} dbias"), filtered, strict=True)
    return values


def _ours(
    case: Case, problem: Problem, upstream: Tensor | None, shard: VocabShard, rank: int, device: str, backend: str
) -> dict[str, Tensor]:
    """The same from ``linear_cross_entropy`` on this rank's shard, after checking a second backward."""
    hidden, weight, labels, bias = _tensors(case, problem, case.dtype, device)
    weight, bias = local_rows(weight, shard), None if bias is None else local_rows(bias, shard)
    if case.options.get("sequence_parallel"):
        hidden = hidden.chunk(shard.group_size)[rank].contiguous()
    if case.noncontiguous:
        hidden = hidden.t().contiguous().t()
    hidden.requires_grad_()
    aux = not case.in_groups  # a group's gradients are made in forward, before those of other outputs are known
    # What the buffer holds before is of dC's own size, so that adding to it rounds no more than dC is rounded.
    before = 2.0**-12
    out_buffer = torch.full(weight.shape, before, device=device) if case.accumulate else None
    with (
        groups.of_rows(case.in_groups or None, low=True),
        torch.autocast(device, torch.bfloat16, enabled=case.autocast),
    ):
        out: Any = linear_cross_entropy(
            hidden, weight, labels, linear_bias=bias, shard=shard, return_aux=aux, backend=backend,
            grad_weight_out=out_buffer, **case.options,
        )  # fmt: skip
    if case.in_groups:
        out = LinearCrossEntropyOutput(out, *[None] * (len(LinearCrossEntropyOutput._fields) - 1))  # type: ignore[arg-type]
    if upstream is not None:
        upstream = upstream.to(device, torch.float32).view(out.loss.shape)
    objective = _objective(case, out, upstream)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    if out_buffer is None:
        grads = gradients_twice(objective, inputs)
    else:
        grads = torch.autograd.grad(objective, inputs, allow_unused=True)
        assert grads[1] is None, "a gradient was returned beside grad_weight_out"
        grads = (grads[0], out_buffer - before, *grads[2:])
    values: dict[str, Tensor] = {n: value.detach() for n, value in out._asdict().items() if isinstance(value, Tensor)}
    return values | dict(zip(("dE", "dC", "dbias"), grads, strict=False))


def _tensors(case: Case, problem: Problem, dtype: torch.dtype, device: str) -> tuple:
    (hidden, weight, bias), labels = problem.tensors(dtype, device), problem.labels.to(device)
    if case.shape is not None:
        hidden, labels = hidden.view(*case.shape, -1), labels.view(case.shape)
    return hidden, weight, labels, bias


def local_rows(whole: Tensor, shard: VocabShard) -> Tensor:
    """This rank's rows of a weight or bias, to be differentiated; padding rows hold something."""
    rows = whole.new_full((shard.num_rows, *whole.shape[1:]), 3.0)
    rows[: shard.num_valid] = whole[shard.start : min(shard.stop, shard.vocab_size)]
    return rows.requires_grad_()


def bits(x: Tensor) -> Tensor:
    """Comparable where NaN is."""
    return x.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
