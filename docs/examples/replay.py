"""Sampling replay in prime-rl, miles and SkyRL: what to put where each computes log-probabilities from logits.

Shapes are as in the pull requests 3431 of prime-rl, 2595 of miles, and 2237 of SkyRL, whose trainer has no replay yet: its rows
are padded to a batch here. Entropies are over the lists. These are functions to copy: run as a script, this prints nothing.
"""

from types import SimpleNamespace

import torch

from cce_dist import KeptIds, linear_log_probs


def prime_rl_head(self, hidden_states, labels, temperature, sampling_mask=None):
    """prime-rl's ``FusedOutputLinear.forward``: labels and temperature [b, s], sampling_mask [b, s, K], padded with -1."""
    kept = None if sampling_mask is None else KeptIds.from_padded(sampling_mask)
    found = linear_log_probs(hidden_states, self.weight, labels, temperature=temperature, kept=kept, entropy=True)
    return {"logprobs": found.log_probs, "entropy": found.entropy}


def miles_log_probs(hidden, weight, batch, temperature=1.0, shard=None):
    """The responses' log-probabilities of a packed microbatch, in place of miles' logits [T, V]: hidden [T, D]."""
    labels = torch.full(hidden.shape[:1], -100, device=hidden.device)
    starts = torch.tensor([0, *batch["total_lengths"]]).cumsum(0).tolist()
    for end, tokens, length in zip(starts[1:], batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        labels[end - length - 1 : end - 1] = tokens[-length:]
    masks = zip(batch["rollout_sampling_mask_ids"], batch["rollout_sampling_mask_offsets"], strict=True)
    kept = KeptIds.from_lists([SimpleNamespace(token_ids=ids, offsets=offsets) for ids, offsets in masks], labels)
    found = linear_log_probs(hidden, weight, labels, temperature=temperature, kept=kept, shard=shard)
    return found.log_probs[labels != -100].split(batch["response_lengths"])


def skyrl_log_probs(hidden, weight, sequences, num_actions, support, temperature=1.0):
    """SkyRL's ``action_log_probs`` [B, num_actions]: hidden [B, S, D], support [B, num_actions, K], padded with -1."""
    hidden, labels = hidden[:, -num_actions - 1 : -1], sequences[:, -num_actions:]
    kept = KeptIds.from_padded(support)
    return linear_log_probs(hidden, weight, labels, temperature=temperature, kept=kept).log_probs
