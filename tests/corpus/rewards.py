"""Functions that the programs of this folder and the pages of codes call."""


def length(response):
    return float(len(response))


def both(response: str, answer: str, exact):
    return exact + float(answer in response)


def clean(response: str) -> str:
    return response.strip()


def weight(response, reward, advantage):
    return float(reward)


def of_advantage(response, advantage):
    return float(len(advantage))


def both_of(response, reward):
    return float(reward) * len(response)


def weighted(response, reward, weight):
    return [r * w for r, w in zip(reward, weight, strict=True)]


def by_words(response: str, answer: str, words):
    return float(answer in response) / (1 + words)


def control(old_logp, ref_logp, beta):
    return beta * 1.1


def held(gen_logp, heat):
    return heat


def penalised(response: str, answer: str, beta):
    return float(answer in response) - beta


def mean(found):
    return found.mean()


def minus(score, chance):
    return score - chance


def same(votes):
    return votes


def by_rank(response, reward):
    return reward.argsort().argsort()


class Quiz:
    def reset(self, answer: str):
        self.answer = answer

    def step(self, text: str):
        right = text == self.answer
        return ("yes" if right else "no, think again"), float(right), right
