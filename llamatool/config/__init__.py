"""Who is this model: one configuration, whatever file it came from (standard library only)."""
