"""``cce-dist plan``: what the head costs, what fits, and how to cut the pipeline, before a GPU is rented.

Reading order: sizes, devices, head, layers, cut, planning, command.
"""

from __future__ import annotations

from cce_dist.tools.plan.command import add_arguments, run
from cce_dist.tools.plan.layers import Layout
from cce_dist.tools.plan.planning import Plan, plan
from cce_dist.tools.plan.sizes import Model

__all__ = ["Layout", "Model", "Plan", "add_arguments", "plan", "run"]
