"""Functions that the programs of these pages call."""


def length(response):
    return float(len(response))


def late(advantage, response):
    return float(len(advantage))


def one(prompt):
    return [1.0] * len(prompt)


def hint(answer: str):
    return answer[:1]


def reward(response: str, answer: str, hint: str):
    return float(answer in response) + float(hint in response)


def check(response, reward):
    return reward > 0.5


def track(reward, rate, steps=0):
    return 0.9 * rate + 0.1 * reward.mean()


def tracked(reward, mean):
    return 0.9 * mean + 0.1 * reward.mean()


def early(answer, late):
    return late


def pick(reward):
    return [0]


def draw(rate):
    return rate


def looked(best=None, ids=None, task=None, mask=None, more=None):
    return True


class Shop:
    def reset(self, task):
        return ""

    def step(self, action):
        return "", 0.0, True


class Still:
    def reset(self, task):
        return ""


class Two(Still):
    def step(self, action, number):
        return "", True


class Heir(Shop):
    """Begins as a shop."""


def verdicts(verdict):
    return verdict


def taxed(response, answer: str, *, rate: float, kind: str = "flat"):
    return rate * len(response)


def voted(verdict, value, grade):
    return len(verdict) + grade


def guessed(prompt):
    return prompt


def graded(response, votes, early=0.0, told="", prompt="", answer=""):
    return votes + early


def compared(response, other):
    return len(response) > len(other)


def mean(score):
    return score.mean()


def less(response, mean):
    return -mean


def by_rank(response, reward):
    return reward.argsort().argsort()


def plain(response, answer: str):
    return float(len(response))


def told(response, answer: str, task):
    return float(len(response))


def reinforced(logp, advantage, *, scale=1.0):
    return -scale * advantage * logp


def ranked(best: "LogProbs", best_logp) -> "Rows":  # noqa: F821
    return best


def falling(step, peak):
    return peak / step


def normed(logp, advantage):
    return -logp * advantage / (advantage.std() + 1e-6)


def solved(response: str, answer: str):
    return float(response.strip() == answer)


def named(text: str):
    return float(len(text))


class Stocked(Shop):
    def __init__(self, stock, *, seed=0):
        self.stock = stock


class Furnished(Shop):
    def __init__(self, stock=(), *more, seed=0):
        self.stock = stock


async def solve(task, base_url, api_key, model, *, tries=1):
    return 0.0


def deaf(task, base_url):
    return 0.0


def greedy(*columns, base_url, api_key):
    return 0.0


def calls(text, tools):
    return text, []


async def judged(response: str):
    return 1.0


def hinted(answer: str, level) -> str:
    return answer[: int(level)]
