"""``linear_log_probs`` in verify, also over lists of kept ids: how a case is drawn, called and compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import reference
from cce_dist.kept_ids import KeptIds
from cce_dist.log_probs import LogProbs, linear_log_probs
from cce_dist.shard import VocabShard
from cce_dist.tools.verify import check
from cce_dist.tools.verify.cases import FP32, Drawn, LogProbCase, Truth
from cce_dist.tools.verify.check import EPS, GRADIENTS, Error, Function, Part, compare, found, largest, logit_sizes

TOP = 5
OF_LOGITS = ("log_probs", "lse", "max_logit", "top_log_probs", "full_log_probs", "kept_mass")


def draw(case: LogProbCase, generator: torch.Generator) -> Drawn:
    problem = check.draw_problem(case, generator)
    num_tokens, vocab_size = len(problem.labels), problem.weight.shape[0]
    ids = torch.randint(vocab_size, (num_tokens, max(1, case.num_ids)), generator=generator)
    ids = ids if case.change is None else case.change(ids)
    ids = ids if case.num_ids else ids[:, 0]
    own = {name: 0.5 + torch.rand(num_tokens, generator=generator) for name in case.own}
    of_tokens = tuple(ids.shape[:1])
    shapes = {"log_probs": tuple(ids.shape), "lse": of_tokens, "entropy": of_tokens}
    upstream = check.draw_upstream(case, shapes, generator)
    options = case.options | own
    if case.kept:
        options["kept"] = _lists(case, ids, vocab_size, generator)
    return Drawn(case, replace(problem, labels=ids), options, upstream)


def _lists(case: LogProbCase, ids: Tensor, vocab_size: int, generator: torch.Generator) -> KeptIds:
    """Return lists of 0 to ``case.kept`` ids, a third of them with the token's own."""
    lists: list[Tensor | None] = []
    longest = case.kept
    for number, own in enumerate(ids.flatten().tolist()):
        length = min(longest, vocab_size)
        if number > 0:
            length = int(longest ** torch.rand(1, generator=generator).item()) - 1
        of_token = torch.randperm(vocab_size, generator=generator)[:length]
        if number % 3 == 0 and length and own >= 0 and own not in of_token:
            of_token[length // 2] = own
        lists.append(of_token)
    if case.whole:
        lists[:: case.whole] = [None] * len(lists[:: case.whole])
    return KeptIds.from_lists(lists)


def reference_of(drawn: Drawn, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return dense outputs and gradients; without lists also all log-probabilities, as "log_p"."""
    ids, options, upstream = drawn.on(device)
    leaves = check.leaves_of(drawn.case, drawn.problem, dtype, device)
    hidden, weight, bias = leaves.values()
    wide, known = torch.promote_types(dtype, FP32), ("softcap", "temperature", "logit_scale", "kept")
    how: dict[str, Any] = {name: options[name] for name in known if name in options}
    how |= {name: value.to(wide) for name, value in how.items() if isinstance(value, Tensor)}
    out = reference.linear_log_probs(hidden, weight, ids, linear_bias=bias, top_k=TOP, **how)
    values = found(out._asdict(), upstream, leaves)
    if "kept" not in how:
        all_ids = torch.arange(len(weight), device=device).expand(len(hidden), -1)
        log_p = reference.linear_log_probs(hidden, weight, all_ids, linear_bias=bias, **how).log_probs
        values["log_p"] = log_p.detach()
    return values


def call(drawn: Drawn, shard: VocabShard, backend: Any, device: str) -> dict[str, Tensor]:
    ids, options, upstream = drawn.on(device)
    leaves = check.local_leaves(drawn.case, drawn.problem, device, shard)
    hidden, weight, bias = leaves.values()
    if drawn.case.kept:
        options["kept_mass"] = True
    else:
        options |= {"sum_p_squared": True, "argmax": True, "top_k": TOP}
    out = linear_log_probs(hidden, weight, ids, linear_bias=bias, shard=shard, backend=backend, entropy=True, **options)
    return found(out._asdict(), upstream, leaves, drawn.case)


def judge(drawn: Drawn, name: str, ours: Tensor, part: Part, baseline: dict[str, Tensor], truth: Truth) -> list[Error]:
    """Compare by the rule of ``check``, widened by rounding that no order of operations avoids."""
    values, options = truth.values, drawn.options
    if name in ("argmax", "top_ids"):
        return [_wrong_ids(name, ours, baseline, values)]
    more = _slope_noise(drawn) if name in GRADIENTS else 0.0
    if name in OF_LOGITS:  # a tanh made of exponentials is right to two units in the last place of 1
        more += largest(options.get("softcap", 0.0) / options.get("temperature", 1.0)) * EPS[FP32] / 16
    if name in (*OF_LOGITS, "entropy"):
        more += EPS[FP32] / 8  # twice the rounding of a sum of exponentials, which is at least 1
        if drawn.case.kept:  # a logit's terms may cancel, and the baseline be right by luck
            sizes_N = (drawn.problem.hidden.abs() @ drawn.problem.weight.abs().t()).amax(1)
            more += EPS[FP32] / 64 * largest(_in_logits(drawn, sizes_N))
    if name == "kept_mass":  # exp of a difference of two log-sum-exps
        more += EPS[FP32] * largest(values["lse"])
    dtype = drawn.case.dtype if name in GRADIENTS else FP32
    error = compare(name, ours, part(baseline[name]), part(values[name]), dtype, more)
    least = _noise_of_sum(drawn, part) if name == "dbias" else 0.0
    return [error._replace(bound=max(error.bound, least))]


def _in_logits(drawn: Drawn, sizes_N: Tensor) -> Tensor:
    """Return sizes of each token's products as sizes of its logits."""
    return (sizes_N * drawn.options.get("logit_scale", 1.0) / drawn.options.get("temperature", 1.0)).abs()


def _noise_of_sum(drawn: Drawn, part: Part) -> float:
    """Bound the error of a bias's gradient by the terms of its sum over tokens, as they may cancel.

    A token's term is the gradient of a column of zeros that the weight gets for this token.
    """
    problem, num_tokens = drawn.problem, len(drawn.problem.hidden)
    hidden = torch.cat((problem.hidden, torch.eye(num_tokens)), 1)
    weight = F.pad(problem.weight, (0, num_tokens))
    apart = drawn._replace(problem=replace(problem, hidden=hidden, weight=weight))
    coefs = sum(grad.abs().view(num_tokens, -1).sum(1) for grad in drawn.upstream.values())
    both = (apart, apart._replace(upstream={"lse": coefs}))
    sizes_VN = sum(reference_of(each, torch.float64, "cpu")["dC"][:, -num_tokens:].abs() for each in both)
    noise_N = EPS[FP32] / 32 * (1 + _in_logits(drawn, logit_sizes(problem).amax(1)))
    return largest(part((sizes_VN * noise_N).norm(dim=1)))


def _slope_noise(drawn: Drawn) -> float:
    """Bound a gradient's error under a softcap: the slope has twice the error of z / softcap."""
    options, problem = drawn.options, drawn.problem
    if "softcap" not in options:
        return 0.0
    size = max(1.0, largest(problem.hidden), largest(problem.weight))
    factor = largest(options.get("logit_scale", 1.0) / options.get("temperature", 1.0))
    return EPS[FP32] / 8 * sum(map(largest, drawn.upstream.values())) * size * factor


def _wrong_ids(name: str, ours: Tensor, baseline: dict[str, Tensor], truth: dict[str, Tensor]) -> Error:
    """Return how far our ids' log-probabilities are below the largest ones, place by place."""
    log_p = truth["log_p"].cpu()
    ours = ours.cpu().view(len(log_p), -1)
    live = truth["top_ids"].cpu()[:, :1] >= 0
    best = truth["top_log_probs"].cpu()[:, : ours.shape[1]]
    gap = torch.where(live, (best - log_p.gather(1, ours.clamp(min=0))).abs(), (ours != -1).double())
    noise = largest(baseline["top_log_probs"] - truth["top_log_probs"])
    twice = sum(len(row) - len(set(row)) for row in ours[live[:, 0]].tolist())
    return Error(name, gap.amax().item() + twice, 4 * noise + EPS[FP32] * largest(best))


LOG_PROBS = Function(draw, reference_of, call, judge, LogProbs._fields)
