"""How fast this machine is, measured in processes as a run has them."""
