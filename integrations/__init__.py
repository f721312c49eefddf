"""Adapters, one framework per file. They convert shapes, choose the group, and state which code sums dE over ranks."""
