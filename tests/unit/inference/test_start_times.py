"""Times of an engine's start are the numbers that the installed vLLM logs."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl_hpc.common import env
from primerl_hpc.inference.worker.start_times import StartTimes, read_start_times, record_start_times

MESSAGES = {
    "v1/worker/gpu_model_runner.py": '"Model loading took %s GiB memory and %.6f seconds"',
    "model_executor/model_loader/default_loader.py": '"Loading weights took %.2f seconds"',
    "compilation/monitor.py": 'torch.compile took %.2f s in total"',  # after a prefix in 0.32
    "v1/worker/gpu/model_runner.py": '"Graph capturing finished in %.0f secs, took %.2f GiB"',
}


@pytest.mark.parametrize("file", MESSAGES)
def test_the_installed_vllm_logs_these_messages(file: str) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    assert MESSAGES[file] in (Path(spec.origin).parent / file).read_text()


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    monkeypatch.setenv(env.MIRROR, str(tmp_path))
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.INFO)
    record_start_times()
    yield logging.getLogger("vllm.worker")
    for handler in [handler for handler in logger.handlers if isinstance(handler, StartTimes)]:
        logger.removeHandler(handler)
    logger.setLevel(before)


def test_numbers_of_messages_become_phases(recorder: logging.Logger, tmp_path: Path) -> None:
    recorder.info("Loading weights took %.2f seconds", 1.5)
    assert read_start_times() == {"model": 1.5}
    recorder.info("Model loading took %s GiB memory and %.6f seconds", "0.1", 2.25)
    recorder.info("torch.compile took %.2f s in total", 8.0)
    # of a second model: a draft or an encoder; the form of vLLM 0.32
    recorder.info("%storch.compile took %.2f s in total", "[encoder] ", 1.0)
    recorder.info("Graph capturing finished in %.0f secs, took %.2f GiB", 4.0, 0.5)
    recorder.info("Warming up")
    assert read_start_times() == {"model": 2.25, "compile": 9.0, "graph capture": 4.0}
    (tmp_path / "start-times-1.json").write_text('{"compile": 12.5}')  # a slower worker
    (tmp_path / "start-times-2.json").write_text('{"comp')
    assert read_start_times()["compile"] == 12.5


def test_nothing_is_recorded_outside_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.MIRROR, raising=False)
    record_start_times()
    assert not any(isinstance(handler, StartTimes) for handler in logging.getLogger("vllm").handlers)
