"""Draw importance ratios of a policy that has not moved, with sampling replay and without.

    python benchmarks/replay_ratios.py --out docs/replay.png

docs/examples/sampled_sets.py has the policy, which samples with top-p 0.9 and is trained on the sets.
"""

import argparse
import contextlib
import io
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cce_dist.tools.report import OURS_COLOR, picture

EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "sampled_sets.py"


def ratios() -> tuple[Tensor, Tensor]:
    """Return the ratios of some thousand tokens: over the sampler's sets, and over the whole vocabulary."""
    with contextlib.redirect_stdout(io.StringIO()):
        example: Any = runpy.run_path(str(EXAMPLE))
    with torch.no_grad():
        inputs, drawn, old, kept = example["sample"](torch.arange(64).repeat_interleave(16))
        replayed, whole = ((example["policy"](inputs, drawn, sets).log_probs - old).exp() for sets in (kept, None))
    return replayed.flatten(), whole.flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("replay.png"))
    args = parser.parse_args()
    replayed, whole = ratios()
    off = (replayed - 1).abs().max()
    print(f"with replay off 1 by at most {off:.1e}; without, mean {whole.mean():.3f}, least {whole.min():.3f}")
    title = f"Importance ratios of {len(whole):,} tokens, policy not moved, top-p 0.9"
    with picture(args.out, title, (6.0, 2.6), 100) as figure:
        axes = figure.subplots()
        edges = torch.linspace(0.87875, 1.01125, 54).tolist()
        axes.hist(whole.numpy(), edges, color="#999999", label=f"whole vocabulary: mean {whole.mean():.3f}")
        axes.hist(replayed.numpy(), edges, color=OURS_COLOR, label=f"replay: off 1 by at most {off:.0e}")
        axes.set(xlabel="ratio", ylabel="tokens", yscale="log")
        axes.legend(fontsize=8, loc="upper center")


if __name__ == "__main__":
    main()
