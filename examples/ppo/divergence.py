"""How far a policy has gone from its reference."""

import numpy as np


def kl(old_logp, ref_logp):
    """The mean of old_logp - ref_logp over a response's tokens, in nats a token: the estimate that `adaptive_kl`
    takes."""
    return float(np.mean(old_logp - ref_logp)) if len(old_logp) else 0.0
