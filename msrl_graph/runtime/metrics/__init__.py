"""Reports of a run: metrics, warnings, and comparisons with predicted values."""
