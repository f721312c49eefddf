"""``cce-dist plan``: what the head costs, what fits, and how to cut the pipeline, before a GPU is rented.

Reading order: ``sizes`` (models, and the reader of a config.json), ``devices`` (constants, with their provenance),
``head`` (bytes and seconds of a loss), ``layers`` (bytes and seconds of a layer), ``cut`` (layers of each stage, and how
frameworks are told), ``planning`` (all of it for a layout, and more GPUs), ``command`` (tables, JSON and the picture).
"""

from __future__ import annotations

from cce_dist.tools.plan.command import add_arguments, run
from cce_dist.tools.plan.layers import Layout
from cce_dist.tools.plan.planning import Plan, plan
from cce_dist.tools.plan.sizes import Model

__all__ = ["Layout", "Model", "Plan", "add_arguments", "plan", "run"]
