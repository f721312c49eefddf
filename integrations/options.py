"""The options that every adapter shares, and the one place that reads them from names and numbers.

A section of ds_config, flags of a command line and keyword arguments hold the same keys, of which ``KEYS`` says what each may
be. An adapter's ``Options`` is a subclass whose further fields are further keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch

from cce_dist.call import BACKENDS, Backend
from cce_dist.filter import GradFilter

if TYPE_CHECKING:
    from typing_extensions import Self

SECTION = "cce_dist"  # of ds_config
Filter = Literal["off", "compensated", "plain"]
FILTERS: tuple[str, ...] = get_args(Filter)
REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _one_of(names: Iterable[str]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in names, f"one of {', '.join(names)}"


NUMBER, WHOLE, TEXT, SWITCH = "a number", "a whole number", "a string", "true or false"
MAYBE_WHOLE = "a whole number or none"
_TYPES: dict[str, Any] = {NUMBER: (int, float), WHOLE: int, TEXT: str, SWITCH: bool, MAYBE_WHOLE: (int, type(None))}
KEYS: dict[str, tuple] = {  # the kind of a key's values, then which of them are allowed, as a function and in words
    "enabled": (SWITCH,),
    "filter": (TEXT, *_one_of(FILTERS)),
    "filter_eps": (NUMBER, lambda x: 0 <= x < 1, "in [0, 1)"),
    "filter_hidden": (SWITCH,),
    "filter_weight": (SWITCH,),
    "filter_always": (SWITCH,),
    "label_smoothing": (NUMBER, lambda x: 0 <= x <= 1, "in [0, 1]"),
    "z_loss_weight": (NUMBER, lambda x: 0 <= x < math.inf, "finite and not negative"),
    "batch_invariant": (SWITCH,),
    "backend": (TEXT, *_one_of(BACKENDS)),
    "workspace_bytes": (MAYBE_WHOLE, lambda x: x is None or x > 0, "positive"),
    "reduce_dtype": (TEXT, *_one_of(REDUCE_DTYPES)),
    "head": (TEXT,),
    "sequence_mean": (SWITCH,),
    "report": (SWITCH,),
    "shard_over": (SWITCH,),
    "vocab_size": (WHOLE, lambda x: x > 0, "positive"),
}


class ConvertOptions(TypedDict, total=False):
    """The options of ``cce_dist.convert``, which documents them."""

    filter: Filter
    filter_eps: float
    filter_hidden: bool
    filter_weight: bool
    filter_always: bool
    label_smoothing: float
    z_loss_weight: float
    backend: Backend
    workspace_bytes: int | None
    reduce_dtype: Literal["float32", "bfloat16", "float16"]
    head: str


@dataclasses.dataclass(frozen=True)
class Options:
    """How a converted model computes its loss.

    Args:
        grad_filter: None for exact gradients, or how to filter them. Keys: ``filter`` (one of ``FILTERS``), ``filter_eps``,
            ``filter_hidden``, ``filter_weight`` and ``filter_always``.
        backend, workspace_bytes: As in ``linear_cross_entropy``; None: the shapes choose the budget.
    """

    grad_filter: GradFilter | None = None
    backend: str = dataclasses.field(default="auto", kw_only=True)
    workspace_bytes: int | None = dataclasses.field(default=None, kw_only=True)

    def call(self, *names: str) -> dict[str, Any]:
        """Return the backend, the budget and the named options as keyword arguments of a loss."""
        return {name: getattr(self, name) for name in ("backend", "workspace_bytes", *names)}

    @classmethod
    def known(cls) -> list[str]:
        # A field's default is an attribute of the class.
        return [key for key in KEYS if key.startswith("filter") or hasattr(cls, key)]

    @classmethod
    def read(cls, values: Mapping[str, Any], spell: Callable[[str], str], what: str = "this call") -> Self:
        """Make options of keys and their values.

        Args:
            values: By key; a key that is missing has its default.
            spell: How a message names a key, as the user wrote it: '"cce_dist.filter_eps"', "--cce-filter-eps".
            what: How a message names all of the keys.

        Raises:
            ValueError: An unknown key, a value of another type or out of range, ``filter_eps`` and the like without ``filter``;
                the message names the key.
        """
        for key, value in values.items():
            if key not in cls.known():
                raise ValueError(f'{what} has no key "{key}"; it has {", ".join(cls.known())}')
            kind, *range_ = KEYS[key]
            if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != SWITCH):
                choices = f", {range_[1]}" if range_ and kind == TEXT else ""
                got = type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)
                raise ValueError(f"{spell(key)} must be {kind}{choices}, got {got}")
            if range_ and not range_[0](value):
                raise ValueError(f"{spell(key)} must be {range_[1]}, got {value!r}")
        lost = [key for key in values if key.startswith("filter_")] if "filter" not in values else []
        if lost:
            raise ValueError(f"{spell(lost[0])} has no effect: no filter is named")
        fields = {key: value for key, value in values.items() if hasattr(cls, key)}
        if "reduce_dtype" in fields:
            fields["reduce_dtype"] = REDUCE_DTYPES[fields["reduce_dtype"]]
        if values.get("filter", "off") != "off":
            of_filter = {key[len("filter_") :]: value for key, value in values.items() if key.startswith("filter_")}
            fields["grad_filter"] = GradFilter(compensate=values["filter"] == "compensated", **of_filter)
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class ScoreOptions(Options):
    """Options of log-probabilities: ``batch_invariant`` as in ``linear_log_probs``.

    Raises:
        ValueError: ``batch_invariant`` is set with ``backend="torch"``. If "auto" chooses torch, the call raises.
    """

    batch_invariant: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.batch_invariant and self.backend == "torch":
            raise ValueError("batch_invariant needs the Triton backend: sums of the torch backend depend on the batch")


@dataclasses.dataclass(frozen=True)
class TrainOptions(Options):
    """Options that a loss has in training only, so that losses of evaluations stay comparable."""

    label_smoothing: float = 0.0  # where the model's own call of ``F.cross_entropy`` says none
    z_loss_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class ModelOptions(TrainOptions):
    """Options of a model that calls ``F.cross_entropy`` itself."""

    reduce_dtype: torch.dtype | None = None  # as in ``linear_cross_entropy``
    head: str = ""  # the module that makes the logits; "": the output embedding, or one called lm_head or embed_out
