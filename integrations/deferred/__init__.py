"""The deferral under every adapter: logits that nobody computes until somebody asks for their loss.

A converted head returns ``DeferredLogits``: no numbers, but the hidden states and the weight that the head was called with. The
model's own code may scale them and, in the end, asks for their loss, which the head then computes from the hidden states.

Reading order: ``logits`` (what all deferred logits can do), ``tensor`` (those that model code takes for a tensor), ``taken``
(subclasses of the classes of a head and its model), ``find`` (the head of a model), ``task`` (when it defers, and its loss).
"""

from cce_dist.integrations.deferred import task, tensor
from cce_dist.integrations.deferred.find import check_class, checked, find_head, innermost
from cce_dist.integrations.deferred.logits import DeferredLogits, NotComputedError
from cce_dist.integrations.deferred.taken import Head, Watched, give_back, subclass, take, watch
from cce_dist.integrations.deferred.task import Task, argument, has_labels
from cce_dist.integrations.deferred.tensor import TensorLogits

__all__ = [
    "DeferredLogits",
    "Head",
    "NotComputedError",
    "Task",
    "TensorLogits",
    "Watched",
    "argument",
    "check_class",
    "checked",
    "find_head",
    "give_back",
    "has_labels",
    "innermost",
    "subclass",
    "take",
    "task",
    "tensor",
    "watch",
]
