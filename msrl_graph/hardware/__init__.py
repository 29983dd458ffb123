"""The hardware of a plan: devices, hosts and links, each figure with its source."""
