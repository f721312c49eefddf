"""Random lines of the matrix of ``linear_log_probs``, of lists too, and ``linear_kl_divergence``, drawn as in ``fuzz``."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cce_dist.tools.verify import divergence, log_probs
from cce_dist.tools.verify.cases import Bounds, Problem, even, padded, random_problem, uneven, with_empty
from cce_dist.tools.verify.check import Error
from cce_dist.tools.verify.divergence import DivergenceCase
from cce_dist.tools.verify.fuzz import BF16, FP16, FP32, OF_THE_LOSS, Cases, Setting
from cce_dist.tools.verify.log_probs import LogProbCase, ignored, repeated

ROUNDED = 1e-15  # what float64 leaves of a gradient that is a difference to 1
LUCK = 4  # The bounds have the baseline's own error for a measure, and one or two tokens may have hardly any.


def draw_log_probs(setting: Setting, number: int) -> LogProbCase:
    """Return the case of a number; ``setting.alike`` in a row have what kernels are compiled for in common."""
    kind, r = _randoms(setting, number)
    options, problem, dtype, shards = _common(kind, r, setting)
    num_ids = kind.choice((0, 1, 2, 5, 64))
    outputs = kind.sample(("log_probs", "lse", "entropy"), kind.randint(1, 3))
    own = tuple(name for name in ("logit_scale", "temperature") if kind.random() < 0.3)
    if kind.random() < 0.3:
        options["softcap"] = r.choice((1.0, 5.0, 30.0))
    for name, least in (("logit_scale", -2.0), ("temperature", 0.2)):
        if name not in own and kind.random() < 0.3:
            options[name] = r.uniform(least, 2.0)
    on_triton = setting.backend == "triton" or (setting.backend == "auto" and setting.device == "cuda")
    if kind.random() < 0.2 and on_triton:
        options["batch_invariant"] = True
    of_ids = r.choice((None, ignored, repeated)) if num_ids > 1 else None
    return LogProbCase(f"log-probs {number}", "", num_ids, options, problem, of_ids, own, shards, dtype, tuple(outputs))


def draw_kept(setting: Setting, number: int) -> LogProbCase:
    """Likewise of log-probabilities over lists."""
    case = draw_log_probs(setting, number)
    longest = _randoms(setting, number)[1].choice((1, 4, 20, 100, 1000))
    return replace(case, name=f"kept {number}", num_ids=0, ids=None, kept=longest)


def draw_divergence(setting: Setting, number: int) -> DivergenceCase:
    """Likewise of the divergence."""
    kind, r = _randoms(setting, number)
    options, problem, dtype, shards = _common(kind, r, setting)
    options["kind"] = kind.choice(("forward", "reverse", "jsd"))
    if options["kind"] == "jsd":
        options["beta"] = r.uniform(0.02, 0.98)
    for name in ("softcap", "teacher_softcap"):
        if kind.random() < 0.3:
            options[name] = r.choice((1.0, 5.0, 30.0))
    for name in ("logit_scale", "teacher_logit_scale"):
        if kind.random() < 0.3:
            options[name] = r.uniform(-2.0, 2.0)
    if "sequence_parallel" not in options and kind.random() < 0.2:
        options["input_grad"] = "partial"
    spread, masked = r.choice((0.1, 1.0, 3.0, 10.0)), r.choice((0.0, 0.0, 0.5, 1.0))
    padding = r.choice((0, 7)) if shards is padded else 0
    draft = r.choice(("", "", "whole", "split"))
    return DivergenceCase(f"divergence {number}", "", options, problem, spread, masked, shards, padding, dtype, draft)


def _run(draw: Callable[[Setting, int], Any], run_case: Callable[..., list[Error]]) -> Cases:
    """The cases that ``draw`` draws, run as lines of the matrix are."""

    def run(setting: Setting, number: int) -> list[Error]:
        errors = run_case(draw(setting, number), setting.group, setting.device, setting.backend, setting.seed)
        return [error._replace(bound=LUCK * error.bound + ROUNDED) for error in errors]

    return Cases(draw, run)


FUNCTIONS = {
    "loss": OF_THE_LOSS,
    "log-probs": _run(draw_log_probs, log_probs.run_case),
    "kept": _run(draw_kept, log_probs.run_case),
    "divergence": _run(draw_divergence, divergence.run_case),
}


def _randoms(setting: Setting, number: int) -> tuple[random.Random, random.Random]:
    """Return two generators: the first draws what kernels are compiled for, the second the rest of the case."""
    of = f"{setting.function} {setting.seed}"
    return random.Random(f"{of} {number // setting.alike}"), random.Random(f"{of} {number} {setting.ranks}")


def _common(
    kind: random.Random, r: random.Random, setting: Setting
) -> tuple[dict[str, Any], Callable[[torch.Generator], Problem], torch.dtype, Callable[[int, int], Bounds]]:
    """Return options, problem, dtype and shards that a case of either function can have."""
    options: dict[str, Any] = {}
    if kind.random() < 0.3:
        options["workspace_bytes"] = r.choice((1, 1 << 14, 1 << 18))
    dtype = kind.choice((FP32, FP32, FP16, FP16 if setting.interpreted else BF16))  # the interpreter misreads bf16
    num_tokens, shards = r.choice((1, 2, 7, 24, 37, 60)), r.choice((even, uneven, with_empty, padded))
    if kind.random() < 0.2:
        options["sequence_parallel"], num_tokens = True, 12 * setting.ranks
    odd = 0 if kind.random() < 0.5 else r.randint(1, 15)  # 0: sizes are multiples of 16
    hidden_size, vocab_size = 16 * r.randint(1, 3) + odd, 16 * r.randint(4, 14) + odd
    scale = r.choice((0.05, 0.5, 2.0) if dtype == FP32 else (0.05, 0.2, 0.5))
    problem = random_problem(num_tokens, hidden_size, vocab_size, bias=kind.random() < 0.4, scale=scale)
    return options, problem, dtype, shards
