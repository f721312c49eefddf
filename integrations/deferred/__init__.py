"""The deferral under every adapter: logits that nobody computes until somebody asks for their loss.

A converted head returns ``DeferredLogits``: no numbers, but the hidden states and the weight that the head was called with. The
model's own code may scale them and, in the end, asks for their loss, which the head then computes from the hidden states.
"""
