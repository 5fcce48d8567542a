"""On a GPU: the fused decoder, its steps and CUDA graphs give what the plain decoder gives."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from llamatool.generate.engine import Plan, Run  # noqa: E402
from llamatool.generate.sampling import Sampling  # noqa: E402
from llamatool.model.fast import DecodeStep, speed_up  # noqa: E402
from llamatool.model.static import StaticStep  # noqa: E402
from tests.model.tiny_models import BY_NAME  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("name", ["gqa", "tied", "mistral-sliding", "scout"])
def test_steps_on_a_gpu(name: str) -> None:
    _, plain = BY_NAME[name].build()
    plain = plain.cuda()
    fast = copy.deepcopy(plain)
    speed_up(fast)
    prompt = BY_NAME[name].ids(batch_size=1)[0].tolist()
    plan = Plan(Sampling(0.0), 20, frozenset())
    size = len(prompt) + 20
    expected = list(Run(plain, [prompt], plan))
    assert list(Run(fast, [prompt], plan, step=DecodeStep(fast))) == expected
    for backend in (None, "auto"):
        cache = fast.new_cache(size)
        step = StaticStep(fast, cache, backend=backend)
        assert list(Run(fast, [prompt], plan, step=step, cache=cache)) == expected
