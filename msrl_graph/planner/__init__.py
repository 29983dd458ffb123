"""Planning of what a program leaves open: pools, layouts, engines and offloading."""
