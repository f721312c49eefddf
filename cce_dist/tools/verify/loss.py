"""``linear_cross_entropy`` in verify: how a case is drawn, called and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cce_dist import groups, objectives, reference
from cce_dist.filter import GradFilter
from cce_dist.given import TIE
from cce_dist.loss import linear_cross_entropy
from cce_dist.shard import VocabShard
from cce_dist.tools.verify import check, oracle
from cce_dist.tools.verify.cases import FP32, PER_TOKEN, Bounds, Drawn, Gaussian, LossCase, Problem, Truth
from cce_dist.tools.verify.check import EPS, GRADIENTS, Error, Function, Part, compare, found, view_of

TOKEN_LOSSES = {"dft": objectives.dft(), "policy": objectives.clipped_policy(entropy_coef=0.1)}
UNSAFE = 1000.0  # a dense fp32 baseline with an error of this many eps is itself wrong
# Arguments that the reference does not have.
OWN = ("grad_filter", "sequence_parallel", "input_grad", "workspace_bytes", "return_aux", "reduce_dtype")


def draw(case: LossCase, generator: torch.Generator) -> Drawn:
    problem, options = check.draw_problem(case, generator), dict(case.options)
    of_tokens = tuple(problem.labels.shape)
    shapes = dict.fromkeys(PER_TOKEN, of_tokens) | {"loss": () if case.is_reduced else of_tokens}
    upstream = check.draw_upstream(case, shapes, generator)
    if case.classes:
        weights = torch.rand(len(problem.weight), generator=generator)
        options["weight"] = weights.masked_fill(weights < 0.05, 0.0)
    if case.token_loss:
        options["token_loss"] = TOKEN_LOSSES[case.token_loss]
        ignored = problem.labels == options.get("ignore_index", -100)
        numbers = torch.randn(2, *of_tokens, generator=generator).masked_fill(ignored, torch.nan)
        options["token_inputs"] = (numbers[0], -numbers[1].abs()) if case.token_loss == "policy" else ()
    return Drawn(case, problem, options, upstream)


def reference_of(drawn: Drawn, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return outputs and gradients of the dense reference; dE is [N, D], whatever the shape of the input."""
    labels, options, upstream = drawn.on(device)
    leaves = check.leaves_of(drawn.case, drawn.problem, dtype, device)
    hidden, weight, bias = leaves.values()
    scale = options.pop("logit_scale", 1.0)
    wide = torch.promote_types(dtype, FP32)
    leaves["dscale"] = torch.tensor(float(scale), device=device, dtype=wide, requires_grad=True)
    ignore_index = options.pop("ignore_index", -100)  # any id may be ignored; dense PyTorch gathers with it
    labels = labels.masked_fill(labels == ignore_index, -100)
    known = {name: value for name, value in options.items() if name not in OWN}
    out = reference.linear_cross_entropy(
        hidden, weight, labels, linear_bias=bias, logit_scale=leaves["dscale"], **known
    )
    return found(out._asdict(), upstream, leaves)


def _truth(drawn: Drawn, bounds: Bounds, backend: str, device: str) -> Truth:
    """Return the truth for a case of the table: the reference in float64, also of filtered gradients."""
    values = reference_of(drawn, torch.float64, device)
    grad_filter = drawn.options.get("grad_filter", GradFilter(eps=0.0))
    if grad_filter.eps == 0 or drawn.case.upstream != ("loss",):
        return Truth(values)

    def filtered(of: GradFilter, dtype: torch.dtype) -> dict[str, Tensor]:
        hidden, weight, bias = check.leaves_of(drawn.case, drawn.problem, dtype, device).values()
        labels, options, upstream = drawn.on(device)
        known = {name: options[name] for name in ("label_smoothing", "softcap", "z_loss_weight") if name in options}
        counted = (labels != -100).sum() if drawn.case.is_reduced else 1
        coefs = (upstream["loss"] / counted).to(torch.promote_types(dtype, FP32)).expand(labels.shape)
        starts = [start for start, _ in bounds]
        gradients = reference.filtered_gradients(hidden, weight, labels, coefs, of, starts, linear_bias=bias, **known)
        return dict(zip(GRADIENTS, gradients, strict=False))

    # An element that is within rounding of the threshold may be dropped.
    plain = filtered(GradFilter(grad_filter.eps * (1 + 1e-4), compensate=False), torch.float64)
    if backend != "torch":
        return Truth(values, plain)
    rough, exact = filtered(grad_filter, drawn.case.dtype), filtered(grad_filter, torch.float64)
    return Truth(values, plain, {name: (rough[name], exact[name]) for name in ("dE", "dC")})


