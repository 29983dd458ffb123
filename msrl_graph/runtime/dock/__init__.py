"""The transfer dock: controllers, warehouses, and their clients.

See arXiv:2507.19017, figure 4.
"""
