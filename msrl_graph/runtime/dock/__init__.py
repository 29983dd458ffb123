"""The transfer dock (arXiv:2507.19017, figure 4): controllers, warehouses, and the way into them."""
