"""Results to terminal tables, plain text, JSON and pictures; computes nothing."""
