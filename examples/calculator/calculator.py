"""A calculator that adds two numbers: the environment of calculator.rlg."""

import re


def add(text: str) -> str:
    """Return the calculator's reply to `12+34`; a minus sign for any other text."""
    two = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text)
    return str(int(two[1]) + int(two[2])) if two else "-"


class Calculator:
    """The policy writes `12+34=` and gets `46`; any other text is its answer."""

    def reset(self, answer: str):
        self.answer = answer

    def step(self, text: str):
        """Return the calculator's reply, the reward, and whether the answer was given."""
        if not text.endswith("="):
            return None, float(text == self.answer), True
        return add(text[:-1]), 0.0, False