def _oracle(drawn: Drawn, bounds: Bounds, backend: str, device: str) -> Truth:
    """Return the truth for a random case: formulas written out by hand."""
    grad_filter = drawn.options.get("grad_filter", GradFilter(eps=0.0))
    bounds = bounds if len(bounds) > 1 else []
    problem = drawn.problem.rounded(drawn.case.dtype, FP32) if drawn.case.autocast else drawn.problem
    truth = oracle.truth(problem, drawn.options, drawn.upstream, grad_filter.eps, bounds)
    if not drawn.case.token_loss:
        return truth
    # The function multiplies the rounding of nll by its derivatives.
    noise = {name: 3 * value for name, value in truth.noise.items()}
    return replace(truth, values=reference_of(drawn, torch.float64, device), noise=noise)


def call(drawn: Drawn, shard: VocabShard, backend: Any, device: str) -> dict[str, Tensor]:
    """Make the call; return its outputs, dE of this rank's slice, dC and dbias of its rows."""
    case = drawn.case
    labels, options, upstream = drawn.on(device)
    shape = labels.shape if case.shape is None else case.shape
    labels = view_of(labels.view(shape).to(case.ids), case.layout("target"))
    leaves = check.local_leaves(case, _tokens(drawn), device, shard)
    hidden, weight, bias = leaves.values()
    buffer = scale = held_before = None
    if case.buffer is not None:
        full = torch.full(weight.shape, drawn.before, device=device, dtype=case.buffer)
        buffer = view_of(full, case.layout("grad_weight_out"))
        held_before = buffer.double()
    if case.num_tokens is not None:
        number = torch.tensor(options["num_tokens"], device=device, dtype=case.num_tokens)
        options["num_tokens"] = view_of(number, case.layout("num_tokens"))
    if case.learn_scale:
        scale = torch.tensor(float(options.get("logit_scale", 1.0)), device=device, requires_grad=True)
        options["logit_scale"] = scale
    if case.expected:
        expected = upstream["loss"].view(labels.shape)
        options["expected_weights"] = 3.0 * expected if case.expected == "upstream" else expected.abs() + 0.1
    if case.token_loss:
        options["token_inputs"] = [values.view(labels.shape) for values in options["token_inputs"]]
    with groups.of_rows(case.in_groups, case.low), torch.autocast(device, case.dtype, enabled=case.autocast):
        out = linear_cross_entropy(
            hidden, weight, labels, linear_bias=bias, shard=shard, backend=backend, grad_weight_out=buffer, **options
        )
    outputs = {"loss": out} if isinstance(out, Tensor) else out._asdict()
    if len(outputs) > 1 and any(outputs[name].shape != labels.shape for name in PER_TOKEN):
        raise AssertionError(f"an auxiliary output has another shape than {tuple(labels.shape)}: {out}")
    leaves["dscale"] = scale
    values = found(outputs, upstream, leaves, case, elsewhere="" if buffer is None else "dC")
    if buffer is not None and held_before is not None:
        values["dC"] = buffer.double() - held_before
    return values


def _tokens(drawn: Drawn) -> Problem:
    """Return the problem with the values that must not matter."""
    case, hidden = drawn.case, drawn.problem.hidden.clone()
    if case.hidden_of_ignored is not None and case.layout("input") != "expanded":
        hidden[drawn.problem.labels == drawn.options.get("ignore_index", -100)] = case.hidden_of_ignored
    if case.broken >= 0:
        hidden[case.broken, -1] = torch.nan
    return replace(drawn.problem, hidden=hidden)


def judge(drawn: Drawn, name: str, ours: Tensor, part: Part, baseline: dict[str, Tensor], truth: Truth) -> list[Error]:
    """Compare by the rule of ``check``, widened by unavoidable rounding; a filter by norms."""
    case = drawn.case
    wholes = [baseline[name], truth.values[name], truth.plain.get(name, truth.values[name])]
    rough, right, plain = (part(whole).cpu() for whole in wholes)
    ours = ours.cpu().reshape(right.shape)
    if case.broken >= 0:
        if name in ("dC", "dbias", "dscale", "max_logit", "label_is_max"):
            return []
        if name != "dE" and ours[case.broken].isfinite():
            return [Error(f"{name} of a token with NaN", float("inf"), 0.0)]
        whole = part(torch.arange(len(wholes[1])) != case.broken)
        ours, rough, right, plain = (x[whole] for x in (ours, rough, right, plain))
    if name == "label_is_max":
        return [_wrong_ties(ours, baseline, truth.values)]
    dtype = case.dtype if name in GRADIENTS else FP32
    returned = {"dC": case.buffer, "dbias": case.bias}.get(name) or dtype
    right = torch.where(right.to(returned).isinf(), right.to(returned).double(), right)  # past the range of the dtype
    floor = _floor(case, name, right, truth) if truth.noise else 0.0
    errors = []
    if truth.noise and case.dtype == FP32 and "grad_filter" not in case.options:
        size = EPS[FP32] * right[right.isfinite()].abs().sum().item() + floor
        errors.append(Error(f"the reference's own {name}", check.largest(rough - right), UNSAFE * size))
    if name in truth.defined:
        dense, exact = map(part, truth.defined[name])
        errors.append(compare(f"{name} as defined", ours, dense, exact, dtype))
    if name in truth.plain and "grad_filter" in case.options:
        return errors + _filter_errors(case, name, (ours, rough, right, plain), floor)
    return [*errors, compare(name, ours, rough, right, dtype, floor)]


