"""Divergence of a policy from its reference."""

import numpy as np


def kl(old_logp, ref_logp):
    """Return the mean of old_logp - ref_logp over a response, in nats per token.

    This is the estimate that `adaptive_kl` takes.
    """
    return float(np.mean(old_logp - ref_logp)) if len(old_logp) else 0.0
