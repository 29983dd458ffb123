"""The hardware of a plan: figures of devices, hosts and links, with their sources."""
