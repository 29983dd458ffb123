"""Programs with agents, and rows that a rank draws from them."""

PROGRAM = """
algorithm talk {{
  columns {{
    question  : text
    answer    : text
    response  : i32[<= 300]
    mask      : bool[response]
    old_logp  : f32[response]
    reward    : f32
    said      : text
    advantage : f32[response]
  }}
  worker actor : policy
  worker host  : function
  source(4) -> question, answer
  node actor.generate(question, answer) -> response, mask, reward, said {{
    samples = 2, agent = "{path}:solve", {more}
  }}
  node actor.infer(response) -> old_logp
  node host.advantage(response, reward) -> advantage {{ call = group_norm(), per = question }}
  node actor.update(response, mask, old_logp, advantage) {{
    loss = clip(0.2), optimizer = adamw(lr = 1e-3), mini_batch = 8
  }}
  source -> actor.generate -> actor.infer, host.advantage
  actor.infer, host.advantage -> actor.update
  actor.update => actor.generate
}}
cluster laptop {{ device = "cpu", devices_per_node = {devices} }}
deploy talk on laptop {{
  model policy = "{model}"
  data source = "rows.jsonl"
  layout actor.update {{ dp = {devices} }}
  layout actor.generate {{ {layout} }}
  engine actor.generate = hf
  engine actor.update = fsdp
  run {{ seed = 3 }}
}}
"""


QUESTIONS = ["one plus two", "two plus two", "one", "what is three"]


ANSWERS = ["85", "4", "181", "6"]
