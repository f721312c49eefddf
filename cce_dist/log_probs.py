"""linear_log_probs: log-probabilities of given ids and statistics of the softmax, with gradients, without the logits.

It calls the operator of the loss (``op``), which takes several ids per token, per-token factors and more statistics as options.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist import agree, checks, kept_ids, kept_op, op, operands, terms
from cce_dist.call import Call, LogProbOptions, checked, is_symbol, numbers_of
from cce_dist.kept_ids import KeptIds
from cce_dist.kernels import Operands, Spec, Want
from cce_dist.kernels.kept_ids import rising
from cce_dist.shard import VocabShard


class LogProbs(NamedTuple):
    """What ``linear_log_probs`` returns: fp32 tensors, and int64 ids, of the tokens' shape [...] unless another is named.

    The first three are differentiable. A token without an id has 0 everywhere, and -1 for an id.

    Attributes:
        log_probs: Log-probabilities of ``ids``, in nats, of ids' shape; 0 where an id is ignored.
        lse: Log-sum-exp of the logits over the whole vocabulary.
        entropy: Entropy of the softmax, in nats; None unless asked for.
        sum_p_squared: Sum of the squared probabilities; None unless asked for.
        max_logit: The largest logit; None without ``argmax``.
        argmax: Its id, int64, the smallest of equal ones; None unless asked for.
        top_log_probs: [..., top_k] log-probabilities of the largest logits, in falling order; None without ``top_k``.
        top_ids: [..., top_k] int64: their ids, of equal logits the smaller id first; None without ``top_k``.
        full_log_probs: Log-probabilities of ``ids`` over the whole vocabulary; None without ``kept_mass``.
        kept_mass: Probability of all ids of the token's list together; None without ``kept_mass``.
    """

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | None = None
    sum_p_squared: Tensor | None = None
    max_logit: Tensor | None = None
    argmax: Tensor | None = None
    top_log_probs: Tensor | None = None
    top_ids: Tensor | None = None
    full_log_probs: Tensor | None = None
    kept_mass: Tensor | None = None


@agree.errors_reach_all_ranks
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    sum_p_squared: bool = False,
    argmax: bool = False,
    top_k: int = 0,
    kept: KeptIds | None = None,
    kept_mass: bool = False,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    input_grad: str = "summed",
    reduce_dtype: torch.dtype | None = None,
    backend: str = "auto",
    workspace_bytes: int | None = None,
    grad_weight_out: Tensor | None = None,
    batch_invariant: bool = False,
) -> LogProbs:
    """Log-probabilities of given ids, from hidden states, without ever holding the logits: for RL and distillation.

    The logits are ``softcap * tanh(u / softcap) / temperature`` (``u / temperature`` without a softcap) with
    ``u = logit_scale * (input @ linear_weight.T + linear_bias)``. Kernels, shards, budgets and checks are
    ``linear_cross_entropy``'s; all sums are in fp32, as with an "fp32 head". A policy loss needs one id per token, distillation
    a few hundred.

    There is no gradient filter. The filter promises an error relative to weights of one sign, and upstream gradients of a
    policy have both signs and very different sizes.

    Args:
        input: [..., D] hidden states, fp32, bf16 or fp16 (under autocast: cast as ``F.linear`` would).
        linear_weight: [V_r, D] this rank's rows of the head weight, input's dtype; or a DTensor sharded on dim 0.
        ids: [...] or [..., K] int64 or int32 ids in the whole vocabulary; the same on every rank of the group. An id may stand
            in a token's row more than once.
        linear_bias: [V_r] bias of this rank's rows, or a DTensor split as linear_weight is.
        ignore_index: Entries of ids with this value have log-probability 0 and gradient 0. A token all of whose entries have it
            is not computed: all of its outputs are 0 (its ids -1), and it gives no gradient. None means -100.
        logit_scale: Multiplies the products: a number, or a [...] tensor with one for each token. No gradient.
        softcap: Positive bound of the logits before the temperature, or None.
        temperature: Divides the logits: a positive number, or a [...] tensor with one for each token. No gradient. Without a
            softcap it is the same as ``logit_scale=1 / temperature``.
        entropy: Return the entropy.
        sum_p_squared: Return the sum of the squared probabilities. No gradient.
        argmax: Return the largest logit and its id. A greedy match is ``argmax == ids``. No gradient.
        top_k: Return the log-probabilities and ids of so many of the largest logits, at most 1,024. No gradient.
        kept: Lists of ids, one for each token, that the softmax is taken over in place of the whole vocabulary: those that a
            sampler kept. ``log_probs`` is ``z[id] - logsumexp(z[kept])``, whether the id is in its list or not; ``lse`` and
            ``entropy`` are over the list. A token with an empty list has outputs and gradients 0. Then ids are one for each
            token, and the other outputs are not served. Nothing of the vocabulary's size is computed: forward reads the listed
            rows of the weight, backward the same rows and as many of the hidden states.
        kept_mass: With kept, also return the mass of each list and the log-probabilities over the whole vocabulary. That is one
            sweep over the vocabulary more in forward. No gradient.
        shard, sequence_parallel, input_grad, reduce_dtype, backend, workspace_bytes, grad_weight_out: As in
            ``linear_cross_entropy``. With sequence_parallel ids and tensors of a number for each token are whole.
        batch_invariant: A token's outputs have the same bits whatever other tokens are in the call, on one device with the same
            options. Gradients are not promised to. No exponentials are kept for backward then, and calls of few tokens use a
            part of the GPU. The Triton backend alone keeps the promise, so it is an error on the torch backend.

    Returns:
        ``LogProbs``. The same bits on every rank of the group, and in every run.

    Sharding:
        As in ``linear_cross_entropy``. ids, tensors of numbers for each token and all outputs are replicated over the group.

    Communication:
        Forward: one all-gather, of 3 fp32 numbers per token, one more for each of entropy, sum_p_squared and argmax, K more if
        K > 1, and 2 k with top_k; with kept too, 3 or 4, and 3 more with kept_mass. Backward: as ``linear_cross_entropy``.

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shard do not fit; before any kernel or collective. A
            number of a token that has ids is not finite, or its temperature not positive (CPU, or CCE_DIST_DEBUG=1; on a
            GPU that token's outputs are NaN instead). An id stands twice in a list of kept, or its offsets do not rise from 0
            to the number of ids (likewise; on a GPU such an id counts once, and such offsets give some other lists).
        IndexError: An id, also of kept, outside the vocabulary (CPU, or CCE_DIST_DEBUG=1). On a GPU its log-probability, or the
            token's, is NaN instead, and it gives no gradient.
        RuntimeError: Double backward, forward mode, torch.func, vmap; ranks that disagree (CCE_DIST_DEBUG=1).
    """
    options = checked(
        LogProbOptions, ignore_index=ignore_index, softcap=softcap, entropy=entropy, sum_p_squared=sum_p_squared,
        argmax=argmax, top_k=top_k, kept_mass=kept_mass, sequence_parallel=sequence_parallel, input_grad=input_grad,
        reduce_dtype=reduce_dtype, backend=backend, workspace_bytes=workspace_bytes, batch_invariant=batch_invariant,
    )  # fmt: skip
    scale = _one_scale(logit_scale, temperature, options.softcap)
    if kept is not None:
        scale = None  # lists take factors of each token
    x, shard = operands.prepare(
        input, linear_weight, ids, linear_bias, grad_weight_out, shard, 1.0 if scale is None else scale, options
    )
    if kept is not None:
        _check_kept(kept, x, options)
    elif options.kept_mass:
        raise ValueError("kept_mass is of lists of ids: pass kept")
    if options.top_k > shard.vocab_size:
        raise ValueError(f"top_k is {options.top_k}, the vocabulary has {shard.vocab_size} ids")
    tokens = ids.shape[: input.dim() - 1]
    if scale is None:
        x = terms.with_factors(x, logit_scale, temperature, tokens, options.ignore_index)
    call = operands.call_of(x, _spec(x, 1.0 if scale is None else scale, shard, options), shard, options)
    if options.batch_invariant and call.backend == "torch":
        raise ValueError("batch_invariant needs the Triton backend: sums of the torch backend depend on the batch")
    numbers = numbers_of(1.0 if scale is None else scale, options.softcap)
    lists = {} if kept is None else {"kept.offsets": kept.offsets, "kept.ids": kept.ids}
    agree.check_ranks(x, {"logit_scale": logit_scale, "temperature": temperature} | lists, shard, options, call)
    if kept is not None:
        nll, lse, entropies = kept_op.forward(x, kept, grad_weight_out, call, numbers)
        out = LogProbs((0.0 - nll).view(ids.shape), lse.view(tokens), entropies.view(tokens) if entropy else None)
        return _with_mass(out, x, kept, call, numbers) if kept_mass else out
    if not torch.compiler.is_compiling():
        call = op.decided(call, x.hidden, x.num_tokens, shard.group_size)
    found = op.forward(x, grad_weight_out, call, numbers)
    statistics = (found.sum_p_squared, found.max_logit, found.argmax)
    squares, max_logit, best = (None if values is None else values.view(tokens) for values in statistics)
    most = (None if values is None else values.view(*tokens, top_k) for values in (found.top_log_probs, found.top_ids))
    entropies = found.entropy.view(tokens) if entropy else None
    return LogProbs(
        (0.0 - found.nll).view(ids.shape), found.lse.view(tokens), entropies, squares, max_logit, best, *most
    )


@torch.no_grad()
def _with_mass(out: LogProbs, x: Operands, kept: KeptIds, call: Call, numbers: Tensor | None) -> LogProbs:
    """Add what a sweep over the whole vocabulary says of the tokens whose list is not empty."""
    ids = x.ids.masked_fill(rising(kept.offsets, kept.ids.shape[0]).diff() == 0, call.spec.ignore_index)
    sweep = call._replace(spec=call.spec._replace(want=Want(grad=False)))
    found = op.forward(x._replace(ids=ids), None, sweep, numbers)
    mass = (out.lse.view(-1) - found.lse).exp().clamp(max=1.0).masked_fill(ids == call.spec.ignore_index, 0.0)
    full = (0.0 - found.nll).view(out.log_probs.shape)
    return out._replace(full_log_probs=full, kept_mass=mass.view(out.lse.shape))


def _spec(x: Operands, scale: float, shard: VocabShard, options: LogProbOptions) -> Spec:
    want = Want(
        grad=torch.is_grad_enabled() and x.requires_grad,
        entropy=options.entropy,
        largest=options.argmax,
        sum_p_squared=options.sum_p_squared,
        best=options.argmax,
        top_k=options.top_k,
    )
    logits = operands.logits_of(shard, scale, options.softcap, x.head.tensors)
    return Spec(
        logits, shard.vocab_size, options.ignore_index, want=want, workspace_bytes=options.workspace_bytes,
        num_ids=x.ids.shape[1] if x.ids.dim() == 2 else 1, invariant=options.batch_invariant,
    )  # fmt: skip


def _one_scale(logit_scale: float | Tensor, temperature: float | Tensor, softcap: float | None) -> float | None:
    """The one number that all products are multiplied by; None: it takes factors of each token."""
    for name, value in (("logit_scale", logit_scale), ("temperature", temperature)):
        if isinstance(value, Tensor):
            _check_kind(name, value)
        elif checks.number(name, value) <= 0 and name == "temperature":
            raise ValueError(f"temperature must be positive, got {value}")
    if isinstance(logit_scale, Tensor) or isinstance(temperature, Tensor):
        return None
    if softcap is None:
        return checks.number("logit_scale / temperature", logit_scale / temperature)
    return float(logit_scale) if not is_symbol(temperature) and temperature == 1 else None


def _check_kept(kept: KeptIds, x: Operands, options: LogProbOptions) -> None:
    kept_ids.check(kept, x)
    for name in ("sum_p_squared", "argmax", "top_k"):
        if getattr(options, name):
            raise ValueError(f"{name} is of the whole vocabulary: leave it out with kept, or call without kept for it")
    if x.ids.dim() == 2:
        raise ValueError(f"ids must be one for each token with kept, got {x.ids.shape[1]}")


def _check_kind(name: str, value: Tensor) -> None:
    checks.tensors({name: value})
    if isinstance(value, DTensor):
        raise TypeError(f"{name} is a DTensor: pass its local tensor (to_local())")
    if value.requires_grad:
        raise TypeError(f"{name} has no gradient here: pass a number, or a tensor that requires none")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a number or a tensor of floating-point numbers, got {value.dtype}")
