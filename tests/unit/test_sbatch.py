"""What goes to sbatch, and what its words mean. Submission itself is tested on a real SLURM (tests/slurm/test_submission.py)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.sbatch import directives_of, submission_environ
from primerl_hpc.common.slurm import UNANSWERED
from primerl_hpc.launch.refusals import explain_refusal
from primerl_hpc.render.engine import quote_directive
from tests.sbatch import read_directives

FAILED = "sbatch: error: Batch job submission failed: "
DIRECTIVES = {
    "partition": "gpu",
    "account": "physics",
    "qos": "long",
    "time": "2-00:00:00",
    "constraint": "a100",
    "nodes": "64",
    "gres": "gpu:h100:8",
    "mem": "900G",
    "cpus-per-task": "256",
    "reservation": "class",
    "dependency": "afterok:7",
}
SAID = {
    f"sbatch: error: invalid partition specified: gpu\n{FAILED}Invalid partition name specified": "no partition gpu",
    f"{FAILED}No partition specified or system default partition": "no default one",
    f"{FAILED}User's group not permitted to use this partition": "may not use partition gpu",
    f"{FAILED}Required partition not available (inactive or drain)": "gpu takes no jobs",
    f"{FAILED}Invalid account or account/partition combination specified": "account physics",
    f"{FAILED}Invalid qos specification": "QOS long",
    f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)": "walltime of 2-00:00:00",
    f"sbatch: error: AssocMaxSubmitJobLimit\n{FAILED}Job violates accounting/QOS policy (job submit limit, user's "
    "size and/or time limits)": "as many jobs in the queue",
    f"sbatch: error: QOSMaxNodePerUserLimit\n{FAILED}Job violates accounting/QOS policy (job submit limit, user's "
    "size and/or time limits)": "QOSMaxNodePerUserLimit",
    f"{FAILED}Invalid feature specification": "features a100",
    f"{FAILED}Invalid generic resource (gres) specification": "gpu:h100:8",
    f"{FAILED}Invalid Trackable RESource (TRES) specification": "gpu:h100:8",
    f"{FAILED}Requested node configuration is not available": "no node of the partition has",
    f"sbatch: error: Memory specification can not be satisfied\n{FAILED}Requested node configuration is not "
    "available": "no node of the partition has",
    f"{FAILED}Node count specification invalid": "cannot give 64 nodes",
    f"{FAILED}More processors requested than permitted": "256 CPUs",
    f"{FAILED}Access denied to requested reservation": "reservation class",
    f"{FAILED}Job dependency problem": "afterok:7",
    "sbatch: unrecognized option '--segment'\nTry \"sbatch --help\" for more information": "--segment",
    "sbatch: error: Invalid --time specification": "--time",
    "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsbatch: fatal: Could not establish a "
    "configuration source": "address of SLURM's controller",
    'sbatch: error: slurm_set_addr: Unable to resolve "head"\nsbatch: error: Unable to establish control machine '
    f"address\n{FAILED}No error": "address of SLURM's controller",
    f"{FAILED}Protocol authentication error": "does not trust this machine",
    f"{FAILED}Access/permission denied": "may not submit",
    f"{FAILED}Pathname of a file, directory or other parameter too long": "longer than SLURM takes",
    "the site's own plugin says: no training on Sundays": "no training on Sundays",
    "": "no reason",
}


@pytest.mark.parametrize("said", SAID)
def test_every_refusal_is_one_sentence_with_the_value_that_was_refused(said: str) -> None:
    error = explain_refusal(said, DIRECTIVES)
    assert SAID[said] in error.cause and "\n" not in str(error) and "{" not in str(error)
    assert error.mend or "Sundays" in said or not said
    assert not UNANSWERED.search(said), "it would be tried again"


@pytest.mark.parametrize(
    "said",
    [
        f"{FAILED}Socket timed out on send/recv operation",
        f"{FAILED}Unable to contact slurm controller (connect failure)",
        f"{FAILED}Resource temporarily unavailable",
        f"{FAILED}Zero Bytes were transmitted or received",
        f"{FAILED}Slurm backup controller in standby mode",
        f"{FAILED}Transport endpoint is not connected",
        f"{FAILED}Unable to create job record, try again",
    ],
)
def test_faults_of_the_transport_are_tried_again(said: str) -> None:
    assert UNANSWERED.search(said)


def test_a_shells_variables_override_nothing_and_a_sites_defaults_fill_what_the_script_leaves_open() -> None:
    environ = {
        "PATH": "/bin",
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_PARTITION": "debug",
        "SBATCH_ARRAY_INX": "0-9",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_NTASKS": "7",
        "SRUN_CPUS_PER_TASK": "1",
        "SALLOC_ACCOUNT": "x",
    }
    kept = submission_environ(environ, ["partition", "nodes"])
    assert kept == {"PATH": "/bin", "SBATCH_ACCOUNT": "mine", "SLURM_CONF": "/etc/slurm.conf"}
    assert "SBATCH_ACCOUNT" not in submission_environ(environ, ["account"])


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=20), max_size=4))
def test_our_reader_of_directives_agrees_with_sbatchs(values: list[str]) -> None:
    lines = [f"#SBATCH --key-{index}={quote_directive(value)}" for index, value in enumerate(values)]
    script = "\n".join(["#!/bin/bash", "# note", *lines, "", "true", "#SBATCH --late=1"])
    expected = {f"key-{index}": value for index, value in enumerate(values)}
    assert directives_of(script) == dict(read_directives(script)) == expected
