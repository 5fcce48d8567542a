"""The long-context test: prompts of exact length, their evaluation, and honest statistics."""
