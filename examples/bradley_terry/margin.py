"""How a reward model orders pairs, for evaluations: the update tells it of the pairs that it trains on."""


def margin(chosen_score, rejected_score):
    """The score of the chosen response less that of the rejected one, and whether it is above 0. The last number of a
    reward model is the score of the whole row."""
    difference = float(chosen_score[-1] - rejected_score[-1])
    return difference, float(difference > 0)
