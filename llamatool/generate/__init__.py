"""Running a model: prompts, stops, sampling, streaming, and the loop that joins them."""
