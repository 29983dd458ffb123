"""The transfer dock: controllers, warehouses, and the clients of the dock.

See arXiv:2507.19017, figure 4.
"""
