"""The predicted cost of a filter, which decides whether it runs, against stored rounds."""

import json
import statistics
from pathlib import Path
from typing import NamedTuple

import pytest

from cce_dist.kernels import memory
from cce_dist.kernels.filter import costs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Columns of a token outside the frequent ids whose probability reaches 2^-10: those that lists must hold. The workloads of
# benchmarks/heads.py as drawn on CPUs in fp32, of 8,192 tokens (Phi-3.5) and 4,096. Of captured states the kernels
# counted them: less the frequent ids, to 2 of a vocabulary of 32,768 and to 7 of 131,072.
LISTED = {
    "gemma-2-2b": {"unigram": 0.5, "early": 35.0, "spread": 46.9, "middle": 33.3, "trained": 1.8, "sharp": 3.6},
    "llama-3-8b": {"unigram": 0.9, "early": 29.6, "spread": 58.5, "middle": 38.8, "trained": 1.7, "sharp": 3.4},
    "phi-3.5": {"unigram": 0.2, "early": 24.6, "spread": 51.3, "middle": 33.5, "trained": 1.4, "sharp": 2.9},
    "captured, V 32,768": {"step-60": 21.0, "step-400": 44.0, "step-1200": 34.0},
    "captured, V 131,072": {"step-60": 38.0, "step-300": 38.0, "step-700": 38.0},
}


class Timed(NamedTuple):
    """Medians of one run, in seconds; a row is forward alone, loss and gradient."""

    sizes: memory.Sizes
    listed: float  # columns of a token that are listed
    rates: costs.Rates  # those of the run's own plain product
    filtered: tuple[float, float]
    kept: float | None  # loss and gradient without a filter, exponentials kept; None where they were not measured


def _timed() -> dict[str, Timed]:
    found = {}
    for name in ("ladder", "ladder-phi", "captured-eps10"):
        for case in json.loads((RESULTS / f"h200-{name}.json").read_text())["cases"]:
            rows = {}
            for row in case["rows"]:
                rows[row["name"]] = tuple(statistics.median(row[part]["seconds"]) for part in ("forward", "total"))
            sizes = memory.Sizes(case["num_tokens"], case["hidden_size"], case["vocab_size"], 2)
            product = statistics.median(case["floor"]["one"]["seconds"])
            flops = 2 * sizes.num_tokens * sizes.hidden_size * sizes.num_columns / product
            shape = case["shape"] + (f", V {case['vocab_size']:,}" if case["shape"] == "captured" else "")
            listed, kept = LISTED[shape][case["rung"]], rows.get("cce-dist-cached", (0, None))[1]
            rates = costs.Rates(flops, costs.H200[2][1])
            found[f"{shape}, {case['rung']}"] = Timed(sizes, listed, rates, rows["cce-dist-filtered"], kept)
    return found


def test_costs_are_those_that_were_measured() -> None:
    """Forward, and forward with backward, within 12 % at the rate of the run's own product.

    Catches: a cost that moves, a rule that takes the slower of two ways."""
    timed_of = _timed()
    assert len(timed_of) == sum(map(len, LISTED.values()))
    for name, timed in timed_of.items():
        product = costs.product_seconds(timed.sizes, timed.rates)
        frequent = memory.frequent_columns(timed.sizes.num_columns, 2.0**-10)
        forward, backward = costs.filter_seconds(timed.sizes, memory.LEAST_DEFAULT, timed.rates, frequent)
        assert product + forward == pytest.approx(timed.filtered[0], rel=0.12), name
        said = product + forward + backward + costs.listed_seconds(timed.sizes, timed.listed)
        assert said == pytest.approx(timed.filtered[1], rel=0.12), name

        if timed.kept is not None:
            assert costs.filter_pays(timed.sizes, True, 0) == (timed.filtered[1] < timed.kept), name


def test_the_filter_is_taken_where_it_pays() -> None:
    """GPU time at most 0.85 of exact's, and host time below exact's GPU time; sizes cannot tell what is within 0.03 of that.

    Catches a rule that a measured head contradicts, and a table of docs/filter.md that is not what was measured."""
    page, close = (RESULTS.parents[1] / "docs/filter.md").read_text(), []
    cases = json.loads((RESULTS / "h200-filter-pays.json").read_text())["cases"]
    for case in cases:
        rows = {row["name"]: row["total"] for row in case["rows"]}
        exact, filtered = (statistics.median(rows[f"cce-dist-{name}"]["seconds"]) for name in ("default", "filtered"))
        host = statistics.median(rows["cce-dist-filtered"]["host"])
        taken = costs.filter_pays(memory.Sizes(case["num_tokens"], case["hidden_size"], case["vocab_size"], 2), True, 0)
        if abs(filtered / exact - 0.85) < 0.03:
            close.append(case["vocab_size"])
        else:
            assert taken == (filtered < 0.85 * exact and host < exact), case["shape"]
        times = f"{1e3 * exact:.1f} | {1e3 * filtered:.1f} | {1e3 * host:.1f} | {'filter' if taken else 'exact'} |"
        assert f"| {case['hidden_size']:,} | {case['vocab_size']:,} | {times}" in page
    assert len(cases) == 10 and close == [16_032, 262_144]


@pytest.mark.parametrize(
    ("sizes", "faster"),
    [
        pytest.param((8192, 4096, 16_032), False, id="llama-3-8b-over-8"),
        pytest.param((8192, 768, 32_768), False, id="base"),  # 2.8 ms where exact gradients take 2.3
        pytest.param((2048, 4096, 64_128), False, id="few-tokens-of-half-a-head"),  # 0.94 of exact, in a noisy run
        pytest.param((512, 768, 131_072), False, id="few-tokens"),
        pytest.param((0, 768, 0), False, id="nothing"),
        pytest.param((8192, 4096, 128_256), True, id="llama-3-8b"),
    ],
)
def test_filter_pays_where_it_was_faster(sizes: tuple[int, int, int], faster: bool) -> None:
    """Catches a rule that another head contradicts, and one that asks less of a filter where exact is slower."""
    of = memory.Sizes(*sizes, 2)
    assert costs.filter_pays(of, True, 0) == faster
    # Exact gradients recompute within a small budget.
    assert costs.filter_pays(of, True, 1) >= costs.filter_pays(of, True, 1 << 40)
    assert costs.filter_pays(of, False, 0) >= faster
