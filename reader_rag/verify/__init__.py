"""Verifying: logits, KV and the walk. Knows no text and no sources."""
