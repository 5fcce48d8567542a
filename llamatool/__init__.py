"""Inspect, size, convert and run Llama checkpoints."""

__version__ = "0.1.0"
