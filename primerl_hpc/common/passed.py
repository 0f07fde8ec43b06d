"""Variables of the submitting shell that reach a run: a list of names and patterns, without secrets.

    passed = PassedVariables(keep=("MY_SITE_*", "HF_TOKEN"), drop=("BASH_ENV",))
    passed.passes("NCCL_DEBUG", "INFO")             # True: NCCL_* is in the list
    passed.passes("HF_TOKEN", "hf_…")               # True only because its name is in ``keep``
    withheld_secrets(os.environ, ("HF_TOKEN",))     # names of secrets that a process does not get

The list has what interpreters, module systems, schedulers, libraries of accelerators and networks, and containers read.
A secret (`common.safety.secret_values`) passes only if its name is written in a recipe or profile, never by a pattern.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from primerl_hpc.common.safety.secret_values import is_secret

PASSED_BY_KIND = {
    "the user, the shell and its folders": """
        PATH HOME USER LOGNAME SHELL TERM TZ LANG LANGUAGE LC_* HOSTNAME PWD TMPDIR TMP TEMP XDG_*
        *SCRATCH* WORK WORKDIR MEMBERWORK PROJECT* STORE DATA LOCALDIR KRB5* BASH_ENV BASH_FUNC_*
        NO_COLOR FORCE_COLOR
    """,
    "module systems, and what they and sites set in login shells": """
        MODULE* LMOD* LOADEDMODULES _LMFILES_ _ModuleTable* __LMOD* __MODULES* FPATH EB* EASYBUILD*
        EESSI_* SPACK_* CRAY* PE_* RSNT_* CC_CLUSTER SYSTEMNAME STAGES CLUSTER* SITE* NERSC_* LUMI_*
        OLCF_* IDRIS_* CINECA_* TACC_* CSCS_* PAWSEY_*
    """,
    "interpreters, compilers and their libraries": """
        PYTHON* VIRTUAL_ENV* CONDA_* _CE_* MAMBA_* PYENV_* UV_* PIP_* LD_* LIBRARY_PATH CPATH
        *_INCLUDE_PATH PKG_CONFIG_PATH CMAKE_* CC CXX CUDAHOSTCXX OMP_* GOMP_* KMP_* MKL_* OPENBLAS_*
        NUMEXPR_* NUMBA_* MALLOC_* GLIBC_* HDF5_*
    """,
    "accelerators and networks": """
        CUDA_* CUDNN_* CUBLAS_* CUTE_* CUTLASS_* NVCC_* NVIDIA_* NVTE_* NVSHMEM_* DG_* ROC* HIP* HSA_*
        RCCL_* MIOPEN_* AMD_* GPU_DEVICE_ORDINAL ZE_* SYCL_* ONEAPI_* NCCL_* GLOO_* FI_* UCX_* NIXL_*
        MPI* OMPI_* I_MPI_* PALS_* MASTER_* DEEPEP_*
    """,
    "containers": """
        APPTAINER* SINGULARITY* SHIFTER* PODMAN* ENROOT_* UENV_* EDF_PATH
    """,
    "proxies and certificates": """
        *_PROXY *_proxy SSL_CERT_* REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    """,
    "libraries of models and trackers": """
        TORCH* PYTORCH_* TRITON_* INDUCTOR_* VLLM_* FLASH* XFORMERS_* TOKENIZERS_* HF_* HUGGINGFACE_*
        TRANSFORMERS_* DATASETS_* SAFETENSORS_* TIKTOKEN_* NLTK_DATA VF_* WANDB_* MLFLOW_* TRACKIO_*
        TENSORBOARD_* PRIME_* DO_NOT_TRACK PRIMERL_*
    """,
}
PASSED = tuple(name for names in PASSED_BY_KIND.values() for name in names.split())


@dataclass(frozen=True)
class PassedVariables:
    """Variables of the submitting shell that reach the job."""

    keep: tuple[str, ...] = ()
    """Names or patterns (``CONDA_*``) in addition to `PASSED`. A secret passes only by its name."""
    drop: tuple[str, ...] = ()

    def passes(self, name: str, value: str) -> bool:
        if self._dropped.fullmatch(name):
            return False
        if name in self.keep:
            return True
        return self._listed.fullmatch(name) is not None and not is_secret(name, value)

    def split(self, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Return the names of the variables that pass, and of those that do not."""
        passing = {name for name, value in environ.items() if self.passes(name, value)}
        return sorted(passing), sorted(environ.keys() - passing)

    def withheld(self, environ: Mapping[str, str]) -> list[str]:
        """Return the names of secrets in the list that do not pass: users may expect that they do."""
        _, others = self.split(environ)
        return [name for name in others if self._listed.fullmatch(name) and not self._dropped.fullmatch(name)]

    @cached_property
    def _listed(self) -> re.Pattern[str]:
        return _any_of((*PASSED, *self.keep))

    @cached_property
    def _dropped(self) -> re.Pattern[str]:
        return _any_of(self.drop)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)")


def withheld_secrets(environ: Mapping[str, str], named: Iterable[str]) -> list[str]:
    """Return the names of variables with secrets, without those in ``named``."""
    allowed = set(named)
    return sorted(name for name, value in environ.items() if name not in allowed and is_secret(name, value))
