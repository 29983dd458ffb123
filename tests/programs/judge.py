"""What judge.rlg calls: a question to another model, and a vote over its answers."""


def ask(prompt: str, response: str, answer: str) -> str:
    return f"{prompt}\n{response}\nRight answer: {answer}. Is it right? Yes or no."


def vote(verdict: list[str]) -> float:
    return sum("yes" in v.lower() for v in verdict) / len(verdict)
