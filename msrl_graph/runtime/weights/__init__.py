"""Code that reshards weights, sends them between pools, saves and restores them."""