def _floor(case: LossCase, name: str, right: Tensor, truth: Truth) -> float:
    """Return the rounding that no order of operations avoids, for a random case."""
    problem = case.problem if isinstance(case.problem, Gaussian) else Gaussian()
    dtype, noise = case.dtype if name in GRADIENTS else FP32, truth.noise
    exact_scale = case.options.get("logit_scale", 1.0) in (1, -0.5) and "softcap" not in case.options
    exact_products = exact_scale and not case.classes and (problem.grid or problem.scale == 0)
    floor = EPS[dtype] * torch.finfo(dtype).smallest_normal
    if name not in GRADIENTS:
        is_exact = exact_products and not case.token_loss  # the function rounds its own products
        return floor + (0.0 if is_exact else EPS[FP32] * noise.get(name, 0.0))
    floor += EPS[dtype] * noise[name]
    # Equal logits; or one class, whose gradient is the difference of two sums over all tokens.
    if problem.scale == 0 or "expanded" in case.layouts.values() or len(truth.values["dC"]) == 1:
        floor += EPS[dtype] * noise[f"{name} alike"]
    if name == "dE":
        floor += EPS[dtype] * noise["parts of dE"]
    if name == "dscale" and dtype != FP32:
        floor += noise["dscale lost"]
    logit_noise = 0.0 if exact_products else truth.logit_noise
    floor += EPS[FP32] * (logit_noise * noise[name] + noise[f"{name} unbent"])
    if name == "dC" and case.buffer is not None:
        floor += 2 * EPS[case.buffer] * (noise[name] + check.largest(right))
    if name == "dC" and case.in_groups and not case.low:  # rounded after each group but the first
        count = -(-len(truth.values["nll"]) // case.in_groups)
        floor += EPS[dtype] * max(0, count - 1) * check.largest(right)
    return floor


def _filter_errors(case: LossCase, name: str, values: tuple[Tensor, ...], floor: float) -> list[Error]:
    """Compare the norm of a filter's error with that of the plain filter; for dE also of its sum."""
    grad_filter = case.options["grad_filter"]
    filtered = grad_filter.hidden if name == "dE" else grad_filter.weight

    def error(quantity: str, over: Callable[[Tensor], Tensor], left: float) -> Error:
        got, rough, right, dropped = (over(x.double()) for x in values)  # the last under the plain filter
        noise = 2 * (rough - right).norm() + EPS[case.dtype] * right.norm() + floor * right.numel() ** 0.5
        return Error(quantity, (got - right).norm().item(), (left * filtered * (dropped - right).norm() + noise).item())

    of_hidden, of_weight, of_sum = case.left
    errors = [error(f"filtered {name}", lambda x: x, of_hidden if name == "dE" else of_weight)]
    if name == "dE" and of_sum < 1:
        errors.append(error("sum of filtered dE", lambda x: x.sum(0), of_sum))
    return errors


def _wrong_ties(ours: Tensor, baseline: dict[str, Tensor], truth: dict[str, Tensor]) -> Error:
    """Count wrong answers to whether the label has the largest logit, where rounding leaves no doubt."""
    largest, at_label, rough = (x.cpu() for x in (truth["max_logit"], truth["target_logit"], baseline["max_logit"]))
    noise = check.largest(rough - largest)
    close = (largest - at_label).abs() <= 2 * noise + 4 * TIE * largest.abs().clamp(min=1)
    wrong = (ours != truth["label_is_max"].cpu()) & ~close & largest.isfinite() & at_label.isfinite()
    return Error("label_is_max", float(wrong.sum()), 0.0)


LOSS = Function(draw, reference_of, call, judge, ("loss",), _truth, FP32)
RANDOM_LOSS = LOSS._replace(truth=_oracle)
