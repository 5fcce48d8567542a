"""Everything here needs torch; tiny models are fastest on one thread."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)
