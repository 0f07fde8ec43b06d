"""Variables, umask and home folder of a test run, whatever the user, the job or the machine that starts it has set.

`tests/conftest.py` calls it before any test is collected; the processes of tests inherit the result.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

import pytest

OF_OTHERS = (
    *("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "PMI_", "PMIX_", "OMPI_"),
    *"PRIMERL_ HF_ TRANSFORMERS_ VLLM_ TORCH NCCL_ GLOO_ OMP_ MKL_ WANDB_ DO_NOT_TRACK".split(),
    *"OPENAI_ ANTHROPIC_ CONDA_ APPTAINER SINGULARITY XDG_ LC_ LANGUAGE GIT_ TMUX".split(),
    *"BASH_ENV MASTER_ RANK WORLD_SIZE LOCAL_RANK PYTHONHOME PYTHONSTARTUP PYTHONWARNINGS".split(),
    *"PYTHONUTF8 PYTHONIOENCODING PYTHONCOERCECLOCALE PYTHONOPTIMIZE COLUMNS LINES NO_COLOR".split(),
    "FORCE_COLOR",
)
"""Prefixes of variables that change what commands, runs or libraries do."""
KEPT = ("PRIMERL_VENV",)
OF_TESTS = "PRIMERL_TEST_"
"""Variables of the test run itself, which tests read without ``PRIMERL_``: commands refuse unknown names with it."""
NUMBERS_OF_TESTS = (OF_TESTS + "PATIENCE", OF_TESTS + "POLL_S")
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
SET = {"LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def isolate(home: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove variables of others from ``environ``; set an empty home folder, the language C.UTF-8 and umask 022.

    Raises:
        pytest.UsageError: a variable of the test run is unknown or not a number above zero.
    """
    for name in list(environ):
        if name.startswith(OF_TESTS) and environ[name]:
            environ[name.removeprefix("PRIMERL_")] = str(_number(name, environ[name]))
        is_of_others = name.startswith(OF_OTHERS) and not name.startswith(KEPT)
        if is_of_others or name.lower() in PROXIES:
            del environ[name]
    environ |= SET | {"HOME": str(home)}
    os.umask(0o022)


def _number(name: str, value: str) -> float:
    if name not in NUMBERS_OF_TESTS:
        raise pytest.UsageError(f"{name} is unknown; a test run knows {' and '.join(NUMBERS_OF_TESTS)}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise pytest.UsageError(f"{name}={value} is not a number above zero")
    return number
