"""The control variate that replaces the dropped part R [N, V] of a filtered gradient, and the samples that correct it.

    R_ij  ~  r_i q_j            r_i = sum_j R_ij,    q_j = sum_i |R_ij| / sum_ij |R_ij|

This rank-1 matrix has the right row sums and (upstream gradients of one sign) column sums, but gives every token the same mix
of columns. The tokens of a trained model differ: before a name the tail holds other words than before a number. So K columns
k are sampled with probabilities q_k, and S tokens s with probabilities p_s = |r_s| / sum_i |r_i|, and R is computed there:

    d_hidden_i  =  r_i c                + factor * sum_k (R_ik / q_k - r_i) / K * (weight_k - c)        c = sum_j q_j weight_j
    d_weight_j  =  q_j sum_i r_i e_i    + factor * sum_s (R_sj - r_s q_j) / (S p_s) * (e_s - e)         e = sum_i p_i e_i

where e_i is a hidden state, and each gradient has its own factor. The sums over k and s are Monte Carlo estimates of a matrix
product (Drineas, Kannan and Mahoney, 2006) with inverse-probability weights: with factors of 1 both gradients are unbiased.
The rank-1 matrix is their control variate: a sample adds the difference between R and that matrix. Row sums stay as they are
for d_hidden, and column sums for d_weight. R_ik is 0 where token i keeps column k. No operand is centered in memory: the
rank-1 part is subtracted from each term, and c times the sum of a token's terms from the result.

Samples add noise, and for some softmaxes nothing but noise. The estimate is a sum of independent terms, so the expected square
of its noise is the sum of their squares. The factor that minimises the expected error is the signal's share of the square:

    signal_share  =  1 - sum_ik |term_ik|^2 / sum_i |sum_k term_ik|^2        (at least 0; for d_weight likewise)

Most of the correction of d_hidden is linear. A tail that is reweighted by exp of a linear function of its token's hidden
state has

    R_ij  ~  r_i q_j (1 + linear * (e_i - e) . (weight_j - c))

to first order. With this better control variate each term loses its linear part, too, and what all columns have of that is
r_i * linear * (e_i - e) covariance, with covariance = sum_j q_j (weight_j - c)(weight_j - c)^T, estimated from more columns
than the K. ``linear`` minimises the expected error. tests/support/corrections.py has sampling and factors in plain torch.
"""

from __future__ import annotations

# Smaller factors become 0: these samples would leave more than three quarters of the error.
LEAST_SIGNAL = 0.25
# The linear correction is computed if tokens drop more than this share of their softmax: bf16 hides what it adds to less.
LEAST_DROPPED = 2.0**-7
LINEAR_FACTORS = 32  # factors of the linear correction that are tried, from 0 to 1
