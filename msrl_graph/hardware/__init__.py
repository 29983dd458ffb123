"""What a plan runs on: devices, hosts and links, each figure with its source."""
