"""The options that adapters share: where no budget is given, the loss chooses one."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import pytest
import torch

from cce_dist.integrations import trl
from cce_dist.integrations.deepspeed.loss import Options as DeepSpeedOptions
from cce_dist.integrations.megatron import flags, loss
from cce_dist.integrations.options import ModelOptions, Options

ADAPTERS = (Options, ModelOptions, DeepSpeedOptions, loss.Options)


@pytest.mark.parametrize("options", ADAPTERS, ids=lambda options: options.__module__)
def test_no_budget_is_one_that_the_loss_chooses(options: Any) -> None:
    """Catches an adapter with a budget of its own, and a number that is no bound any more."""

    def read(value: Any) -> Options:
        return options.read({"workspace_bytes": value}, str)

    assert options().workspace_bytes is None is options.read({}, str).workspace_bytes is read(None).workspace_bytes
    assert read(1 << 20).workspace_bytes == 1 << 20
    for wrong, told in ((0, "positive"), (1.5, "a whole number or none"), (True, "a whole number or none")):
        with pytest.raises(ValueError, match=f"workspace_bytes must be {told}"):
            read(wrong)


def test_trl_and_megatrons_flag_choose_too() -> None:
    assert inspect.signature(trl.install).parameters["workspace_bytes"].default is None
    parser = flags.add_arguments(argparse.ArgumentParser())
    for argv, budget in ([], None), (["--cce-workspace-bytes", "1048576"], 1 << 20):
        assert flags.options_from_args(parser.parse_args(argv)).workspace_bytes == budget
    with pytest.raises(ValueError, match="--cce-workspace-bytes must be positive, got 0"):
        flags.options_from_args(parser.parse_args(["--cce-workspace-bytes", "0"]))


def test_megatrons_largest_logits_need_no_budget() -> None:
    """They take a fixed one, and one token at a time where that is too small."""
    hidden, weight = torch.randn(3, 2, 8), torch.randn(11, 8)
    expected = (hidden @ weight.T).max(-1)
    for options in None, loss.Options(workspace_bytes=1):
        values, indices = loss.vocab_parallel_max(hidden, weight, None, options=options)
        torch.testing.assert_close(values, expected.values)
        assert torch.equal(indices, expected.indices)
