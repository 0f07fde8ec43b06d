"""Every metric in metrics/*.jsonl: name, unit, meaning, and the files that contain it.

    find_metric("reward/math/mean").unit       → "reward"
    find_metric("time/step", "trainer").meaning → "duration of a training step"

`status` and `report` take labels and units from here, and docs/watching.md contains the table that `markdown_table`
returns:

    python -m primerl_hpc.observe.metric_catalog

To add a metric, write it in its producer and add a line to `METRICS`. tests/unit/observe/test_metric_catalog.py fails
if a producer writes a name that is missing here, or if docs/watching.md is outdated.

In a name, ``<statistic>`` is mean, min, max, p10 or p90, other words in angle brackets are one path component, and
parts in square brackets are optional. The metrics that a custom loss returns are not listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

MetricFile = Literal["orchestrator", "trainer", "sft", "eval"]
FILES: tuple[MetricFile, ...] = ("orchestrator", "trainer", "sft", "eval")
_STATISTIC = "(?:mean|min|max|p10|p90)"


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    """Unit of the value; "" for dimensionless numbers, "share" for 0 to 1."""
    meaning: str
    files: tuple[MetricFile, ...]
    """Names of the files below metrics/, without suffix. Each is written by the process of that name or its
    evaluator.
    """
    label: str = ""
    """Label in `status`."""
    form: str = "{:g}"
    """Format of the value in `status`."""

    def text(self, value: float) -> str:
        """Return label and value: ``reward 0.812``."""
        return f"{self.label} {self.form.format(value)}"


def _in(*files: MetricFile, rows: str) -> tuple[Metric, ...]:
    """Parse ``rows`` of ``name | unit | meaning [| label | format]``."""
    fields = ([part.strip() for part in row.split(" | ")] for row in rows.strip().splitlines())
    return tuple(Metric(name, unit, meaning, files, *more) for name, unit, meaning, *more in fields)


METRICS: tuple[Metric, ...] = (
    *_in(
        "orchestrator",
        rows="""
