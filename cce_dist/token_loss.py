"""``token_loss``: the caller's function that turns log-probabilities of tokens into losses.

In one pass (``groups.py``) autograd differentiates the function for each group of tokens, and the kernels multiply the logits'
gradients by these derivatives. In two passes the function is a part of the caller's graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.utils._pytree import keystr, tree_map, tree_map_with_path

from cce_dist import checks, merge
from cce_dist.autograd import leaves_of
from cce_dist.kernels import Upstream


class TokenLossOutput(NamedTuple):
    """What ``linear_cross_entropy`` returns with ``token_loss`` and ``return_aux=True``.

    All but ``loss`` have target's shape and no gradient, and are 0 for ignored tokens.

    Attributes:
        loss: The loss that ``linear_cross_entropy`` returns without ``return_aux``.
        log_probs: Log-probability of the label.
        entropy: Entropy of the softmax, in nats; None unless ``token_loss.needs_entropy`` is True.
        losses: The losses that ``token_loss`` returned.
        metrics: The dict or tuple of metrics that ``token_loss`` returned, or None.
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    losses: Tensor
    metrics: Any = None


class TokenLoss(NamedTuple):
    """A checked ``token_loss`` with its inputs, for the tokens of a call or of a group."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]  # [N] each
    needs_entropy: bool
    debug: bool  # check that a token's loss does not depend on other tokens; the check waits for the device
    outputs: list[Any] | None  # each group appends its outputs; None: no outputs are wanted
    have_gradient: list[bool]  # whether the losses of each group have a gradient
    group: ProcessGroup | None = None  # ranks whose losses are compared

    def of_tokens(self, part: slice) -> TokenLoss:
        return self._replace(inputs=tuple(values[part] for values in self.inputs))

    def losses(self, nll_N: Tensor, entropy_N: Tensor | None, counts_N: Tensor) -> Tensor:
        """Return the losses, connected to the arguments by autograd; ``check_gradient`` follows the last group.

        Tokens that do not count keep their log-probability: 0 for ignored tokens, NaN for labels outside the vocabulary.
        """
        if self.group is not None:
            self._check_ranks(self.group, nll_N, entropy_N, counts_N)
        log_probs_N = -nll_N
        with torch.autocast(nll_N.device.type, enabled=False):
            if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
                losses_N, metrics = self._call_of_counted(log_probs_N, entropy_N, counts_N)
            else:
                losses_N, metrics = self._call(log_probs_N, entropy_N)
            self.have_gradient.append(losses_N.requires_grad or not nll_N.requires_grad)
            if not torch.compiler.is_compiling():
                _check_leaves(losses_N, (nll_N, entropy_N))
            if self.debug and not torch.compiler.is_compiling():
                self._check_elementwise(losses_N.detach(), log_probs_N.detach(), entropy_N, counts_N)
        log_probs_N = log_probs_N.detach()
        losses_N = torch.where(counts_N, losses_N.to(log_probs_N.dtype), log_probs_N)
        if self.outputs is not None:
            outputs = [_masked(values, counts_N) for values in (log_probs_N, entropy_N, losses_N)]
            metrics = tree_map_with_path(lambda path, x: _masked(x, counts_N, f"metrics{keystr(path)}"), metrics)
            self.outputs.append((*outputs, metrics))
        return losses_N

    def _check_ranks(self, group: ProcessGroup, nll_N: Tensor, entropy_N: Tensor | None, counts_N: Tensor) -> None:
        """Raise on every rank if the function raises an error on one, or if its losses or their derivatives differ."""
        outputs = None if self.outputs is None else []  # metrics are checked
        token = self._replace(group=None, outputs=outputs, have_gradient=[])
        with merge.agreement("token_loss", group) as facts:
            if nll_N.requires_grad:
                ids_N = counts_N.int() - 1  # of which ``differentiated`` takes the sign
                losses_N, slopes = token.differentiated(nll_N, entropy_N, ids_N, torch.ones_like(nll_N))
                slopes = [s.masked_fill(~counts_N, 0.0) for s in (slopes.nll, slopes.entropy) if s is not None]
                facts["derivatives"] = merge.digest(torch.stack(slopes))
            else:
                losses_N = token.losses(nll_N, entropy_N, counts_N)
            facts |= {"losses": merge.digest(losses_N), "losses (requires_grad)": token.have_gradient}

    def differentiated(
        self, nll_N: Tensor, entropy_N: Tensor | None, ids_N: Tensor, upstream_N: Tensor
    ) -> tuple[Tensor, Upstream]:
        leaves = [x.detach().requires_grad_() for x in (nll_N, entropy_N) if x is not None]
        # The hooks replace a checkpoint's, which would compute the whole forward again for each group. torch.func allows none.
        top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
        has_hooks = top_hooks(True) is not None
        hooks = saved_tensors_hooks(lambda x: (x, x._version), _unpacked) if has_hooks else nullcontext()
        with torch.enable_grad(), hooks:
            losses_N = self.losses(leaves[0], leaves[1] if self.needs_entropy else None, ids_N >= 0)
            gradients: Any = [None] * len(leaves)
            if losses_N.requires_grad:
                gradients = torch.autograd.grad(losses_N, leaves, upstream_N, allow_unused=True)
        gradient = torch.zeros_like(nll_N) if gradients[0] is None else gradients[0]
        return losses_N.detach(), Upstream(nll=gradient, entropy=gradients[1] if self.needs_entropy else None)

    def check_gradient(self) -> None:
        found = any(self.have_gradient)
        self.have_gradient.clear()
        if not found:
            raise ValueError(
                "the losses of token_loss have no gradient: the function detaches log_probs, or uses no_grad()"
            )

    def output(self, loss: Tensor, shape: torch.Size) -> TokenLossOutput:
        groups = self.outputs or []
        joined = tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts).view(shape), *groups)
        return TokenLossOutput(loss, *joined)

    def _call(self, log_probs_N: Tensor, entropy_N: Tensor | None) -> tuple[Tensor, Any]:
        # The function may change copies in place. log_probs_N and entropy_N are outputs too.
        copies = (None if numbers is None else numbers.clone() for numbers in (log_probs_N, entropy_N))
        try:
            result = self.function(*copies, *self.inputs)
        except TypeError as error:
            raise self._explained(error) from error
        losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        losses_N = _checked_output(losses, log_probs_N)
        if losses_N.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"token_loss must return float32 or float64 losses, got {losses_N.dtype}")
        return losses_N, metrics

    def _explained(self, error: TypeError) -> TypeError:
        how = f"token_loss is called with log_probs, entropy and {len(self.inputs)} token_inputs"
        try:
            inspect.signature(self.function).bind(None, None, *self.inputs)
        except TypeError as wrong:
            return TypeError(f"{how}: {wrong}")
        except ValueError:  # a built-in function without a signature
            return TypeError(f"{how}: {error}")
        if "NoneType" in str(error) and not self.needs_entropy:
            return TypeError(f"{how}; entropy is None unless token_loss.needs_entropy is True: {error}")
        return TypeError(f"token_loss: {error}")

    def _call_of_counted(self, log_probs_N: Tensor, entropy_N: Tensor | None, counts_N: Tensor) -> tuple[Tensor, Any]:
        """Call the function with the first counted token's values in place of those of tokens that do not count.

        The latter may hold anything, and autograd's anomaly mode stops at a NaN in a gradient, also at one that is masked.
        """
        if not counts_N.any():
            losses_N, metrics = self._call(log_probs_N.detach(), None if entropy_N is None else entropy_N.detach())
            return losses_N + 0.0 * log_probs_N.masked_fill(log_probs_N.isnan(), 0.0), metrics
        here_N = torch.where(counts_N, torch.arange(len(counts_N), device=counts_N.device), counts_N.int().argmax())
        token = self._replace(inputs=tuple(values[here_N] for values in self.inputs))
        return token._call(log_probs_N[here_N], None if entropy_N is None else entropy_N[here_N])

    def _check_elementwise(
        self, losses_N: Tensor, log_probs_N: Tensor, entropy_N: Tensor | None, counts_N: Tensor
    ) -> None:
        half = len(losses_N) // 2
        for part in (slice(0, half), slice(half, None)):
            entropy = None if entropy_N is None else entropy_N.detach()[part]
            again_N, _ = self.of_tokens(part)._call(log_probs_N[part], entropy)
            same_N = torch.isclose(again_N, losses_N[part], rtol=1e-3, atol=1e-5, equal_nan=True)
            if not same_N[counts_N[part]].all():
                raise ValueError("token_loss is not elementwise: it returns other losses for half of the tokens")


def checked_token_loss(
    function: Any, inputs: Any, target: Tensor, excluded: dict[str, bool], return_aux: Any, debug: bool
) -> TokenLoss | None:
    """Check ``token_loss`` and ``token_inputs``. Return None without a function.

    ``excluded``: arguments that cannot be combined with a ``token_loss``, and whether the call gives them.
    """
    if not isinstance(inputs, (tuple, list)) or not (callable(function) or function is None):
        raise TypeError(
            "token_loss must be a function, and token_inputs a tuple of tensors, got "
            f"{type(function).__name__} and {type(inputs).__name__}"
        )
    if function is None:
        if inputs:
            raise ValueError("token_inputs are given, but no token_loss")
        return None
    if getattr(function, "__module__", "") == "cce_dist.objectives" and "." not in function.__qualname__:
        raise TypeError(
            f"token_loss is objectives.{function.__name__} itself: call it, objectives.{function.__name__}()"
        )
    names = [name for name, is_given in excluded.items() if is_given]
    if names:
        raise ValueError(f"token_loss cannot be combined with {', '.join(names)}")
    checks.boolean("return_aux with token_loss", return_aux)
    for number, values in enumerate(inputs):
        name = f"token_inputs[{number}]"
        checks.like_target(name, values, target)
        if values.requires_grad:
            raise TypeError(f"{name} requires a gradient, and would get none: detach it")
    needs_entropy = bool(getattr(function, "needs_entropy", False))
    outputs = [] if return_aux else None
    return TokenLoss(function, tuple(values.reshape(-1) for values in inputs), needs_entropy, debug, outputs, [])


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor. Autograd does not check the versions of tensors with hooks."""
    saved, version = packed
    if saved._version != version:
        raise RuntimeError("token_loss changed a tensor in place that its gradient needs")
    return saved


def _check_leaves(losses_N: Tensor, arguments: tuple[Tensor | None, ...]) -> None:
    done = [values.grad_fn for values in arguments if values is not None]
    for leaf in leaves_of(losses_N, done):
        if not any(leaf is values for values in arguments):
            raise ValueError(f"token_loss uses a tensor {list(leaf.shape)} that requires a gradient: it would get none")


def _checked_output(values: Any, like_N: Tensor, name: str = "losses") -> Tensor:
    wanted = f"token_loss must return tensors with one number per token, {list(like_N.shape)}, got {name}"
    if not isinstance(values, Tensor):
        raise TypeError(f"{wanted} of type {type(values).__name__}")
    if values.shape != like_N.shape:
        advice = "" if name == "losses" else ": take means of what the call returns"
        raise ValueError(f"{wanted} {list(values.shape)}{advice}")
    return values


def _masked(values: Any, counts_N: Tensor, name: str = "losses") -> Tensor | None:
    """Return an output without gradient, and with 0 for tokens that do not count."""
    return None if values is None else _checked_output(values, counts_N, name).detach().masked_fill(~counts_N, 0)
