"""Plug-ins of a package outside of msrl_graph, one of each kind."""