reward[/<environment>[/<agent>]]/<statistic> | reward | reward of the rollouts of the batch | reward | {:.3f}
rewards[/<environment>]/<reward>/mean | reward | mean of one reward function of an environment
metrics[/<environment>]/<metric>/mean |  | mean of a metric that an environment reports
completion_tokens[/<environment>[/<agent>]]/<statistic> | tokens | sampled tokens of a rollout
prompt_tokens[/<environment>[/<agent>]]/<statistic> | tokens | prompt tokens of a rollout
turns[/<environment>[/<agent>]]/<statistic> | turns | turns of a rollout
branches[/<environment>[/<agent>]]/<statistic> | samples | training sequences of a rollout
truncated[/<environment>[/<agent>]]/mean | share | rollouts that reached a length limit
control_text[/<environment>]/mean | share | rollouts whose completion contains the text of a control token
control_text[/<environment>]/count | rollouts | number of such rollouts
errored_rollouts/all | share | rollouts of the batch that failed
errored_rollouts/<environment> | share | rollouts of an environment that failed
empty_rollouts/all | share | rollouts without a sampled token: often a prompt that fills max_model_len
empty_rollouts/<environment> | share | rollouts of an environment without a sampled token
seq_len/all/mean | tokens | mean of prompt and sampled tokens of a rollout
seq_len/all/max | tokens | longest rollout; near seq_len, samples are truncated (packing/truncated)
seq_len/<environment>/mean | tokens | the same for an environment
seq_len/<environment>/max | tokens | longest rollout of an environment
rollout_s[/<environment>]/<statistic> | s | duration of a rollout
solve_none[/<environment>] | share | groups in which no rollout has the full reward
solve_all[/<environment>] | share | groups in which every rollout has the full reward
solve_some[/<environment>] | share | groups in which some rollouts have the full reward
effective/reward[/<environment>]/<statistic> | reward | reward, with a training signal only
effective/completion_tokens[/<environment>]/<statistic> | tokens | sampled tokens, with a training signal only
effective/turns[/<environment>]/<statistic> | turns | turns, with a training signal only
effective/branches[/<environment>]/<statistic> | samples | training sequences, with a training signal only
effective/truncated[/<environment>]/mean | share | truncated rollouts among those with a training signal
batch/rollouts | rollouts | rollouts in the batch
batch/samples | samples | training sequences in the batch
batch/tokens | tokens | tokens in the packed rows
batch/trained_tokens | tokens | tokens that contribute to the loss
batch/trainable | share | rollouts with a training signal
batch/<environment>/ratio | share | groups of the batch from this environment
batch/groups_without_signal | groups | groups without a training signal
batch/groups_refilled | groups | groups replaced by new ones because they had no signal
batch/groups_rejected | groups | groups rejected by gates
batch/groups_failed | groups | groups in which every rollout failed
batch/rollouts_passed_over | rollouts | finished rollouts that were left out of the batch
off_policy/mean | steps | mean staleness of the rollouts of the batch
off_policy/max | steps | maximum staleness of the rollouts of the batch | max staleness | {:.0f}
off_policy/dropped | rollouts | rollouts dropped because they were too stale
off_policy/in_flight/mean | steps | mean age of the policy version with which rollouts in flight started
off_policy/in_flight/max | steps | maximum age of the policy version with which rollouts in flight started
off_policy/in_queue/mean | steps | mean age of the policy version of the rollouts that wait for a batch
off_policy/in_queue/max | steps | maximum age of the policy version of the rollouts that wait for a batch
packing/rows | rows | packed rows of all data-parallel ranks
packing/fill | share | positions of the rows that hold a token
packing/dummies | rows | empty rows that give every rank the same number of micro-batches
packing/truncated | samples | samples truncated to seq_len
packing/untrainable | samples | samples without a trainable token after truncation
dispatcher/in_flight | rollouts | rollouts in flight
dispatcher/dispatched | rollouts | rollouts started since the start of the process
dispatcher/finished | rollouts | rollouts finished since the start of the process
dispatcher/failed | rollouts | rollouts failed since the start of the process
dispatcher/cancelled | rollouts | rollouts canceled since the start of the process
dispatcher/retried | rollouts | rollouts retried since the start of the process
dispatcher/groups_started | groups | groups started since the start of the process
dispatcher/groups_finished | groups | groups finished since the start of the process
dispatcher/groups_cancelled | groups | groups canceled since the start of the process
failures/<environment>/<kind> | rollouts | failed attempts by kind of error since the start of the process
gates/<environment>/<gate>/rejected | groups | groups rejected by a gate
filters/<filter>/detected | share | rollouts detected by a filter
curriculum/<environment>/<pool> | tasks | tasks in a pool of the curriculum
progress/rollouts | rollouts | scored rollouts since the start of the run
progress/tokens | tokens | sampled tokens of those rollouts
progress/<environment>/epoch | epochs | epoch of the environment's tasks
concurrency/limit | rollouts | current limit on rollouts in flight
concurrency/grow | decisions | decisions to raise the limit since the last batch
concurrency/hold | decisions | decisions to keep the limit since the last batch
concurrency/trim | decisions | decisions to reach the limit by starting no rollouts since the last batch
concurrency/cut | decisions | decisions to cancel rollouts to reach a lower limit since the last batch
inference/engines | engines | engines that respond
inference/running | requests | requests that the engines execute
inference/waiting | requests | requests that wait in the engines
inference/preemptions | requests | requests preempted for lack of KV cache
inference/kv_usage/mean | share | used KV cache, mean over the engines
inference/kv_usage/max | share | used KV cache of the fullest engine | KV cache | {:.0%}
inference/idle | share | polls that found an engine without requests | engines idle | {:.0%}
inference/tokens_per_s | tokens/s | tokens generated by all engines | engines | {:.0f} tok/s
inference/prefill_other | prompts | prompts prefilled by a prefill engine
inference/prefill_self | prompts | prompts prefilled by the decoding engine itself
watcher/updates | updates | weight updates since the last batch
event_loop_lag/mean | s | mean delay of the event loop
event_loop_lag/p99 | s | 99th percentile of the delay of the event loop
event_loop_lag/max | s | maximum delay of the event loop
time/step | s | time between two batches | s/batch | {:.2f}
time/wait_for_policy | s | time in which a complete batch, or the start of rollouts, waited for the trainer
time/pack | s | time to pack the batch
time/send | s | time to write the batch
time/save_ckpt | s | time to save the orchestrator's state
time/weight_update | s | longest time from detecting a new policy until it is live | update | {:.2f} s
time/engines_paused | s | longest time for which engines were paused for an update
time/hand_over | s | longest time from the trainer's request for shared accelerators until the engines slept
system/ckpt_disk_free_gib | GiB | free space on the filesystem of the run directory
system/ckpt_disk_used_share | share | used space on the filesystem of the run directory
""",
    ),
    *_in(
        "trainer",
        "sft",
        rows="""
