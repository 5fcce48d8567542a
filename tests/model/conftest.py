"""Everything here needs torch and, as an oracle, transformers; tiny models are fastest alone."""

import importlib.util

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []

if not MISSING:
    import torch

    torch.set_num_threads(1)


def pytest_report_header() -> list[str]:
    return [f"tests/model: left out, {' and '.join(MISSING)} missing"] if MISSING else []
