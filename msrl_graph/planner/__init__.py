"""What the file leaves open, chosen: pools, layouts, engines, and what leaves the devices."""
