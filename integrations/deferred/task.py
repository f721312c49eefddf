"""What a converted head knows: its options and shard, and whether it defers, which is decided when the model is called.

``Task.enter`` decides once, in the call of the model that runs:

    labels given                       deferred: there will be a loss
    none, but training and gradients   deferred: logits that are trained are only needed for a loss
    none otherwise                     computed: ``generate``, and passes of a reference model under ``no_grad``
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist.given import LinearCrossEntropyOutput
from cce_dist.integrations import peft
from cce_dist.integrations.deferred.logits import is_sharded
from cce_dist.integrations.deferred.subclass import check_weight
from cce_dist.integrations.deferred.tensor import TensorLogits, for_later
from cce_dist.integrations.patching import log
from cce_dist.loss import linear_cross_entropy
from cce_dist.shard import VocabShard


@dataclasses.dataclass(eq=False)
class Task:
    """What a converted head knows: its options and shard, whether it defers now, and counts of forwards and losses."""

    options: Any  # ModelOptions, unless a subclass has a loss of its own
    shard: VocabShard
    rows: Any = None  # fsdp.Rows where the weight stays split over data-parallel ranks
    # For each call of the model that is under way, outermost first: does the head defer?
    calls: list[bool] = dataclasses.field(default_factory=list)
    num_forwards: int = 0  # forwards in training that have ended
    num_losses: int = 0  # losses in training that the head was asked for
    num_asked: int = 0  # requests to the head in the current or last outermost forward
    trains: bool | None = None  # the model's mode in that forward; None: no forward was watched
    # Identifies the last forward in training that began: each puts a new list here. A count would make torch.compile
    # recompile for each number.
    last_training: list = dataclasses.field(default_factory=list)
    begun: bool = False  # between Watched.__call__ and Watched.forward
    thread: int = 0  # that called the model last

    def run(self, model: nn.Module, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a function of the model, its ``__call__`` or ``forward``, between ``enter`` and ``leave``."""
        output, depth = None, len(self.calls)
        try:
            args, kwargs = self.enter(model, args, kwargs)
            output = function(*args, **kwargs)
        finally:
            if len(self.calls) > depth:  # or enter has raised before the call began
                output = self.leave(model, args, kwargs, output)
        return output

    def enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Decide whether the head defers in this call. ``model`` is the module that runs: a copy may be in another mode."""
        trains = model.training and torch.is_grad_enabled()
        defers = trains or has_labels(model, args, kwargs)
        self.check_thread(model, defers)
        if not self.calls:
            self.num_asked = 0
        self.trains = model.training
        if self.rows is not None:
            self.rows.enter(model)
        if trains:
            self.last_training = []
            if not torch.compiler.is_compiling() and not self.num_forwards:
                peft.check_order(model)
        self.calls.append(defers)
        return args, kwargs

    def leave(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """End a call of the model; raise if it was in training, had labels, and nobody asked the head."""
        self.calls.pop()
        if self.calls or output is None:  # None: an error is under way
            return output
        if not (model.training and torch.is_grad_enabled()):
            return for_later(output, output_dtype(model))
        self.num_forwards = one_more(self.num_forwards)
        if has_labels(model, args, kwargs, ("labels",)) and not self.num_asked:
            raise RuntimeError(
                f"cce_dist: a forward of {type(model).__name__} in training ended without asking the head for its loss: other "
                "code computed the loss, from the head's weight (Liger's forward, TRL's fused head), or the head was replaced "
                "since (by PEFT, by resize_token_embeddings): leave that code out, or convert after the replacement"
            )
        return output

    def check_thread(self, model: nn.Module, defers: bool) -> None:
        """Raise if calls in several threads would share one head, which keeps the state of one call."""
        if torch.compiler.is_compiling():
            return
        here = threading.get_ident()
        if getattr(model, "_is_replica", False) or (self.calls and self.thread != here and (defers or any(self.calls))):
            raise RuntimeError(
                f"cce_dist: this {type(model).__name__} is called in several threads, as nn.DataParallel does, and its head "
                "serves one at a time: use DistributedDataParallel (torchrun), or cce_dist.revert(model)"
            )
        self.thread = here

    def count_request(self) -> None:
        self.num_asked = one_more(self.num_asked)

    def count_unwatched(self) -> None:
        """Count logits that are computed in training outside of any watched forward."""
        self.num_forwards = one_more(self.num_forwards)

    def deferring(self) -> bool:
        return bool(self.calls) and self.calls[-1]

    def training(self, head: Any) -> bool:
        """Return whether a loss belongs to training. The mode of the model decides, not the mode of its head."""
        return head.training if self.trains is None else self.trains

    def defer(self, head: Any, hidden: Tensor, **others: Any) -> Any:
        """Return what the head returns instead of logits."""
        if others:  # PEFT's adapter_names
            raise ValueError(
                f"cce_dist: the head is called with {', '.join(others)}, for which there is no loss from hidden states: call "
                "the model without labels, in eval() or under no_grad"
            )
        check_weight(head)
        if self.shard.group is None and self.rows is None and self.shard.num_rows == self.shard.vocab_size:
            rows = peft.num_rows(head)
            if rows is not None and rows != self.shard.num_rows:  # resized since
                self.shard = VocabShard(0, rows, rows)
        return TensorLogits(head, self, hidden)

    def check_place(self, head: Any, ddp_follows: bool) -> None:
        """Raise if the loss is asked for after the model's forward and that does not work."""
        if self.calls:
            return
        if ddp_follows:
            raise RuntimeError(
                "cce_dist: with find_unused_parameters or static_graph, DistributedDataParallel must find the loss's graph in "
                "the output of the model's forward: give the model labels, or leave these options off "
                "(ddp_find_unused_parameters=False in TrainingArguments)"
            )
        if self.needs_forward(head):
            raise RuntimeError(
                "cce_dist: the loss must be computed in the model's forward, where FSDP and ZeRO-3 gather the head's weight, "
                "whose output starts DeepSpeed's backward: give the model labels, in place of a compute_loss_func or a loss "
                "of the training loop"
            )

    def needs_forward(self, head: Any) -> bool:
        """Return whether the loss must be computed in the model's forward, because the weight is whole only there."""
        return is_sharded(head.weight) or peft.num_rows(head) is None

    def aux(self) -> tuple[str, ...]:
        """Return the outputs of ``linear_cross_entropy`` besides the loss that ``keep`` uses."""
        return ()

    def keep(self, output: LinearCrossEntropyOutput, valid: Tensor) -> Tensor:
        """Keep what is needed of the outputs, and return the loss. ``valid`` marks labels that are not ignored."""
        return output.loss

    def loss(
        self,
        head: Any,
        hidden: Tensor,
        target: Tensor,
        *,
        label_smoothing: float,
        training: bool,
        added: Tensor | None = None,
        **call: Any,
    ) -> Any:
        """Return what ``linear_cross_entropy`` returns for this head and its options.

        The options' label smoothing and z-loss apply to training alone, so that losses of evaluation can be compared.
        """
        options = self.options
        if training:
            self.num_losses = one_more(self.num_losses)
            label_smoothing = label_smoothing or options.label_smoothing
            call["z_loss_weight"] = options.z_loss_weight
        hidden, weight, bias = peft.operands(head, hidden)
        compute = linear_cross_entropy
        if self.rows is not None:
            compute = self.rows.loss
            weight, bias, added = self.rows.operands(hidden, weight, bias, added)
        return compute(
            hidden,
            weight,
            target,
            linear_bias=peft.sum_of_biases(bias, added),
            label_smoothing=label_smoothing,
            return_aux=self.aux() or False,
            **options.call("grad_filter", "reduce_dtype"),
            **call,
        )

    def require(self, name: str) -> None:
        """Raise unless the head was asked for a loss in training."""
        if self.num_losses:
            return
        if not self.num_forwards:
            raise RuntimeError("cce_dist: no forward in training has ended yet: call require after the first step")
        raise RuntimeError(
            f"cce_dist: {self.num_forwards} forward(s) in training ended, and none asked the head {name} for its loss: "
            "other code computed the loss, maybe from the head's weight, or called a part of the model that was converted"
        )

    def announce(self, name: str) -> None:
        """Say in one line where the loss comes from. One rank calls this."""
        shard = self.shard if self.rows is None else self.rows.shard
        rank, size = (0, 1) if shard.group is None else (shard.group.rank(), shard.group.size())
        log(
            f"cce_dist: the loss comes from hidden states; head {name}, shard {rank} of {size}: rows [{shard.start}, "
            f"{shard.stop}) of {shard.vocab_size}; {self.options}"
        )

    def __deepcopy__(self, memo: dict) -> Any:
        """Share options and process groups, which cannot be copied, with the copy. Calls and counts start anew."""
        new = memo[id(self)] = copy.copy(self)  # noted first: the rows may lead back to the task
        new.calls, new.last_training, new.num_forwards, new.num_losses, new.num_asked = [], [], 0, 0, 0
        new.rows = copy.deepcopy(self.rows, memo)
        return new


def one_more(count: int) -> int:
    """Return the next count. Compiled code counts to 1 only, because torch.compile would recompile for each number."""
    return 1 if torch.compiler.is_compiling() else count + 1


def output_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype that FSDP2 casts the tensors of a model's output to, or None."""
    state = getattr(model, "_get_fsdp_state", None)
    return None if state is None else state()._mp_policy.output_dtype


def has_labels(
    model: nn.Module, args: tuple, kwargs: dict, names: tuple[str, ...] = ("labels", "shift_labels")
) -> bool:
    """Return whether a call of a model has labels, shifted already or not."""
    return any(argument(type(model).forward, name, args, kwargs) is not None for name in names)


def argument(method: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """Return the argument ``name`` of a call of a method, or None. ``args`` do not include self."""
    if name in kwargs or not args:
        return kwargs.get(name)
    names = list(_signature(method).parameters)[1:]
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else kwargs.get(name)


_signature = functools.cache(inspect.signature)
