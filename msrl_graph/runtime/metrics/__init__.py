"""Reports of a run: metrics, warnings, and predicted against measured values."""
