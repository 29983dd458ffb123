"""What filters say, and which rows that leaves: found row by row, apart from the code that finds it by arrays.

Invariant: a row is a key: ("p", 3) a prompt, ("g", the key of its prompt, 1) a response, ("s", the key of its origin,
0) a repeat. What a filter says of a row is a function of (seed, filter, key).
"""

import zlib

from msrl_graph.analysis.rowsets import chain, common, rowsets
from msrl_graph.ir.attributes import CallAttributes, GenerateAttributes


class Truth:
    """Of one iteration of a plan; `kindness` is the share of rows that filters keep, `taken` are the prompts that a
    partial rollout has taken."""

    def __init__(self, plan, seed, kindness, taken=()):
        self.graph, self.rows, self.seed, self.kindness = plan.graph, rowsets(plan.graph), seed, kindness
        self.taken = taken

    def verdict(self, node, key):
        """How often a row goes on; of a row that fails its whole group may leave."""
        said = self.graph.node(node)
        if said.cuts:
            return int(self.up(key, self.rows.sieves[node].rows, 0)[1] in self.taken)
        if GenerateAttributes.of(said).on_failure == "drop_group":
            key = key[1]
        elif said.verb != "generate" and said.stated("on_failure") is not None:  # what a call was for goes as one
            key = "all" if said.per == "batch" else self.up(key, self.rows.nodes[node], self.rows.units[node])
        bits = zlib.crc32(repr((self.seed, node, key)).encode()) / 2**32
        select = CallAttributes.of(self.graph.node(node)).select is not None
        return int(bits < self.kindness) * (1 + (select and int(bits * 1000) % 3))

    def key(self, numbers, row, of):
        """A row's key, from its number."""
        made = self.rows.sets[of]
        if of == 0:
            return ("p", row)
        if made.repeats:
            space = numbers.space[made.above]
            return ("s", self.key(numbers, row % space, made.above), row // space)
        fan = numbers.fans[of]
        return ("g", self.key(numbers, row // fan, made.above), row % fan)

    def under(self, prompts, end, sieves, fans=None):
        """The keys of set `end` that these filters leave of some prompts: by the path, and of filters elsewhere by who
        belongs together. `fans`: of an evaluation, how many rows a generation makes of each, by set."""
        found = [("p", i) for i in prompts]
        path = chain(self.rows.sets, end)[::-1]
        for here, below in zip(path, [*path[1:], None], strict=True):
            made = self.rows.sets[here]
            if here and not made.repeats:
                found = [("g", key, j) for key in found for j in range(fans[here] if fans else made.fan)]
            for sieve in sieves:
                if sieve.remaining == sieve.rows == here:
                    found = [k for k in found if self.verdict(sieve.node, k)]
            for sieve in sieves:
                if sieve.remaining != sieve.rows == here and sieve.remaining == below:
                    found = [("s", k, i) for k in found for i in range(self.verdict(sieve.node, k))]
            if below and self.rows.sets[below].repeats and all((s.rows, s.remaining) != (here, below) for s in sieves):
                found = [("s", k, 0) for k in found]  # in an evaluation each goes on once
        for sieve in sieves:
            if sieve.remaining not in path:
                meeting = common(self.rows.sets, end, sieve.remaining)
                on_path = [s for s in sieves if s.remaining in chain(self.rows.sets, sieve.remaining)]
                there = {
                    self.up(k, sieve.remaining, meeting) for k in self.under(prompts, sieve.remaining, on_path, fans)
                }
                found = [k for k in found if self.up(k, end, meeting) in there]
        return found

    def up(self, key, start, end):
        while start != end:
            key = key[1]
            start = self.rows.sets[start].above
        return key

    def rounds(self, count, size=0):
        """How many rounds of prompts it takes, and which prompts go on; None where they never suffice. `size`: how many
        prompts a round has where these are not as many as are to go on."""
        size = size or count
        filter = self.rows.refilling
        if filter is None:
            return 1, range(count)
        for rounds in range(1, -(-count * (filter.refill + 1) // size) + 1):
            left = self.under(range(rounds * size), filter.remaining, (*self.rows.passed[filter.node], filter))
            alive = sorted({self.up(k, filter.remaining, 0)[1] for k in left})
            if len(alive) >= count:
                return rounds, alive[:count]
        return None

    def expected(self, node, count, size=0):
        """The rows that a node is handed in all."""
        rounds, kept = self.rounds(count, size)
        after = self.rows.refilling in self.rows.passed[node]
        return self.under(
            kept if after else range(rounds * (size or count)), self.rows.nodes[node], self.rows.passed[node]
        )
