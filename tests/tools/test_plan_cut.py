"""A pipeline that is cut unevenly trains as an even one does: the engines of ``pretrain`` on two ranks, on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cce_dist.tools.pretrain.ranks import Ranks
from cce_dist.tools.pretrain.recipe import PRESETS, Recipe
from cce_dist.tools.ranks import run_ranks


def _losses(engine: str, cut: str) -> list[float]:
    from importlib import import_module

    from cce_dist.tools.pretrain.recipe import ENGINES

    shape = dataclasses.replace(PRESETS["toy"], num_layers=4)
    recipe = Recipe(shape=shape, engine=engine, pp=2, layers_per_stage=cut, batch_size=8, accumulate=2, warmup=2)
    ranks = Ranks(torch.device("cpu"), dist.get_rank(), 2, pp=2)
    made = getattr(import_module(f"cce_dist.tools.pretrain.engines.{engine}"), ENGINES[engine])(recipe, ranks)
    ids = np.random.default_rng(0).integers(shape.vocab_size, size=(3, 8, shape.seq_len + 1))
    losses = [made.step(step, batch[:, :-1], batch[:, 1:]).loss.item() for step, batch in enumerate(ids, 1)]
    if cut != "even":
        assert made.layout["layers of the stages"] == [int(count) for count in cut.split(",")]
    return losses


def _both_cuts(engine: str, cut: str) -> None:
    warnings.filterwarnings("ignore")
    if engine == "megatron":
        from megatron.core import parallel_state
        from megatron_on_cpu import use_cpu

        use_cpu()
    even = _losses(engine, "even")
    if engine == "megatron":
        parallel_state.destroy_model_parallel()
    else:
        from deepspeed.utils import groups

        groups._release_process_group_references()
    assert even[0] != even[2] and _losses(engine, cut) == pytest.approx(even, abs=1e-5)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("engine", "cut"), [("megatron", "3,1"), ("deepspeed", "4,0")])
@pytest.mark.slow
def test_an_uneven_cut_trains_alike(engine: str, cut: str) -> None:
    """Catches layers that get another layer's weights, and a stage without layers that loses its gradient."""
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    run_ranks(_both_cuts, 2, engine, cut)
