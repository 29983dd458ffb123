"""Reports of a run: metrics, warnings, and measured next to predicted values."""
