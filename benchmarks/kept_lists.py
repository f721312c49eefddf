"""Time on the host from a sampler's ids to ``KeptIds``: python benchmarks/kept_lists.py --tokens 65536 --ids 512."""

import argparse
from timeit import repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cce_dist import KeptIds

VOCAB, REQUESTS = 128_256, 64


def formats(num_tokens: int, num_ids: int) -> dict[str, tuple[list[Any], torch.Tensor]]:
    """Return the same lists in each format, with the sampled ids."""
    rows = np.random.default_rng(0).integers(0, VOCAB, (num_tokens, num_ids), dtype=np.int32)
    parts = [
        SimpleNamespace(token_ids=part.ravel(), offsets=np.arange(len(part) + 1) * num_ids)
        for part in np.array_split(rows, REQUESTS)
    ]
    whole = SimpleNamespace(token_ids=rows.ravel(), offsets=np.arange(num_tokens + 1) * num_ids)
    labels, few = torch.from_numpy(rows[:, num_ids // 2].copy()), num_tokens // 16
    return {
        "one SamplingMask of arrays": ([whole], labels),
        f"{REQUESTS} SamplingMasks of arrays": (parts, labels),
        "an array for each token": (list(rows), labels),
        "lists of Python (a 16th of the tokens, times 16)": (rows[:few].tolist(), labels[:few]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--ids", type=int, default=512, help="ids of each token")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.tokens:,} tokens with {args.ids} ids each, {torch.get_num_threads()} threads of torch, milliseconds")
    for name, (lists, labels) in formats(args.tokens, args.ids).items():
        scale = 1e3 * args.tokens / len(labels)
        checked = scale * min(repeat(lambda x=lists, y=labels: KeptIds.from_lists(x, y), number=1, repeat=args.repeats))
        alone = scale * min(repeat(lambda x=lists: KeptIds.from_lists(x), number=1, repeat=args.repeats))
        print(f"{name:50} {checked:7.1f} with a check of the labels, {alone:7.1f} without")


if __name__ == "__main__":
    main()
