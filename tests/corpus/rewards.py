"""Functions that the programs of this folder and the pages of codes call."""


def length(response):
    return float(len(response))


def both(response: str, answer: str, exact):
    return exact + float(answer in response)
