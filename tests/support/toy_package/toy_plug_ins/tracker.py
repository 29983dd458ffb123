"""A tracker that writes the reward of each iteration into a file."""

from pathlib import Path

from msrl_graph.trackers import Tracker, points


class ToyTracker(Tracker):
    def begin(self, run):
        self.file = Path(run.folder) / "rewards.txt"
        self.file.write_text("")

    def add(self, line):
        step, numbers = points(line)
        with self.file.open("a") as file:
            file.write(f"{step} {numbers.get('reward')!r}\n")
