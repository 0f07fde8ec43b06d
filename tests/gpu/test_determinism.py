"""``trainer.deterministic`` on a GPU; tests/e2e/test_trainer.py tests it on CPUs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.run.rundir import RunDir  # noqa: E402
from tests.e2e.test_trainer import finished_sft, long_sft  # noqa: E402
from tests.support.helpers import make_tiny_model, run_role  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"),
]


def run_sft(run: RunDir, name: str) -> tuple[int, str]:
    return run_role(run, "main", name)


@pytest.mark.parametrize("experts", [0, 4])
def test_the_same_run_twice_gives_the_same_bits(tmp_path, experts):
    tiny = make_tiny_model(tmp_path / "tiny", rows=300, hidden=64, experts=experts)
    one, other = (
        finished_sft(run_sft, tmp_path / name, long_sft(tiny), tiny, ranks=1).weights_step(10)
        for name in ("one", "other")
    )
    shards = sorted(path.name for path in one.glob("*.safetensors"))
    assert shards
    for name in shards:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
