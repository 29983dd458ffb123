"""`python -m msrl_graph.cli` is msrl-compile."""

import sys

from .compile import compile_main

sys.exit(compile_main())
