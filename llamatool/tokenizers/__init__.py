"""Text to ids and back, exactly as the reference libraries do it."""
