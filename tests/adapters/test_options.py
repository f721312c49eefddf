"""The options that adapters share, as keyword arguments, a section of ds_config and flags of a command line."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refused import refused

from cce_dist import GradFilter
from cce_dist.integrations.deepspeed.loss import Options as Section
from cce_dist.integrations.megatron import flags, loss
from cce_dist.integrations.options import ModelOptions, Options, ScoreOptions

README = (Path(__file__).parents[2] / "README.md").read_text()
(DS_CONFIG,) = re.findall(r"```json\n(.+?)```", README, re.DOTALL)


@pytest.mark.parametrize("options", [Options, ModelOptions, ScoreOptions, Section, loss.Options])
def test_no_budget_is_one_that_the_loss_chooses(options: Any) -> None:
    """Catches an adapter with a budget of its own, and a number that is no bound any more."""

    def read(value: Any) -> Options:
        return options.read({"workspace_bytes": value}, str)

    assert options().workspace_bytes is None is options.read({}, str).workspace_bytes is read(None).workspace_bytes
    assert read(1 << 20).workspace_bytes == 1 << 20
    for wrong, told in ((0, "positive"), (1.5, "a whole number or none"), (True, "a whole number or none")):
        with pytest.raises(ValueError, match=f"workspace_bytes must be {told}"):
            read(wrong)


def test_megatrons_flags_become_options() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cross-entropy-fusion-impl", default="native", choices=["native", "te"])
    assert flags.add_arguments(parser) is parser
    for line, expected in {
        "": loss.Options(),
        "--cross-entropy-fusion-impl cce --cce-workspace-bytes 1048576": loss.Options(workspace_bytes=1 << 20),
        "--cce-filter plain --cce-filter-eps 1e-3": loss.Options(GradFilter(1e-3, compensate=False)),
        "--cce-filter off --cce-filter-eps 0.1 --cce-vocab-size 60": loss.Options(vocab_size=60),
    }.items():
        assert flags.options_from_args(parser.parse_args(line.split())) == expected
    with pytest.raises(ValueError, match="--cce-filter-eps has no effect: no filter"):
        flags.options_from_args(parser.parse_args(["--cce-filter-eps", "0.1"]))


def test_keys_become_options() -> None:
    for name, expected in ("off", None), ("compensated", GradFilter()), ("plain", GradFilter(compensate=False)):
        assert Options.read({"filter": name}, str).grad_filter == expected
    for section in {}, {"cce_dist": {"enabled": False, "filter": "plain"}}:
        assert Section.from_config(section) is None
    assert Section.from_config(json.loads(DS_CONFIG)) == Section()
    keys = {"filter": "plain", "filter_eps": 0.01, "filter_weight": False, "reduce_dtype": "float32"}
    fields: Any = dict(grad_filter=GradFilter(0.01, compensate=False, weight=False), reduce_dtype=torch.float32)
    assert ModelOptions.read(keys, str) == ModelOptions(**fields)
    assert Section.from_config({"cce_dist": keys | {"enabled": True, "report": True}}) == Section(**fields, report=True)


WRONG: dict[str, tuple[Any, str]] = {
    "no section": ("on", "must be a section"),
    "unknown": ({"enabled": True, "fitler": "plain"}, 'has no key "fitler"'),
    "switch": ({"enabled": 1}, '"cce_dist.enabled" must be true or false'),
    "string": ({"enabled": True, "filter": True}, '"cce_dist.filter" must be a string'),
    "choice": ({"enabled": True, "filter": "exact"}, '"cce_dist.filter" must be one of off,'),
    "number": ({"enabled": True, "filter_eps": "1e-5"}, '"cce_dist.filter_eps" must be a number'),
    "no number": ({"enabled": True, "filter_eps": True}, '"cce_dist.filter_eps" must be a number, got True'),
    "range": ({"enabled": True, "filter_eps": 1}, r'"cce_dist.filter_eps" must be in \[0, 1\)'),
    "smoothing": ({"enabled": True, "label_smoothing": 2}, '"cce_dist.label_smoothing" must be in'),
    "backend": ({"enabled": True, "backend": "cuda"}, "must be one of auto, triton, torch, got 'cuda'"),
    "disabled": ({"enabled": False, "reduce_dtype": "fp32"}, '"cce_dist.reduce_dtype" must be one of'),
    "filter": ({"enabled": True, "filter_eps": 0.1}, '"cce_dist.filter_eps" has no effect: no filter'),
    "not enabled": ({"filter": "plain"}, 'needs the key "enabled"'),
}


@pytest.mark.parametrize(("section", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_section_is_one_line_naming_the_key(section: Any, message: str) -> None:
    with refused(message):
        Section.from_config({"cce_dist": section})
    with pytest.raises(ValueError, match='this call has no key "reduce_dtype"'):
        Options.read({"reduce_dtype": "float32"}, str)
