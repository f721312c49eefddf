"""The host's side of a call: kernels compiled ahead, launches recorded and replayed. No arithmetic."""
