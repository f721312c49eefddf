"""Write the table of docs/kernels.md from the source: `python tests/kernel_table.py` replaces it, and test_docs.py holds it.

Name and file come from the kernel's declaration, the outputs from its pointer comments, the launcher from the function that
names the kernel. The test is the one of TESTS: with the launch left out it fails (or its process ends) in the interpreter.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/kernels.md"
HEAD = "| kernel | file | launched by | writes | test |\n|---|---|---|---|---|\n"
# Each test and the kernels that it needs.
TESTS = {
    "test_triton.py::test_numbers_of_a_token_as_in_torch": (
        "_num_counted_kernel _label_ids_kernel _token_losses_kernel _coefficients_kernel _merged_lse_kernel"
    ),
    "test_triton.py::test_ignored_tokens_do_not_matter": "_compact_kernel _gather_rows_kernel",
    "test_triton.py::test_matches_dense": (
        "_target_logit_kernel _lse_kernel _merge_splits_kernel _dlogits_kernel _grad_hidden_kernel "
        "_add_parts_kernel _grad_weight_kernel _grad_bias_kernel"
    ),
    "test_triton.py::test_cached_matches_dense": "_row_reference_kernel _level_kernel _with_entropy_kernel",
    "test_triton.py::test_cached_label_beside_no_probability": "_row_scale_kernel",
    "test_log_probs.py::test_kernels_match_dense": "_cells_kernel",
    "test_top_k.py::test_lists_hold_what_reaches_the_threshold": "_logits_kernel _threshold_kernel",
    "test_top_k.py::test_rows_that_mislead_the_sample": "_choose_kernel",
    "test_divergence.py::test_matches_dense": "_pair_sums_kernel",
    "test_divergence.py::test_kept_exponentials_match_dense": "_pair_gradients_kernel",
    "test_filtered.py::test_matches_dense": (
        "_list_columns_kernel _decide_kernel _listed_gradients_kernel _dropped_kernel _sums_of_rows_kernel "
        "_dropped_sums_kernel _sampled_gradients_kernel _hidden_products_kernel _filtered_bias_kernel"
    ),
    "test_filtered.py::test_sampled_columns_bound_the_rest": "_sampled_sums_kernel _bound_of_shard_kernel",
    "test_filtered.py::test_shares_are_reweighted_to_the_mean_of_all_tokens": "_reweight_kernel",
    "test_filtered.py::test_lists_are_added_first_or_last": "_filtered_hidden_kernel",
    "test_filtered.py::test_corrections": "_compensated_weight_kernel _filtered_weight_kernel",
    "test_screened.py::test_statistics_and_lists": (
        "_median_kernel _tail_masses_kernel _tail_mean_kernel _round_rows_kernel _screen_kernel "
        "_join_lists_kernel _listed_sums_kernel _merge_screened_kernel"
    ),
    "test_screened.py::test_basis_of_the_rounding_correction": "_basis_kernel",
}


def table() -> str:
    """Return the rows, in the order of files and of kernels in them."""
    test_of = {kernel: test for test, kernels in TESTS.items() for kernel in kernels.split()}
    found = []
    for path in sorted((ROOT / "kernels").rglob("*.py"), key=lambda p: (len(p.parts), p)):
        source = path.read_text()
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        for node in functions:
            if not node.name.endswith("_kernel"):
                continue
            text = ast.get_source_segment(source, node) or ""
            out = re.findall(r"^    (\w+?)(?:_ptr)?,  # (?:in, )?out", text, re.MULTILINE)
            bodies = {f.name: ast.get_source_segment(source, f) or "" for f in functions if f is not node}
            launches = [name for name, body in bodies.items() if re.search(rf"\b{node.name}\b", body)]
            file = path.relative_to(ROOT / "kernels").as_posix()
            found.append(
                f"| `{node.name}` | `{file}` | `{launches[0]}` | {', '.join(out)} | `{test_of[node.name]}` |\n"
            )
    return HEAD + "".join(found)


def with_table(page: str) -> str:
    """Return the page with the table replaced."""
    before, _, rest = page.partition(HEAD)
    return before + table() + re.sub(r"\A(?:\| .*\n)*", "", rest)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
