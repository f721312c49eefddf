"""transformers' own Trainer under DeepSpeed on two ranks, beside a stock run: ZeRO-2 and 3, by the section and converted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from test_trainer_ranks import CASES, two_ranks

from cce_dist.ranks import run_ranks


@pytest.mark.slow
def test_zero(tmp_path: Path) -> None:
    run_ranks(two_ranks, 2, tmp_path, [case.name for case in CASES if case.zero is not None], timeout_seconds=240)
