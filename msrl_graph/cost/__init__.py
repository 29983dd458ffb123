"""Seconds and bytes of what a plan does, as closed forms of its sizes."""
