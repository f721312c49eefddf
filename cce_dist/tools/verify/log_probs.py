"""``linear_log_probs`` in the matrix: named traps, held to the rule of ``check``. Upstream gradients have both signs."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import reference
from cce_dist.kept_ids import KeptIds
from cce_dist.log_probs import LogProbs, linear_log_probs
from cce_dist.shard import VocabShard
from cce_dist.tools.verify.cases import BF16, FP16, Bounds, Problem, even, padded, random_problem, uneven, with_empty
from cce_dist.tools.verify.check import EPS, Error, compare, further_runs, local_rows, of_rank, rounded, same_bits

TOP = 5
OF_LOGITS = ("log_probs", "lse", "max_logit", "top_log_probs", "full_log_probs", "kept_mass")


@dataclass(frozen=True)
class LogProbCase:
    """One line of the matrix, as ``cases.Case``.

    Attributes:
        num_ids: K; 0: ids have no such dimension.
        ids: Changes ids [N, K] that were drawn evenly.
        own: Names of arguments that are a number for each token, drawn from 0.5 to 1.5.
        differentiated: The outputs that have an upstream gradient.
        kept: The softmax is taken over lists of at most so many ids; 0: over the vocabulary.
    """

    name: str
    catches: str
    num_ids: int = 0
    options: dict = field(default_factory=dict)
    problem: Callable[[torch.Generator], Problem] = field(default_factory=random_problem)
    ids: Callable[[Tensor], Tensor] | None = None
    own: tuple[str, ...] = ()
    shards: Callable[[int, int], Bounds] = even
    dtype: torch.dtype = torch.float32
    differentiated: tuple[str, ...] = ("log_probs", "lse", "entropy")
    kept: int = 0


def ignored(ids: Tensor) -> Tensor:
    """All ids of some tokens, and some ids of others."""
    ids = ids.clone()
    ids[::4] = -100
    ids[1::3, ::2] = -100
    return ids


def repeated(ids: Tensor) -> Tensor:
    """Equal ids side by side, apart, and in all of a row."""
    ids = ids.clone()
    ids[:, -1] = ids[:, 0]
    ids[::3] = ids[::3, :1]
    return ids


POLICY = ("log_probs", "entropy")
SOFTCAP = {"softcap": 5.0}
OWN = ("logit_scale", "temperature")

# fmt: off
LOG_PROB_CASES = [
    LogProbCase("log-probs", "a gradient of one sign assumed"),
    LogProbCase("log-probs-alone", "an entropy that was not asked for", differentiated=("log_probs",)),
    LogProbCase("log-probs-3", "the target of another rank's shard", 3, differentiated=("log_probs",)),
    LogProbCase("log-probs-64", "a sum of ids in another order", 64, problem=random_problem(5, bias=True)),
    LogProbCase("log-probs-64-entropy", "p of an id's own logit, which is rounded otherwise, beside the others' p", 64,
                problem=random_problem(7, 32, 32, scale=2.0), differentiated=("entropy",)),
    LogProbCase("log-probs-repeated", "a cell that is overwritten twice", 7, ids=repeated),
    LogProbCase("log-probs-ignored", "an ignored id with a gradient", 5, ids=ignored),
    LogProbCase("log-probs-own-factors", "one token's temperature for another", own=OWN, problem=random_problem(bias=True)),
    LogProbCase("log-probs-softcap", "a temperature before the softcap", 3, {**SOFTCAP, "temperature": 0.7},
                problem=random_problem(bias=True)),
    LogProbCase("log-probs-everything", "options that only work alone", 4, SOFTCAP, random_problem(bias=True), ignored, OWN),
    LogProbCase("log-probs-uneven-shards", "the column of another shard", 3, SOFTCAP, own=OWN, shards=uneven),
    LogProbCase("log-probs-empty-shards", "a maximum over nothing", 3, shards=with_empty),
    LogProbCase("log-probs-padded-shards", "padding in the largest logits", 3, problem=random_problem(shift=-30.0, grid=True),
                shards=padded),
    LogProbCase("log-probs-sequence-parallel", "ids or temperatures of the slice", 3, {"sequence_parallel": True},
                random_problem(24), own=OWN),
    LogProbCase("log-probs-gap-of-1e4", "0 times infinity", 3, problem=random_problem(spike=1e4, grid=True)),
    LogProbCase("log-probs-many-blocks", "state carried between blocks of logits", 3, {"workspace_bytes": 1},
                random_problem(300, 16, 1200, bias=True), own=OWN),
    LogProbCase("kept", "an own id outside of its list, an empty list, a long one beside short ones", kept=40),
    LogProbCase("kept-everything", "options that only work alone", 1, {**SOFTCAP, "workspace_bytes": 1},
                random_problem(300, 70, 300, bias=True), ignored, OWN, kept=300),
    LogProbCase("kept-empty-shards", "a list of which a shard has nothing", shards=with_empty, kept=3),
    LogProbCase("kept-gap-of-1e4", "a log-sum-exp in one number", problem=random_problem(spike=1e4, grid=True), kept=200),
    LogProbCase("kept-sequence-parallel", "lists of the slice", 0, {"sequence_parallel": True}, random_problem(24), kept=9),
    LogProbCase("kept-bf16", "logits rounded before the log-sum-exp", problem=random_problem(scale=0.2), dtype=BF16, kept=60),
    LogProbCase("log-probs-bf16", "logits rounded before the log-sum-exp", 3, problem=random_problem(scale=0.2), dtype=BF16),
    LogProbCase("log-probs-fp16", "gradients of ids that underflow", 3, problem=random_problem(scale=0.2), dtype=FP16),
]
# fmt: on


def run_case(
    case: LogProbCase, group: dist.ProcessGroup | None, device: str, backend: str = "auto", salt: int = 0
) -> list[Error]:
    """Run a case on the ranks of ``group``, as ``check.run_case``."""
    backend = ("torch" if device == "cpu" else "triton") if backend == "auto" else backend
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    drawn = _draw(case, torch.Generator().manual_seed(zlib.crc32(case.name.encode()) + salt), device)
    truth, baseline = (_expected(drawn, dtype) for dtype in (torch.float64, case.dtype))
    vocab_size = drawn.problem.weight.shape[0]

    shard = VocabShard(*case.shards(vocab_size, ranks)[rank], vocab_size, group)
    run = partial(_ours, drawn, case.dtype, shard, rank, backend)
    first = run()
    errors = []
    for name, ours in first.items():
        if name in ("argmax", "top_ids"):
            errors.append(_wrong_ids(name, ours, baseline, truth))
            continue
        padding, ours, (rough, exact) = of_rank(name, ours, [baseline[name], truth[name]], case.options, shard)
        held_in = case.dtype if name in ("dE", "dC", "dbias") else torch.float32
        error = compare(name, ours, rough, exact, held_in)
        more = _softcap_noise(drawn.options) if name in OF_LOGITS else 0.0
        more += _slope_noise(drawn) if name in ("dE", "dC", "dbias") else 0.0
        if case.kept and name in (*OF_LOGITS, "entropy"):
            more += _product_noise(drawn)
        if name == "kept_mass" and len(exact):  # exp of a difference of two log-sum-exps
            more += EPS[torch.float32] * truth["lse"].abs().max().item()
        errors += [*padding, error._replace(bound=error.bound + more)]
    shared = [name for name in LogProbs._fields if name in first]
    return errors + same_bits(first, run, further_runs(device), shared, group)


class _Drawn(NamedTuple):
    """The data of a case. ``options`` hold tensors, too; ``upstream`` are gradients of outputs."""

    problem: Problem
    ids: Tensor
    options: dict[str, Any]
    upstream: dict[str, Tensor]
    device: str


def _draw(case: LogProbCase, generator: torch.Generator, device: str) -> _Drawn:
    problem = rounded(case.problem(generator), case.dtype)
    num_tokens, vocab_size = len(problem.labels), problem.weight.shape[0]
    ids = torch.randint(vocab_size, (num_tokens, max(1, case.num_ids)), generator=generator)
    ids = ids if case.ids is None else case.ids(ids)
    ids = (ids if case.num_ids else ids[:, 0]).to(device)
    own = {name: 0.5 + torch.rand(num_tokens, generator=generator) for name in case.own}
    upstream = {
        name: torch.randn(ids.shape if name == "log_probs" else ids.shape[:1], generator=generator).to(device)
        for name in case.differentiated
    }
    options = dict(case.options) | {name: value.to(device) for name, value in own.items()}
    if case.kept:
        options["kept"] = _lists(case.kept, ids, vocab_size, generator)
    return _Drawn(problem, ids, options, upstream, device)


def _lists(longest: int, ids: Tensor, vocab_size: int, generator: torch.Generator) -> KeptIds:
    """Return lists of 0 to ``longest`` ids, a third of them with the token's own; the first is as long as it can be."""
    lists = []
    for number, own in enumerate(ids.flatten().tolist()):
        length = (
            min(longest, vocab_size) if number == 0 else int(longest ** torch.rand(1, generator=generator).item()) - 1
        )
        of_token = torch.randperm(vocab_size, generator=generator)[:length]
        if number % 3 == 0 and length and own >= 0 and own not in of_token:
            of_token[length // 2] = own
        lists.append(of_token)
    lengths = torch.tensor([0, *map(len, lists)])
    return KeptIds(lengths.cumsum(0).to(ids.device), torch.cat([lengths[:0], *lists]).to(ids.device))


def _softcap_noise(options: dict[str, Any]) -> float:
    """Error of a logit under a softcap: a tanh made of exponentials is right to two units in the last place of 1."""
    temperature = torch.as_tensor(options.get("temperature", 1.0)).amin().item()
    return options.get("softcap", 0.0) / temperature * EPS[torch.float32] / 16


def _product_noise(drawn: _Drawn) -> float:
    """Error of a logit that cancels: a short list may have this one alone, and the baseline be right by luck."""
    hidden, weight = (x.double().abs().to(drawn.device) for x in (drawn.problem.hidden, drawn.problem.weight))
    scale = torch.as_tensor(drawn.options.get("logit_scale", 1.0)).abs().amax().item()
    temperature = torch.as_tensor(drawn.options.get("temperature", 1.0)).amin().item()
    largest = (hidden @ weight.T).amax().item() if len(hidden) else 0.0
    return largest * scale / temperature * EPS[torch.float32] / 64


def _slope_noise(drawn: _Drawn) -> float:
    """Error of a gradient under a softcap: the slope 1 - (z / softcap)^2, small near it, has twice the error of z / softcap."""
    if "softcap" not in drawn.options:
        return 0.0
    factors = [torch.as_tensor(drawn.options.get(name, 1.0)).abs() for name in ("logit_scale", "temperature")]
    largest = max(1.0, drawn.problem.hidden.abs().max().item(), drawn.problem.weight.abs().max().item())
    upstream = sum(gradient.abs().max().item() for gradient in drawn.upstream.values())
    return EPS[torch.float32] / 8 * upstream * largest * factors[0].amax().item() / factors[1].amin().item()


def _wrong_ids(name: str, ours: Tensor, baseline: dict[str, Tensor], truth: dict[str, Tensor]) -> Error:
    """How far the log-probabilities of our ids are below those of the largest logits, place by place."""
    ours, log_p = ours.cpu(), truth["log_p"].cpu()
    ours = ours.unsqueeze(-1) if name == "argmax" else ours
    live = truth["top_ids"].cpu()[:, :1] >= 0
    best = truth["top_log_probs"].cpu()[:, : ours.shape[1]]
    gap = torch.where(live, (best - log_p.gather(1, ours.clamp(min=0))).abs(), (ours != -1).double())
    noise = (baseline["top_log_probs"].cpu() - truth["top_log_probs"].cpu()).abs().amax().item()
    twice = sum(len(row) - len(set(row)) for row in ours[live[:, 0]].tolist())
    return Error(name, gap.amax().item() + twice, 4 * noise + EPS[torch.float32] * best.abs().amax().item())


def _objective(out: LogProbs, upstream: dict[str, Tensor]) -> Tensor:
    return sum(
        ((getattr(out, name) * g.to(out.lse)).sum() for name, g in upstream.items()), start=out.lse.new_zeros(())
    )


def _expected(drawn: _Drawn, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and gradients of the dense reference in a dtype, and all log-probabilities."""
    hidden, weight, bias = drawn.problem.tensors(dtype, drawn.device)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias) if x is not None]
    known = ("softcap", "temperature", "logit_scale", "kept")
    wide = torch.promote_types(dtype, torch.float32)
    how: dict[str, Any] = {name: value for name, value in drawn.options.items() if name in known}
    how |= {name: value.to(wide) for name, value in how.items() if isinstance(value, Tensor)}
    out = reference.linear_log_probs(hidden, weight, drawn.ids, linear_bias=bias, top_k=TOP, **how)
    grads = torch.autograd.grad(_objective(out, drawn.upstream), inputs)
    values = {name: x.detach() for name, x in out._asdict().items() if x is not None}
    if "kept" not in how:
        all_ids = torch.arange(weight.shape[0], device=drawn.device).expand(len(hidden), -1)
        log_p = reference.linear_log_probs(hidden, weight, all_ids, linear_bias=bias, **how).log_probs
        values["log_p"] = log_p.detach()
    return values | dict(zip(("dE", "dC", "dbias"), grads, strict=False))


def _ours(drawn: _Drawn, dtype: torch.dtype, shard: VocabShard, rank: int, backend: str) -> dict[str, Tensor]:
    """The same from ``linear_log_probs`` on this rank's shard."""
    hidden, weight, bias = drawn.problem.tensors(dtype, drawn.device)
    weight, bias = local_rows(weight, shard), None if bias is None else local_rows(bias, shard)
    if drawn.options.get("sequence_parallel"):
        hidden = hidden.chunk(shard.group_size)[rank].contiguous()
    hidden.requires_grad_()
    over_lists = "kept" in drawn.options
    whole: dict[str, Any] = {"kept_mass": True} if over_lists else {"sum_p_squared": True, "argmax": True, "top_k": TOP}
    out = linear_log_probs(
        hidden,
        weight,
        drawn.ids,
        linear_bias=bias,
        shard=shard,
        backend=backend,
        entropy=True,
        **whole,
        **drawn.options,
    )
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    grads = torch.autograd.grad(_objective(out, drawn.upstream), inputs)
    values = {name: x.detach() for name, x in out._asdict().items() if x is not None}
    return values | dict(zip(("dE", "dC", "dbias"), grads, strict=False))
