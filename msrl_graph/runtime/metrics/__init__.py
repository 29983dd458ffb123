"""What a run tells: metrics, warnings, predicted against measured."""
