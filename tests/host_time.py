"""The host's time of a loss and its gradients on one GPU: until all is launched, and with the wait for the GPU.

    python tests/host_time.py [filter]

One line each: a call launched by Triton (``CCE_DIST_REPLAY=triton``), an ordinary call (``=0``), the call that is recorded,
replays launched one by one (``CCE_DIST_REPLAY=launches``), replays as graphs, and ``torch.compile`` of the dense loss. N 2,048,
D 768, V 16,384, as in docs/results.md.
``graphs.py`` is worth its lines if "launches" takes more than 1.25 of ``torch.compile``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

N, D, V, STEPS = 2048, 768, 16384, 200
MODES = {"by Triton": "triton", "ordinary": "0", "launches": "launches", "graphs": "1", "torch.compile": "0"}


def milliseconds(step: Callable[[], None]) -> tuple[float, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return 1e3 * (launched - start), 1e3 * (time.perf_counter() - start)


def measure(mode: str) -> None:
    from cce_dist import GradFilter, linear_cross_entropy

    hidden = torch.randn(N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(V, D, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(V, (N,), device="cuda")
    options: dict[str, Any] = {"grad_filter": GradFilter(always=True)} if "filter" in sys.argv[2:] else {}
    dense = torch.compile(lambda hidden, weight, labels: F.cross_entropy((hidden @ weight.T).float(), labels))

    def step() -> None:
        hidden.grad = weight.grad = None
        compiled = mode == "torch.compile"
        loss = dense(hidden, weight, labels) if compiled else linear_cross_entropy(hidden, weight, labels, **options)
        loss.backward()

    first = [milliseconds(step)[0] for _ in range(2)]
    for _ in range(20):
        step()
    host, whole = zip(*(milliseconds(step) for _ in range(STEPS)), strict=True)
    print(
        f"{mode:14} {statistics.median(host):6.2f} ({min(host):.2f}) ms, with the wait {statistics.median(whole):6.2f}"
    )
    if mode == "launches":
        print(f"{'its 2nd call':14} {first[1]:6.2f} ms, recorded")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(os.environ["MODE"])
    else:
        for mode, replay in MODES.items():
            environment = {**os.environ, "MODE": mode, "CCE_DIST_REPLAY": replay}
            subprocess.run([sys.executable, __file__, "--one", *sys.argv[1:]], env=environment, check=True)
