"""An error becomes one sentence that names its cause, from the exception itself and from the log of a process."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.safety.error_text import describe_error, is_native_frame, last_error
from primerl_hpc.runtime.failures import last_lines


def chained() -> Exception:
    try:
        try:
            raise FileNotFoundError(2, "No such file or directory", "/data/words.txt")
        except OSError as error:
            raise ValueError("taskset words cannot be loaded") from error
    except ValueError as error:
        try:
            raise RuntimeError("the environment failed") from error
        except RuntimeError as outer:
            return outer


CHAIN = (
    "RuntimeError: the environment failed (caused by ValueError: taskset words cannot be loaded "
    "(caused by FileNotFoundError: [Errno 2] No such file or directory: '/data/words.txt'))"
)
REFUSED = """\
[E1124 06:02:22.990466314 socket.cpp:1028] [c10d] The client socket has timed out after 1000ms while trying to connect to (127.0.0.1, 1).
[W1124 06:02:22.990583349 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host 127.0.0.1:1 - retrying
Exception raised from throwTimeoutError at /pytorch/torch/csrc/distributed/c10d/socket.cpp:1030 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f1de61a5b8d in /x/libc10.so)
frame #10: <unknown function> + 0x3d2825 (0x7f1de4bd2825 in /x/libtorch_python.so)
<omitting python frames>
[0] frame #25: <unknown function> + 0x2724a (0x7f1de6c4524a in /lib/x86_64-linux-gnu/libc.so.6)
"""  # noqa: E501


def test_a_chain_of_exceptions_is_described_down_to_its_first_cause() -> None:
    error = chained()
    assert describe_error(error) == CHAIN
    log = ["starting", *"".join(traceback.format_exception(error)).splitlines(), "guard: done"]
    assert last_error(log) == CHAIN
    prefixed = [f"(EngineCore pid=7) ERROR 11-24 06:02:22 [core.py:70] {line}" for line in log]
    assert last_error(prefixed) == CHAIN


def test_a_cause_that_the_message_repeats_is_not_shown_twice() -> None:
    inner = ValueError("seq_len is too long")
    outer = RuntimeError(f"loading failed: {inner}")
    outer.__cause__ = inner
    assert describe_error(outer) == "RuntimeError: loading failed: seq_len is too long"


def test_the_engines_own_error_comes_before_the_report_that_it_ended() -> None:
    log = """\
(EngineCore pid=7) ERROR 11-24 06:02:22 [core.py:70] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-24 06:02:22 [core.py:70]   File "core.py", line 7, in init
(EngineCore pid=7) ERROR 11-24 06:02:22 [core.py:70] ValueError: To serve at least one request, 4 GiB KV cache is needed.
(APIServer pid=5) Traceback (most recent call last):
(APIServer pid=5)   File "server.py", line 9, in main
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""  # noqa: E501
    assert (
        last_error(log.splitlines()) == "ValueError: To serve at least one request, 4 GiB KV cache is needed."
    )


def test_what_pydantic_found_wrong_is_part_of_the_error() -> None:
    log = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
max_len
  Value error, User-specified max_model_len (8192) is greater than the derived max_model_len (128)
    For further information visit https://errors.pydantic.dev
"""
    assert "max_len Value error, User-specified max_model_len (8192) is greater" in last_error(
        log.splitlines()
    )


def test_the_end_of_a_long_line_is_kept(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"ValueError: {'x' * 5000} must be a power of two\n")
    (line,) = last_lines(tmp_path / "log")
    assert line.startswith("ValueError: x") and line.endswith("must be a power of two") and len(line) <= 1000


def test_native_stack_frames_are_left_out_and_the_sentence_stays(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(REFUSED)
    assert last_lines(tmp_path / "log") == REFUSED.splitlines()[:2]
    assert not is_native_frame('  File "x.py", line 3, in frame')


def test_a_refused_store_connection_shows_no_stack_frame() -> None:
    """Messages of torch itself, in case their form changes."""
    code = (
        "import datetime, torch.distributed as dist\n"
        "dist.TCPStore('127.0.0.1', 1, is_master=False, timeout=datetime.timedelta(seconds=1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "frame #" in done.stderr
    shown = [line for line in done.stderr.splitlines() if not is_native_frame(line)]
    assert not [line for line in shown if "frame #" in line or ".so" in line]
    assert "trying to connect to (127.0.0.1, 1)" in last_error(shown)


def test_a_role_that_vllm_refuses_names_the_argument() -> None:
    from primerl_hpc.inference import server

    with pytest.raises(ConfigError, match="unrecognized arguments: --no-such-option"):
        server._parse(["--model", "m", "--no-such-option"])