loss/mean |  | loss of the step | loss | {:+.4f}
loss/ce | nats | mean negative log-likelihood of distilled and demonstrated tokens
loss/nan_count | micro-batches | micro-batches of all ranks with a non-finite loss
entropy/all/mean | nats | mean entropy of the policy over trained tokens | entropy | {:.3f}
max_vio |  | load of the busiest expert above the mean, over the mean (arXiv 2408.15664)
routing_confidence | share | largest routing weight of a token over the sum of its weights
optim/grad_norm |  | gradient norm before clipping
optim/zero_grad_ratio | share | elements of gradients that are exactly 0, e.g. of experts without tokens
optim/lr |  | learning rate
optim/skipped | steps | 1 if the update was skipped because loss or gradient were not finite
optim/loss_scale |  | factor of the loss during the step, with param_dtype float16
perf/throughput | tokens/s | tokens trained per second | trainer | {:.0f} tok/s
perf/throughput_per_gpu | tokens/s | tokens trained per second and accelerator
perf/peak_memory | GiB | peak memory of the rank (reserved on a GPU, resident on a CPU) | trainer peak | {:.1f} GiB
perf/mfu | share | model FLOP/s utilization
checkpoint/failed | checkpoints | checkpoints that failed since the start of the process
time/step | s | duration of a training step | s/step | {:.2f}
time/load_data | s | time to read the batch
time/forward_backward | s | time of all forward and backward passes
time/optimizer | s | time of the optimizer step
time/save_ckpt | s | time for which saving a checkpoint blocked training
""",
    ),
    *_in(
        "trainer",
        rows="""
loss/ref_kl | nats | mean KL divergence from the reference model per token
entropy/<environment>/mean | nats | mean entropy over the tokens of an environment
mismatch_kl/all/mean | nats | mean KL divergence between trainer and engine (k3 estimator) | mismatch KL | {:.1e}
mismatch_kl/all/std | nats | standard deviation of the mismatch KL over sampled tokens
mismatch_kl/all/max | nats | largest mismatch KL of a token: a few large values indicate numerics, many a wrong version
mismatch_kl/<environment>/mean | nats | mismatch KL over the tokens of an environment
mismatch_kl/<environment>/std | nats | its standard deviation
mismatch_kl/<environment>/max | nats | its largest value
kl_ent_ratio |  | mismatch KL over entropy
is_masked/mean | share | tokens that the loss masks
is_masked_low/mean | share | tokens masked by the lower bound
is_masked_high/mean | share | tokens masked by the upper bound
is_clipped/mean | share | tokens whose importance ratio is clipped
is_clipped_low/mean | share | tokens clipped by the lower bound
is_clipped_high/mean | share | tokens clipped by the upper bound
masked_mismatch_kl/mean | nats | mismatch KL over masked tokens
unmasked_mismatch_kl/mean | nats | mismatch KL over unmasked tokens
masked_advantage_positive/mean | share | masked tokens with a positive advantage
masked_advantage_negative/mean | share | masked tokens with a negative advantage
time/wait_for_batch | s | time for which the trainer waited for the batch
time/broadcast_weights | s | time to publish the weights
time/wait_for_turn | s | time for which the trainer waited until the engines slept
time/move_to_device | s | time to move weights and optimizer state from host memory to the accelerator
""",
    ),
    *_in(
        "sft",
        rows="""
