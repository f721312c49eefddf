"""Write the table of docs/kernels.md from the source: `python tests/kernel_table.py` replaces it, and test_docs.py holds it.

With a launch left out a test of that file fails (or its process ends) in the interpreter.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/kernels.md"
HEAD = "| file | kernels | test |\n|---|---|---|\n"
# The tests of a kernel, by the first of these that its file's path begins with.
TESTS = {
    "dlogits": "core/test_log_probs.py",
    "kept_rows": "core/test_kept_ids.py",
    "divergence": "core/test_divergence.py",
    "d_weight": "core/test_groups.py",
    "filter": "kernels/test_filtered.py",
    "": "kernels/test_triton.py",
}


def table() -> str:
    """Return a row of each file: its kernels in order, and their test."""
    rows = []
    for path in sorted((ROOT / "kernels").rglob("*.py"), key=lambda p: (len(p.parts), p)):
        source, kernels = path.read_text(), []
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert len(re.findall(rf"\b{node.name}\b", source)) > 1, f"{path} does not launch {node.name}"
                kernels.append(f"`{node.name}`")
        if kernels:
            file = path.relative_to(ROOT / "kernels").as_posix()
            test = next(test for path, test in TESTS.items() if file.startswith(path))
            rows.append(f"| `{file}` | {', '.join(kernels)} | `tests/{test}` |\n")
    return HEAD + "".join(rows)


def with_table(page: str) -> str:
    """Return the page with the table replaced."""
    before, _, rest = page.partition(HEAD)
    return before + table() + re.sub(r"\A(?:\| .*\n)*", "", rest)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
