"""Write the table of docs/kernels.md from the source: `python tests/kernel_table.py` replaces it, and test_docs.py holds it.

Name and file come from the kernel's declaration, the outputs from its pointer comments, the launcher from the function that
names the kernel. With the launch left out a test of that file fails (or its process ends) in the interpreter.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/kernels.md"
HEAD = "| kernel | file | launched by | writes | test |\n|---|---|---|---|---|\n"
# The tests of a kernel, by the first of these that its file's path begins with.
TESTS = {
    "cells": "test_log_probs.py",
    "kept_rows": "test_kept_ids.py",
    "candidates": "test_top_k.py",
    "largest": "test_top_k.py",
    "logits": "test_top_k.py",
    "divergence": "test_divergence.py",
    "scale": "test_groups.py",
    "filter/screen": "test_screened.py",
    "filter": "test_filtered.py",
    "": "test_triton.py",
}


def table() -> str:
    """Return the rows, in the order of files and of kernels in them."""
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
            test = next(test for path, test in TESTS.items() if file.startswith(path))
            found.append(f"| `{node.name}` | `{file}` | `{launches[0]}` | {', '.join(out)} | `{test}` |\n")
    return HEAD + "".join(found)


def with_table(page: str) -> str:
    """Return the page with the table replaced."""
    before, _, rest = page.partition(HEAD)
    return before + table() + re.sub(r"\A(?:\| .*\n)*", "", rest)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
