"""What a policy prefers of a pair, for evaluations: the update tells it of the pairs that it trains on."""


def margin(chosen_logp, rejected_logp, ref_chosen, ref_rejected):
    """The margin of a pair, (chosen - rejected) - (ref_chosen - ref_rejected) in nats, of all tokens of a response
    added up; and whether it is above 0 (arXiv:2305.18290, section 4)."""
    z = float(chosen_logp.sum() - ref_chosen.sum()) - float(rejected_logp.sum() - ref_rejected.sum())
    return z, float(z > 0)
