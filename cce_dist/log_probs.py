"""linear_log_probs: log-probabilities of given ids and statistics of the softmax, with gradients, without the logits.

The operator is the one of the loss (``op``): several ids per token, per-token factors and further statistics are its options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist import checks, debug_ranks, kept_ids, op, operands, terms
from cce_dist.call import Backend, Call, InputGrad, Options, checked, is_symbol, numbers_of
from cce_dist.kept_ids import KeptIds
from cce_dist.kernels import Operands, ShardLogits, Spec, Want
from cce_dist.shard import VocabShard


class LogProbs(NamedTuple):
    """The results of ``linear_log_probs``: one fp32 number per token, [...], unless a shape or dtype is named.

    Gradients flow through ``log_probs``, ``lse`` and ``entropy``. A token whose ids are all ignored has 0 in every output, and
    -1 in ``argmax`` and ``top_ids``. Outputs that were not requested are None.

    Attributes:
        log_probs: Log-probabilities of ``ids``, in nats and of ids' shape; 0 where an id is ignored.
        lse: Log-sum-exp of the logits over the whole vocabulary, or over the token's list with ``kept``.
        entropy: Entropy of the softmax, in nats. Requested by ``entropy``.
        sum_p_squared: Sum of the squared probabilities. Requested by ``sum_p_squared``.
        max_logit: The largest logit. Requested by ``argmax``.
        argmax: int64 id of the largest logit; the smallest id if logits are equal. Requested by ``argmax``.
        top_log_probs: [..., top_k] log-probabilities of the largest logits, in descending order. Requested by ``top_k``.
        top_ids: [..., top_k] int64 ids of the largest logits; equal logits in ascending order of ids. Requested by ``top_k``.
        full_log_probs: Log-probabilities of ``ids`` over the whole vocabulary. Requested by ``kept_mass``.
        kept_mass: Total probability of the ids in the token's list. Requested by ``kept_mass``.
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


