"""The network: one decoder for every text Llama, read from the layer plan (needs PyTorch)."""
