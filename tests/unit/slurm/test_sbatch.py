"""Input of sbatch and the meaning of its messages. tests/slurm/test_submission.py submits to a real SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.render.engine import quote_directive
from primerl_hpc.slurm.commands import UNANSWERED, UnansweredError
from primerl_hpc.slurm.refusals import explain_refusal, hint_about_option, srun_reason
from primerl_hpc.slurm.sbatch import directives_of, submission_environ, submit_once
from tests.support.helpers import PATIENCE_S
from tests.support.sbatch import read_directives

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
    f"sbatch: error: invalid partition specified: gpu\n{FAILED}Invalid partition name specified": "partition gpu does not exist",  # noqa: E501
    f"{FAILED}No partition specified or system default partition": "no default partition",
    f"{FAILED}User's group not permitted to use this partition": "no access to partition gpu",
    f"{FAILED}Required partition not available (inactive or drain)": "gpu does not accept jobs",
    f"{FAILED}Invalid account or account/partition combination specified": "account physics",
    f"{FAILED}Invalid qos specification": "QOS long",
    f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)": "walltime 2-00:00:00",
    f"sbatch: error: AssocMaxSubmitJobLimit\n{FAILED}Job violates accounting/QOS policy (job submit limit, user's "
    "size and/or time limits)": "limit of queued jobs",
    f"sbatch: error: QOSMaxNodePerUserLimit\n{FAILED}Job violates accounting/QOS policy (job submit limit, user's "
    "size and/or time limits)": "QOSMaxNodePerUserLimit",
    f"{FAILED}Invalid feature specification": "features a100",
    f"{FAILED}Invalid generic resource (gres) specification": "gpu:h100:8",
    f"{FAILED}Invalid Trackable RESource (TRES) specification": "gpu:h100:8",
    f"{FAILED}Requested node configuration is not available": "no node of the partition satisfies",
    f"sbatch: error: Memory specification can not be satisfied\n{FAILED}Requested node configuration is not "
    "available": "no node of the partition satisfies",
    f"{FAILED}Node count specification invalid": "does not have 64 nodes",
    f"{FAILED}More processors requested than permitted": "256 CPUs",
    f"{FAILED}Access denied to requested reservation": "reservation class",
    f"{FAILED}Job dependency problem": "afterok:7",
    "sbatch: unrecognized option '--segment'\nTry \"sbatch --help\" for more information": "--segment",
    "sbatch: error: Invalid --time specification": "--time",
    "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsbatch: fatal: Could not establish a "
    "configuration source": "address of SLURM's controller",
    'sbatch: error: slurm_set_addr: Unable to resolve "head"\nsbatch: error: Unable to establish control machine '
    f"address\n{FAILED}No error": "address of SLURM's controller",
    f"{FAILED}Protocol authentication error": "cannot authenticate this machine",
    f"{FAILED}Access/permission denied": "not allowed to submit",
    f"{FAILED}Pathname of a file, directory or other parameter too long": "longer than SLURM accepts",
    "the site's own plugin says: no training on Sundays": "no training on Sundays",
    "": "no reason",
}


@pytest.mark.parametrize("said", SAID)
def test_every_refusal_is_one_sentence_with_the_value_that_was_refused(said: str) -> None:
    error = explain_refusal(said, [DIRECTIVES])
    assert SAID[said] in error.cause and "\n" not in str(error) and "{" not in str(error)
    assert error.hint or "Sundays" in said or not said
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
def test_communication_errors_are_retried(said: str) -> None:
    assert UNANSWERED.search(said)


def test_shell_variables_override_nothing_and_site_defaults_apply_to_unset_options() -> None:
    environ = {
        "PATH": "/bin",
        "SBATCH_ACCOUNT": "mine",
        "SBATCH_PARTITION": "debug",
        "SBATCH_ARRAY_INX": "0-9",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_NTASKS": "7",
        "SRUN_CPUS_PER_TASK": "1",
        "SALLOC_ACCOUNT": "x",
        "SLURM_JWT": "token",
        "HF_TOKEN": "token",
    }
    kept = submission_environ(environ, ["partition", "nodes"])
    assert kept == {"PATH": "/bin", "SBATCH_ACCOUNT": "mine", "SLURM_CONF": "/etc/slurm.conf"} | {
        "SLURM_JWT": "token"
    }
    assert "SBATCH_ACCOUNT" not in submission_environ(environ, ["account"])


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=20), max_size=4))
def test_our_parser_of_directives_agrees_with_sbatch(values: list[str]) -> None:
    lines = [f"#SBATCH --key-{index}={quote_directive(value)}" for index, value in enumerate(values)]
    script = "\n".join(["#!/bin/bash", "# note", *lines, "", "true", "#SBATCH --late=1"])
    expected = {f"key-{index}": value for index, value in enumerate(values)}
    assert directives_of(script) == dict(read_directives(script)) == expected


POLICY = [
    "***************************************",
    "Jobs on partition main must name a project with --comment=PROJECT:<id>.",
    "Yours names none.",
    "* See https://hpc.acme.example/policy#comments",
    "* or ask about a reservation: write to \x1b[31mhelp@acme.example\x1b[0m",
    "***************************************",
]


def test_a_rejection_of_many_lines_is_printed_complete_and_cannot_write_to_the_terminal() -> None:
    said = "\n".join(f"sbatch: error: {line}" for line in POLICY) + f"\n{FAILED}Unspecified error"
    text = str(explain_refusal(said, [DIRECTIVES]))
    sentence, *below = text.splitlines()
    assert "a rule of this site (job_submit) rejects it" in sentence
    assert [line.strip() for line in below[1:4]] == POLICY[:3]
    assert below[-2].strip() == POLICY[0] and below[-1].strip() == "Unspecified error"
    assert "\x1b" not in text and "\\x1b[31mhelp@acme.example" in text


def test_the_text_of_a_site_is_not_mistaken_for_the_reason_of_slurm() -> None:
    said = "\n".join(POLICY) + f"\n{FAILED}Access/permission denied"
    cause = explain_refusal(said, [DIRECTIVES]).cause
    assert "you are not allowed to submit jobs here" in cause and "reservation" not in cause


def test_a_cluster_without_job_arrays_is_recognized() -> None:
    said = f"sbatch: INFO: welcome\n{FAILED}Invalid job array specification"
    error = explain_refusal(said, [{"array": "0-3"}])
    assert "elastic engines need a job array (0-3)" in error.cause and "elastic" in error.hint


def test_the_output_of_a_retrying_sbatch_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text "Socket timed out" is not a message of SLURM here."""
    script, sbatch = tmp_path / "job.sbatch", tmp_path / "bin" / "sbatch"
    script.write_text("#!/bin/bash\ntrue\n")
    sbatch.parent.mkdir()
    retry = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    sbatch.write_text(f"#!/bin/sh\nfor i in 1 2; do echo '{retry}' >&2; done\nexec sleep 60\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    said: list[str] = []
    with pytest.raises(UnansweredError) as refused:
        submit_once(script, tmp_path / "kept", patience_s=6.0, timeout_s=5.0, report=said.append)
    words = f"{refused.value.cause} {said}"
    assert words.count("sleeping and retrying") >= 1 and "Socket timed out" not in words


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("segment=4", "scheduler.segment, which needs SLURM 24.05, to null"),
        ("mail-user", "scheduler.mail_user to null"),
        ("gpus-per-node", "scheduler.gpu_request"),
        ("threads-per-core", "node.threads_per_core"),
        ("comment", "scheduler.comment"),
    ],
)
def test_an_option_that_slurm_does_not_know_is_refused_with_the_key_of_the_profile(
    option: str, key: str
) -> None:
    said = f"Welcome\nto ACME\nsbatch: unrecognized option '--{option}'\nTry \"sbatch --help\" for more information"
    error = explain_refusal(said, [DIRECTIVES])
    assert "does not support an option" in error.cause and "Try" not in str(error)
    assert f"no option --{option.partition('=')[0]}: set {key}" in error.hint


