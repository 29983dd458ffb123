"""A loss term that takes every row for one that the weights which learn from it have drawn."""


def uncorrected(logp, advantage):  # type: ignore[no-untyped-def]
    """The likelihood of each token times its advantage."""
    return -advantage * logp
