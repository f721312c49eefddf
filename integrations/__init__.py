"""Adapters: one framework per file. They convert shapes, choose the group and say who sums dE, and nothing else."""
