"""A shop in which one looks for a thing: an environment of several turns, for agent.rlg."""


class Shop:
    def __init__(self, task):
        self.task, self.found = task, 0.0

    def step(self, action: str):
        """What the shop answers, and whether that was the last turn."""
        self.found = float(self.task["thing"] in action)
        return "bought" if self.found else "there is no such thing", bool(self.found)

    def end(self):
        """What the generation writes beside the response."""
        return {"reward": self.found}
