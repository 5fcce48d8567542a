"""How large: parameters, weight bytes, KV cache and fit (standard library only)."""
