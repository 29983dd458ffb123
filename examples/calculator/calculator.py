"""A calculator that adds two numbers: the environment of calculator.rlg."""

import re


class Calculator:
    """The policy writes `12+34=` and is told `46`; whatever else it writes is its answer."""

    def reset(self, answer: str):
        self.answer = answer

    def step(self, text: str):
        """What the calculator says, whether the answer is right, and whether it was given."""
        if not text.endswith("="):
            return None, float(text == self.answer), True
        sum_of_two = re.fullmatch(r"(\d{1,3})\+(\d{1,3})=", text)
        return str(int(sum_of_two[1]) + int(sum_of_two[2])) if sum_of_two else "-", 0.0, False
