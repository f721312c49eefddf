"""``Options``: the checked arguments of a public function. ``Call``: everything an operator takes besides tensors.

A ``Call`` consists of plain values (numbers, strings, bools), so that an operator of torch.library can take them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import torch
from torch import Tensor

from cce_dist import decide
from cce_dist.checks import boolean, choice, has_values, integer, kind, number, positive, tensors
from cce_dist.decide import BACKENDS, Way, Where
from cce_dist.filter import GradFilter
from cce_dist.kernels import Spec
from cce_dist.merge import Layout
from cce_dist.shard import VocabShard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_TOP_K = 1024
AUX = ("nll", "lse", "target_logit", "entropy", "z_loss", "max_logit", "label_is_max")
Reduction = Literal["none", "mean", "sum"]
InputGrad = Literal["summed", "partial"]
Backend = Literal["auto", "triton", "torch"]


class LossOptions(TypedDict, total=False):
    """The keyword arguments of ``linear_cross_entropy`` except ``return_aux``. They are documented there."""

    linear_bias: Tensor | None
    weight: Tensor | None
    ignore_index: int | None
    reduction: Reduction
    label_smoothing: float
    logit_scale: float | Tensor
    softcap: float | None
    z_loss_weight: float | Tensor
    num_tokens: float | Tensor | None
    shard: VocabShard | None
    sequence_parallel: bool
    input_grad: InputGrad
    reduce_dtype: torch.dtype | None
    grad_filter: GradFilter | None
    backend: Backend
    workspace_bytes: int | None
    expected_weights: Tensor | bool
    grad_weight_out: Tensor | None
    options: None


class ExplainOptions(LossOptions, total=False):
    """All keyword arguments of ``linear_cross_entropy``."""

    return_aux: bool | Collection[str]
    token_loss: Callable[..., Any] | None
    token_inputs: Sequence[Tensor]


def is_symbol(value: Any) -> bool:
    """Whether torch.compile traces a number as a symbol, because its value changes from call to call."""
    if value is None or isinstance(value, Tensor) or not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(value)


def numbers_of(*values: float | Tensor | None) -> Tensor | None:
    """Return the numbers as a CPU tensor if one is a symbol, else None. An operator takes no symbol as an argument."""
    if not any(is_symbol(value) for value in values):
        return None
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([zero if value is None else zero + value for value in values])


def concrete(value: float) -> float:
    return 2.0 if is_symbol(value) else value  # 0 or 1 would select special cases


def _plain(name: str, value: Any) -> float:
    """Return the value of a number or of a 0-d tensor without gradient. Reading a tensor on a GPU waits for it."""
    if not isinstance(value, float) and isinstance(value, Tensor):
        tensors({name: value})
        if value.requires_grad:
            raise TypeError(f"{name} gets no gradient: pass a number, or a tensor that does not require one")
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a 0-d tensor, got shape {tuple(value.shape)}")
        if not torch.compiler.is_compiling() and not has_values(value):
            raise ValueError(f"{name} is a FakeTensor, which has no value: pass a number")
        value = value.item()
    return number(name, value)


def _z_loss_weight(name: str, value: Any) -> float | Tensor:
    if torch.compiler.is_compiling() and isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
        return value
    return _plain(name, value)


def _ignore_index(name: str, value: Any) -> int:
    return -100 if value is None else integer(name, value)  # None is the default of F.linear_cross_entropy


def _smoothing(name: str, value: Any) -> float:
    value = _plain(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}")
    return value


def _scale(name: str, value: Any) -> float:
    return _plain(name, value.detach() if isinstance(value, Tensor) else value)  # terms.learn_scale adds its gradient


def _softcap(name: str, value: Any) -> float | None:
    return None if value is None else positive(name, _plain(name, value), ", or None")


def checked_num_tokens(name: str, value: Any) -> Any:
    """Return a divisor: a positive number, a 0-d tensor that may hold 0, or None. A tensor on a GPU is not read."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        wide = positive(name, value)
        return value if isinstance(value, (int, torch.SymInt)) and value < 2**63 else wide
    tensors({name: value})
    if value.dim() != 0:
        raise ValueError(f"{name} must be a number or a 0-d tensor, got shape {tuple(value.shape)}")
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name} must be a number or a 0-d tensor of numbers, got {value.dtype}")
    if value.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise TypeError(f"{name} is {value.dtype}: pass a signed integer")
    if value.is_floating_point() and value.itemsize < 4:
        raise TypeError(
            f"{name} is {value.dtype}, which rounds a count of tokens; FSDP2's mixed precision casts floating tensors that go "
            "through forward: pass an integer tensor or a number"
        )
    if value.is_cpu and has_values(value) and value != 0:
        positive(name, value.item(), " or 0")
    return value


