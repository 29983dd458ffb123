"""Preference of a policy within a pair, for evaluations."""


def margin(chosen_logp, rejected_logp, ref_chosen, ref_rejected):
    """Return the margin of a pair in nats, and whether it is above 0.

    The margin is (chosen - rejected) - (ref_chosen - ref_rejected), summed over all tokens of a response
    (arXiv:2305.18290, section 4).
    """
    z = float(chosen_logp.sum() - ref_chosen.sum()) - float(rejected_logp.sum() - ref_rejected.sum())
    return z, float(z > 0)
