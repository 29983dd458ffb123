"""States of runs that are saved and read."""

from msrl_graph.runtime.weights import checkpoint

PROGRAM = """
algorithm a {
  columns { prompt : i32[<= 8]
            answer : text
            response : i32[<= 8]
            reward : f32
            advantage : f32[response] }
  STATES
  worker actor : policy
  worker host : function
  source(3) -> prompt, answer
  node actor.generate(prompt) -> response { samples = 4 }
  node host.reward(response, answer) -> reward { call = exact_match() }
  node host.mixed(reward) { keep = mixed(), per = prompt REFILL }
  node host.advantage(response, reward) -> advantage { call = group_norm(), per = prompt }
  node actor.update(prompt, response, advantage) { loss = clip(), optimizer = adamw(lr = 1e-6) }
  source -> actor.generate -> host.reward -> host.mixed -> host.advantage -> actor.update
  SET
  actor.update => actor.generate
}
cluster c { device = "cpu", nodes = 1, devices_per_node = 1 }
deploy a on c { model policy = "tiny"
  data source = "tiny.jsonl" { prompt = "problem", answer = "answer" } }
"""


def saved(carried, folder, iteration):
    partial = checkpoint.begin(folder, iteration)
    files = carried.save(partial, {})
    manifest = checkpoint.Manifest(checkpoint.FORMAT, iteration, 0, {}, {}, tuple(files), carried.position)
    return checkpoint.commit(partial, manifest, 2)
