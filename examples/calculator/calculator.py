"""A calculator that adds two numbers: the environment of calculator.rlg."""

import re


def added(text: str) -> str:
    """What the calculator says to `12+34`; to what is no sum of two, a minus sign."""
    two = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text)
    return str(int(two[1]) + int(two[2])) if two else "-"


class Calculator:
    """The policy writes `12+34=` and is told `46`; whatever else it writes is its answer."""

    def reset(self, answer: str):
        self.answer = answer

    def step(self, text: str):
        """What the calculator says, whether the answer is right, and whether it was given."""
        if not text.endswith("="):
            return None, float(text == self.answer), True
        return added(text[:-1]), 0.0, False