@pytest.mark.parametrize(
    ("output", "reason", "hint"),
    [
        (
            "srun: unrecognized option '--container-image=x.sqsh'\nTry \"srun --help\" for more information\n",
            "unrecognized option '--container-image=x.sqsh'",
            "pyxis is a plug-in that this site lacks",
        ),
        (
            "srun: unrecognized option '--network=x'\nTry 'srun --help'",
            "'--network=x'",
            "scheduler.srun_extra",
        ),
        (
            "srun: error: Unable to create step for job 7: Invalid mpi type\nsrun: Terminating",
            "Invalid mpi",
            "",
        ),
        ("node: ok\nsrun: Job step aborted", "Job step aborted", ""),
        ("", "", ""),
    ],
)
def test_the_line_of_srun_that_states_the_reason_is_found(output: str, reason: str, hint: str) -> None:
    found = srun_reason(output)
    assert reason in found and "Try" not in found
    told = hint_about_option(f"srun: {found}")
    assert hint in told and bool(hint) == bool(told)


@pytest.mark.parametrize(
    ("directive", "variables", "reason"),
    [
        ("#SBATCH --clusters=big", {}, "the script sets --clusters"),
        ("#SBATCH -M big", {}, "the script sets -M"),
        ("", {"SBATCH_CLUSTERS": "big"}, "SBATCH_CLUSTERS is set to big"),
        ("", {"SLURM_CLUSTERS": "big"}, "SLURM_CLUSTERS is set to big"),
    ],
)
def test_a_job_for_another_cluster_is_refused_before_sbatch(
    directive: str, variables: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id would be looked for on the default cluster, which does not know it."""
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{directive}\ntrue\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        submit_once(script, tmp_path / "kept", patience_s=PATIENCE_S, timeout_s=PATIENCE_S, report=print)
    assert reason in refused.value.cause and "SLURM_CONF" in str(refused.value.hint)
    assert not (tmp_path / "kept").exists()


def test_a_job_that_a_wrapper_of_the_site_sent_to_another_cluster_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, tools = tmp_path / "job.sbatch", tmp_path / "bin"
    script.write_text("#!/bin/bash\ntrue\n")
    tools.mkdir()
    for name, body in (
        ("sbatch", "echo Submitted batch job 7 on cluster big"),
        ("scancel", f'echo "$@" >{tmp_path}/cancelled'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="submitted the job to cluster big; it is cancelled"):
        submit_once(script, tmp_path / "kept", patience_s=PATIENCE_S, timeout_s=PATIENCE_S, report=print)
    assert (tmp_path / "cancelled").read_text().split() == ["--clusters=big", "7"]
    assert not list((tmp_path / "kept").iterdir())