def _return_aux(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return AUX if value else ()
    if not isinstance(value, (tuple, list, set, frozenset)) or not value:
        raise TypeError(f"{name} must be a bool or a sequence of names, got {value!r}")
    for wanted in value:
        choice(name, wanted, AUX)
    return tuple(known for known in AUX if known in value)


def _reduce_dtype(name: str, value: Any) -> torch.dtype | None:
    if value is not None and not (isinstance(value, torch.dtype) and value in DTYPES):
        raise TypeError(f"{name} must be float32, bfloat16, float16 or None, got {value}")
    return value


def _top_k(name: str, value: Any) -> int:
    if integer(name, value, 0) > MAX_TOP_K:
        raise ValueError(f"{name} must be at most {MAX_TOP_K}, got {value}")
    return int(value)


def _workspace(name: str, value: Any) -> int:
    return 0 if value is None else integer(name, value, 1)


class Options(NamedTuple):
    """The options of a public function that are neither tensors nor a shard, under their public names.

    Each annotation holds the type of the checked value, and the function that checks and converts what the caller passed.
    """

    # The name of the labels: "ids" in ``linear_log_probs``
    labels: Annotated[str, partial(choice, allowed=("target", "ids"))] = "target"
    ignore_index: Annotated[int, _ignore_index] = -100
    reduction: Annotated[str, partial(choice, allowed=get_args(Reduction))] = "mean"
    label_smoothing: Annotated[float, _smoothing] = 0.0
    logit_scale: Annotated[float, _scale] = 1.0
    softcap: Annotated[float | None, _softcap] = None
    z_loss_weight: Annotated[float | Tensor, _z_loss_weight] = 0.0
    num_tokens: Annotated[float | Tensor | None, checked_num_tokens] = None
    sequence_parallel: Annotated[bool, boolean] = False
    input_grad: Annotated[str, partial(choice, allowed=get_args(InputGrad))] = "summed"
    reduce_dtype: Annotated[torch.dtype | None, _reduce_dtype] = None
    grad_filter: Annotated[GradFilter | None, partial(kind, wanted=GradFilter)] = None
    return_aux: Annotated[tuple[str, ...], _return_aux] = ()
    backend: Annotated[str, partial(choice, allowed=BACKENDS)] = "auto"
    workspace_bytes: Annotated[int, _workspace] = 0  # 0: chosen from the shapes
    # Whether forward may assume proportions of the upstream gradients
    expected_weights: Annotated[bool, boolean] = True
    # Only in ``linear_log_probs``
    entropy: Annotated[bool, boolean] = False
    sum_p_squared: Annotated[bool, boolean] = False
    argmax: Annotated[bool, boolean] = False
    top_k: Annotated[int, _top_k] = 0
    kept_mass: Annotated[bool, boolean] = False
    batch_invariant: Annotated[bool, boolean] = False


# Checked options are cached if all arguments have these types: equal type and value give an equal result.
_CACHEABLE = frozenset({bool, int, float, str, type(None), torch.dtype, GradFilter})


def are_plain(values: Any) -> bool:
    return _CACHEABLE.issuperset(map(type, values))


def checked(**given: Any) -> Options:
    if torch.compiler.is_compiling() or not are_plain(given.values()):
        return _check(**given)
    return _check_once(**given)


def _check(**given: Any) -> Options:
    options = Options(**{name: _CHECKS[name](name, value) for name, value in given.items()})
    if options.num_tokens is not None and options.reduction != "mean":
        raise ValueError(f'num_tokens divides the mean; reduction is "{options.reduction}"')
    if options.sequence_parallel and options.input_grad == "partial":
        raise ValueError('input_grad="partial" has no meaning with sequence_parallel: dE comes back as the slice')
    return options


_check_once = lru_cache(maxsize=256, typed=True)(_check)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Options, include_extras=True).items()
}


def layout_of(shard: VocabShard, options: Options) -> Layout:
    name = "" if options.reduce_dtype is None else str(options.reduce_dtype).removeprefix("torch.")
    return Layout(shard.group_name, options.sequence_parallel, options.input_grad == "partial", name)


class Call(NamedTuple):
    """Everything the operator of a loss or of log-probabilities takes besides tensors."""

    spec: Spec  # what is computed on this shard
    layout: Layout = Layout()
    backend: str = "torch"  # or "triton"
    debug: bool = False  # check labels on a GPU too, which waits for the GPU
    argument: str = "target"  # the labels' name in messages
    way: Way = Way()  # once it is decided, spec has the memory budget

    def where(self, hidden: Tensor, num_ranks: int, upstream: str = "unknown", has_buffer: bool = False) -> Where:
        return Where(self.backend, str(hidden.dtype), self.layout.sums(num_ranks), upstream, has_buffer)

    def decided(self, hidden: Tensor, num_tokens: int, num_ranks: int, where: Where | None = None) -> Call:
        """Return the call with a way, its memory budget, and ``Spec.alone``, unless it has a way."""
        if self.way.backend:
            return self
        sizes = decide.sizes_of_even_shard(hidden, num_tokens, self.spec.vocab_size, num_ranks)
        way = decide.way_now(sizes, self.spec, where or self.where(hidden, num_ranks))
        spec = self.spec._replace(workspace_bytes=way.workspace_bytes, alone=not self.layout.sums(num_ranks))
        return self._replace(spec=spec, way=way)

    def with_numbers(self, numbers: Tensor) -> Call:
        """Return the call with the values of ``numbers_of(logit_scale, softcap)`` in place of placeholders."""
        scale, softcap = numbers.tolist()
        logits = self.spec.logits._replace(logit_scale=scale, softcap=softcap)
        return self._replace(spec=self.spec._replace(logits=logits))
