"""An engine: transformers' generation, with lower-case log lines of its own."""

from dataclasses import replace

from msrl_graph.backends import hf_spec
from msrl_graph.backends.hf import HfEngine

SPEC = replace(
    hf_spec.SPEC,
    name="toy",
    build="toy_plug_ins.engine:ToyEngine",
    capabilities=replace(hf_spec.SPEC.capabilities, chosen=()),
)


class ToyEngine(HfEngine):
    def filled(self):
        print("the toy engine has new weights", flush=True)

    def generate(self, request):
        print(f"the toy engine is asked for {request.sampling.samples} responses to a prompt", flush=True)
        return super().generate(request)