loss/perplexity |  | exp(loss)
val/initial_loss | nats | validation loss before the first step
val/loss | nats | validation loss | validation loss | {:.4f}
progress/epoch | epochs | epoch of the data set
progress/num_samples | samples | samples in the batch
progress/total_samples | samples | samples read since the start of the run
progress/num_tokens | tokens | tokens trained since the start of the run
progress/num_cut | samples | samples truncated in this batch
progress/num_skipped | samples | samples skipped in this batch
progress/total_cut | samples | samples truncated since the start of the run
progress/total_skipped | samples | samples skipped since the start of the run
progress/<source>/ratio_samples | share | samples of the batch from a source
progress/<source>/ratio_tokens | share | tokens of the batch from a source
""",
    ),
    *_in(
        "eval",
        rows="""
eval/<environment>/tasks | tasks | evaluated tasks
eval/<environment>/rollouts | rollouts | finished rollouts
eval/<environment>/errors | rollouts | failed rollouts
eval/<environment>/errors/mean | share | failed rollouts
eval/<environment>/reward/<statistic> | reward | reward of the rollouts
eval/<environment>/completion_tokens/<statistic> | tokens | sampled tokens of a rollout
eval/<environment>/prompt_tokens/<statistic> | tokens | prompt tokens of a rollout
eval/<environment>/turns/<statistic> | turns | turns of a rollout
eval/<environment>/branches/<statistic> | samples | token sequences of a rollout
eval/<environment>/truncated/mean | share | rollouts that reached a length limit
eval/<environment>/limited | rollouts | failed rollouts that reached a limit of context or time; unsolved in avg@k
eval/<environment>/avg@<k> | reward | mean over the tasks of the mean reward of k rollouts
eval/<environment>/avg_finished@<k> | reward | avg@k without the rollouts that reached a limit
eval/<environment>/pass@<k> | share | probability that at least one of k rollouts solves the task
eval/<environment>/pass^<k> | share | probability that all of k rollouts solve the task
eval/policy_version/min | version | oldest policy version at the start of a rollout
eval/policy_version/max | version | newest policy version at the end of a rollout
time/eval | s | duration of the evaluation
""",
    ),
)


def find_metric(name: str, file: MetricFile | None = None) -> Metric:
    """Return the entry of metric ``name`` in ``file``. Raises KeyError if it is not in the catalog.

    ``file`` None: any; "time/step" is then the duration of a training step, which replaces the orchestrator's in a
    snapshot.
    """
    found = [metric for pattern, metric in _patterns() if pattern.fullmatch(name)]
    for candidate in (file,) if file is not None else ("trainer", *FILES):
        for metric in found:
            if candidate in metric.files:
                return metric
    raise KeyError(f"metric {name!r} is not in primerl_hpc/observe/metric_catalog.py")


def is_known(name: str, file: MetricFile | None = None) -> bool:
    try:
        find_metric(name, file)
    except KeyError:
        return False
    return True


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    return tuple((re.compile(_to_regex(metric.name)), metric) for metric in METRICS)


def _to_regex(name: str) -> str:
    regex = re.escape(name).replace(r"\[", "(?:").replace(r"\]", ")?").replace("<statistic>", _STATISTIC)
    return re.sub(r"<\w+>", "[^/]+", regex)


def markdown_table() -> str:
    """Return the tables for docs/watching.md, one for each set of files."""
    parts = []
    for files in dict.fromkeys(metric.files for metric in METRICS):
        names = " and ".join(f"`metrics/{file}.jsonl`" for file in files)
        rows = [
            f"| `{metric.name}` | {metric.unit or '-'} | {metric.meaning} |"
            for metric in METRICS
            if metric.files == files
        ]
        parts.append("\n".join([f"In {names}:", "", "| metric | unit | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(markdown_table())
