"""Order of pairs by a reward model, for evaluations."""


def margin(chosen_score, rejected_score):
    """Return the chosen score less the rejected score, and whether it is above 0.

    The last number of a reward model is the score of the whole row.
    """
    difference = float(chosen_score[-1] - rejected_score[-1])
    return difference, float(difference > 0)
