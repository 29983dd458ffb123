"""The command msrl-compile, as `python -m msrl_graph.cli`."""

import sys

from .compile import compile_main

sys.exit(compile_main())
