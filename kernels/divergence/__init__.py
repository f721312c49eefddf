"""Divergence of two heads on one shard: records, kernels, and the same in plain torch."""