@debug_ranks.errors_reach_all_ranks
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
    input_grad: InputGrad = "summed",
    reduce_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
    grad_weight_out: Tensor | None = None,
    batch_invariant: bool = False,
) -> LogProbs:
    """Compute log-probabilities of given ids from hidden states, without holding the logits.

    Made for reinforcement learning (one id per token) and distillation (up to a few hundred). The logits are
    ``softcap * tanh(u / softcap) / temperature``, or ``u / temperature`` without a softcap, with
    ``u = logit_scale * (input @ linear_weight.T + linear_bias)``. Kernels, sharding, memory budget and checks are shared with
    ``linear_cross_entropy``. All sums are in fp32, as with an "fp32 head".

    There is no gradient filter: its error bound assumes upstream gradients of one sign and similar size, and the upstream
    gradients of a policy loss have both signs and very different sizes.

    Args:
        input: [..., D] hidden states in fp32, bf16 or fp16. Autocast casts input and linear_weight as it does for ``F.linear``.
        linear_weight: [V_r, D] this rank's rows of the head weight, in input's dtype; or a DTensor sharded on dim 0.
        ids: [...] or [..., K] int64 or int32 ids in the whole vocabulary, K > 0. Identical on every rank of the group. A token
            may list an id more than once.
        linear_bias: [V_r] bias of this rank's rows, or a DTensor split like linear_weight.
        ignore_index: Entries of ids with this value have log-probability 0 and gradient 0. A token whose entries are all
            ignored is not computed. None means -100.
        logit_scale: Factor of the logits before the softcap: a number, or a [...] tensor with one per token. It must not
            require a gradient.
        softcap: Positive bound of the logits before the temperature, or None.
        temperature: Divisor of the logits after the softcap: a positive number, or a [...] tensor with one per token. It must
            not require a gradient.
        entropy: Whether to return the entropy.
        sum_p_squared: Whether to return the sum of the squared probabilities, without gradient.
        argmax: Whether to return the largest logit and its id, without gradient. A greedy match is ``argmax == ids``.
        top_k: Number of largest logits whose log-probabilities and ids are returned, without gradient. At most 1,024 and V. The
            logits are then computed once more.
        kept: The ids that a sampler kept for each token. The softmax is then over the token's list in place of the vocabulary:
            ``log_probs`` is ``z[id] - logsumexp(z[kept])``, whether the id is in the list or not. A token with an empty list
            has outputs 0 and gradients 0. Only the listed rows of the weight are read, so the time does not grow with the
            vocabulary. Only the tokens ``kept.whole`` take a pass over the vocabulary. ids must be [...]; sum_p_squared,
            argmax and top_k cannot be requested.
        kept_mass: With kept, whether to return the total probability of each list and the log-probabilities over the whole
            vocabulary too, without gradient. This takes one pass over the vocabulary in forward.
        shard, sequence_parallel, input_grad, reduce_dtype, backend, workspace_bytes, grad_weight_out: As in
            ``linear_cross_entropy``. With sequence_parallel, ids and per-token tensors stay whole.
        batch_invariant: Whether a token's outputs must be bitwise independent of the other tokens of the call, on one device
            with the same options. Gradients may still depend on them. No exponentials are kept for backward, and calls with
            few tokens use only a part of the GPU. Needs the Triton backend.

    Returns:
        ``LogProbs``, bitwise identical on every rank of the group and in every run.

    Sharding:
        As in ``linear_cross_entropy``. ids, per-token tensors and all outputs are replicated over the group.

    Communication:
        Forward: one all-gather of 3 fp32 numbers per token; one more number for each of entropy, sum_p_squared and argmax, K
        more if K > 1, and 2 * top_k more. With kept: 3 numbers, or 4 with entropy, and a second all-gather of 3 with kept_mass.
        Backward: as in ``linear_cross_entropy``.

    Raises:
        ValueError, TypeError: Shapes, dtypes, devices, options or shard do not fit. Raised before any kernel or collective.
        ValueError: The scale or temperature of a token is not finite, or the temperature not positive; a list of kept has an
            id twice, its offsets do not rise from 0 to the number of ids, or its whole tokens have lists or do not rise.
            Checked on a CPU, or with CCE_DIST_DEBUG=1. On a GPU the token's outputs are NaN instead; a repeated id counts
            once; wrong offsets give other lists, and wrong whole tokens other numbers.
        IndexError: One of ids or kept.ids is outside the vocabulary (on a CPU, or with CCE_DIST_DEBUG=1). On a GPU the id's
            log-probability is NaN instead (with kept, the token's outputs are), and its gradient is 0.
        RuntimeError: For double backward, forward-mode derivatives, torch.func and vmap; or if ranks disagree
            (with CCE_DIST_DEBUG=1).
    """
    options = checked(
        labels="ids", ignore_index=ignore_index, softcap=softcap, entropy=entropy, sum_p_squared=sum_p_squared,
        argmax=argmax, top_k=top_k, kept_mass=kept_mass, sequence_parallel=sequence_parallel, input_grad=input_grad,
        reduce_dtype=reduce_dtype, backend=backend, workspace_bytes=workspace_bytes, batch_invariant=batch_invariant,
    )  # fmt: skip
    logit_scale = _factor(checks.number, "logit_scale", logit_scale)
    temperature = _factor(checks.positive, "temperature", temperature)
    scale = _one_scale(logit_scale, temperature, options.softcap)
    if kept is not None:
        scale = None  # with lists the kernels take per-token factors
    x, shard, logits = operands.prepare(
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
        x = terms.with_factors(x, logit_scale, temperature, tokens, options.ignore_index, checks.has_values(ids))
    needs_kernels = kept is not None or options.batch_invariant
    call = operands.call_of(x, _spec(x, logits, shard, options), shard, options, needs_kernels)
    if options.batch_invariant and call.backend == "torch":
        raise ValueError("batch_invariant needs the Triton backend: sums of the torch backend depend on the batch")
    numbers = numbers_of(*((1.0, 1.0) if scale is None else (logit_scale, temperature)), options.softcap)
    if numbers is not None:
        # Divided here: before 2.13, torch compiles anew for each value of a symbol that no operator takes by itself.
        numbers = torch.stack((numbers[0] / numbers[1], numbers[2]))
    debug_ranks.check_ranks(shard, call.debug)
    if kept is not None:
        nll, lse, entropies = kept_ids.forward(x, kept, grad_weight_out, call, numbers)
        out = LogProbs((0.0 - nll).view(ids.shape), lse.view(tokens), entropies.view(tokens) if entropy else None)
        return _with_mass(out, x, kept, call, numbers) if kept_mass else out
    if not torch.compiler.is_compiling():
        call = call.decided(x.hidden, x.num_tokens, shard.group_size)
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
    ids = x.ids.masked_fill(kept_ids.is_empty(kept), call.spec.ignore_index)
    sweep = call._replace(spec=call.spec._replace(want=Want(grad=False)))
    found = op.forward(x._replace(ids=ids), None, sweep, numbers)
    mass = (out.lse.view(-1) - found.lse).exp().clamp(max=1.0).masked_fill(ids == call.spec.ignore_index, 0.0)
    full = (0.0 - found.nll).view(out.log_probs.shape)
    return out._replace(full_log_probs=full, kept_mass=mass.view(out.lse.shape))


def _spec(x: Operands, logits: ShardLogits, shard: VocabShard, options: Options) -> Spec:
    want = Want(
        grad=torch.is_grad_enabled() and x.requires_grad,
        entropy=options.entropy,
        largest=options.argmax,
        sum_p_squared=options.sum_p_squared,
        best=options.argmax,
        top_k=options.top_k,
    )
    return Spec(
        logits._replace(tensors=" ".join(x.head.tensors)), shard.vocab_size, options.ignore_index, want=want,
        workspace_bytes=options.workspace_bytes, num_ids=x.ids.shape[1] if x.ids.dim() == 2 else 1,
        invariant=options.batch_invariant,
    )  # fmt: skip


def _one_scale(logit_scale: float | Tensor, temperature: float | Tensor, softcap: float | None) -> float | None:
    """Combine scale and temperature into one number for all tokens, or return None if per-token factors are needed."""
    if isinstance(logit_scale, Tensor) or isinstance(temperature, Tensor):
        return None
    if softcap is None:
        return checks.number("logit_scale / temperature", logit_scale / temperature)
    return logit_scale if not is_symbol(temperature) and temperature == 1 else None


def _check_kept(kept: KeptIds, x: Operands, options: Options) -> None:
    kept_ids.check(kept, x)
    for name in ("sum_p_squared", "argmax", "top_k"):
        if getattr(options, name):
            raise ValueError(f"{name} is of the whole vocabulary: leave it out, or call without kept")
    if x.ids.dim() == 2:
        raise ValueError(f"ids must be one for each token with kept, got {x.ids.shape[1]}")


def _factor(check: Callable[[str, Any], float], name: str, value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return check(name, value)
    checks.tensors({name: value})
    if value.requires_grad:
        raise TypeError(f"{name} gets no gradient: pass a number, or a tensor that does not require one")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a number or a tensor of floating-point numbers, got {value.dtype}")
    return value
