"""The default path in bf16, compiled on a GPU or interpreted (``interpreted.add_bf16``), against dense PyTorch.

In bf16 alone exponentials are kept, gradients are made in forward group by group, and dC may hold 8 more bits.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from shards import nan_memory
from support.dense import assert_holds

from cce_dist import GradFilter, groups
from cce_dist.tools.verify.cases import BF16, FP32, Gaussian, LogProbCase, LossCase, ignore
from cce_dist.tools.verify.log_probs import LOG_PROBS
from cce_dist.tools.verify.loss import LOSS

SMALL = Gaussian(37, 24, 100, bias=True)
A_GROUP_WITHOUT_LABELS = Gaussian(37, 24, 100, bias=True, labels=ignore(slice(0, 16)))
NO_BIAS = Gaussian(37, 24, 100)


def case_of(name: str, problem: Any = NO_BIAS, options: dict[str, Any] | None = None, **fields: Any) -> LossCase:
    return LossCase(name, options=options or {}, problem=problem, dtype=BF16, twice=False, **fields)


SMOOTHED = dict(label_smoothing=0.1, z_loss_weight=torch.tensor(0.1), logit_scale=0.7)
CASES = [
    LogProbCase("log-probs", problem=NO_BIAS, dtype=BF16, num_ids=3, twice=False),
    case_of("kept"),
    case_of("groups", in_groups=15, low=True),
    case_of("groups-in-a-buffer", in_groups=15, low=True, buffer=FP32),
    case_of("every-option", SMALL, dict(label_smoothing=0.1, z_loss_weight=0.1, softcap=3.0, logit_scale=0.7)),
    case_of("every-option-in-groups", A_GROUP_WITHOUT_LABELS, SMOOTHED, in_groups=15),
    case_of("softcap-in-groups", A_GROUP_WITHOUT_LABELS, dict(reduction="sum", softcap=3.0), in_groups=15, scale=0.3),
    case_of("divisor-in-groups", A_GROUP_WITHOUT_LABELS, dict(num_tokens=33), in_groups=15, num_tokens=torch.int64),
    case_of("made-again", SMALL, dict(workspace_bytes=1)),
    case_of("each-token", NO_BIAS, dict(reduction="none")),
    case_of("classes", NO_BIAS, in_groups=15, classes=True),
    case_of("a-loss-of-tokens", NO_BIAS, in_groups=15, token_loss="policy"),
    case_of("filter", SMALL, dict(grad_filter=GradFilter(always=True))),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_matches_dense(case: LossCase | LogProbCase) -> None:
    """Catches: rounding of an exponential, of a group's part of dC, or of a sum that fp32 hides; of groups an upstream gradient
    left out, a divisor of the group's own tokens, weights of another group's classes, and a group that sets dC; gradients of a
    log-probability and of an entropy that read exponentials of another tile."""
    function: Any = LOSS if isinstance(case, LossCase) else LOG_PROBS
    with nan_memory(), mock.patch.object(groups, "one_pass", wraps=groups.one_pass) as one_pass:
        assert_holds(function, case)
    assert one_pass.called == (getattr(case, "in_groups", None) is not None)
