"""Measurements: what drafting brings on this machine, on these documents."""
