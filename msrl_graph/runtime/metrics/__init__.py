"""What a run reports: metrics, warnings, predicted against measured."""
