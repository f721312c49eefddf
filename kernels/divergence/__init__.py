"""Divergence of two heads on one shard: records (``heads``), Triton kernels (``kernels``), and plain torch (``dense``)."""
