"""A shop in which one looks for a thing: an environment of several turns, for agent.rlg."""


class Shop:
    def reset(self, task):
        """What the policy reads first."""
        self.thing = task["thing"]
        return "what do you look for?"

    def step(self, action: str):
        """What the shop answers, the reward so far, and whether that was the last turn."""
        found = self.thing in action
        return ("bought" if found else "there is no such thing"), float(found), found
