"""From packed rows to the gradient: what decides shapes stays on the CPU, so that the host never waits for a GPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.common.errors import DataError  # noqa: E402
from primerl_hpc.plan.predict import layouts  # noqa: E402
from primerl_hpc.recipe.schema.training import GSPOLoss, IPOLoss  # noqa: E402
from primerl_hpc.trainer.batch import FORWARD_TOKENS, check_token_ids, make_batch, stack_rows  # noqa: E402
from primerl_hpc.trainer.losses import step_loss, try_loss  # noqa: E402
from primerl_hpc.trainer.metrics import MetricSums, add_token_metrics, means, metric_names  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from tests.support.flash_kernels import flash_kernels_on_cpu  # noqa: E402
from tests.support.helpers import random_row, small_rl  # noqa: E402
from tests.support.host_waits import HostWaits  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402

CPU = torch.device("cpu")
ENVS = ["a", "b", "c"]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("loss", [IPOLoss(), GSPOLoss()], ids=["ipo", "gspo"])
def test_a_micro_batch_never_waits_for_the_device(one_rank, tmp_path, family, loss):
    model = make_family(family, tmp_path)
    policy = build_policy(small_rl(model), model, one_rank)
    policy.attention = "varlen"
    rng = np.random.default_rng(0)
    rows = [random_row(rng, [9, 12, 3], num_envs=3), random_row(rng, [20, 2], num_envs=3)]
    rows[1].ref_kl_weights[:] = 0.1
    sums = MetricSums([*metric_names(ENVS), *try_loss(loss), "loss/ref_kl"], CPU)
    with flash_kernels_on_cpu(), HostWaits() as waits:
        batch = make_batch(rows, CPU)
        logprobs, entropies = policy(batch)
        loss_value, extra = step_loss(batch, logprobs, torch.ones(4), loss)
        loss_value.backward()
        for name, (total, count) in extra.items():
            sums.add(name, total, count)
        add_token_metrics(sums, batch, logprobs.detach(), entropies, ENVS)
    assert waits.found == []
    assert loss_value.isfinite()


def test_token_metrics_of_each_environment_are_those_of_its_tokens():
    rng = np.random.default_rng(3)
    batch = make_batch([random_row(rng, [9, 12, 3, 7], num_envs=2)], CPU)
    logprobs = batch.inference_logprobs + torch.from_numpy(rng.normal(size=len(batch.targets)))
    entropies = torch.from_numpy(rng.random(len(batch.targets)).astype(np.float32))
    sums = MetricSums(metric_names(ENVS), CPU)
    add_token_metrics(sums, batch, logprobs.float(), entropies, ENVS)
    found = dict(zip(sums.names, sums.values.tolist(), strict=True))
    ratio = (logprobs - batch.inference_logprobs).numpy()
    kl = np.where(batch.loss_mask.numpy(), np.expm1(ratio) - ratio, 0)
    for number, name in enumerate(ENVS):
        members = batch.env_ids.numpy() == number
        assert found[f"entropy/{name}/mean"] == pytest.approx(
            [entropies.numpy()[members].sum(), members.sum()]
        )
        sampled = (members & batch.loss_mask.numpy()).sum()
        assert found[f"mismatch_kl/{name}/mean"] == pytest.approx([kl[members].sum(), sampled], rel=1e-5)
    assert found["entropy/c/mean"] == [0, 0]


def test_deviation_and_maximum_of_the_mismatch_are_those_over_all_tokens_of_all_micro_batches(one_rank):
    rng = np.random.default_rng(5)
    sums = MetricSums(metric_names(ENVS), CPU)
    every: dict[str, list[np.ndarray]] = {name: [] for name in ENVS}
    for lengths in ([9, 12, 3], [20, 2]):
        batch = make_batch([random_row(rng, lengths, num_envs=2)], CPU)
        logprobs = batch.inference_logprobs + torch.from_numpy(rng.normal(size=len(batch.targets)))
        add_token_metrics(sums, batch, logprobs.float(), torch.zeros(len(logprobs)), ENVS)
        ratio = (logprobs.float() - batch.inference_logprobs).double().numpy()
        for number, name in enumerate(ENVS):
            members = (batch.env_ids.numpy() == number) & batch.loss_mask.numpy()
            every[name].append((np.expm1(ratio) - ratio)[members])
    found = means(sums.reduce())
    for name in ("a", "b"):
        tokens = np.concatenate(every[name])
        assert found[f"mismatch_kl/{name}/std"] == pytest.approx(tokens.std(), rel=1e-4)
        assert found[f"mismatch_kl/{name}/max"] == pytest.approx(tokens.max(), rel=1e-4)
    everything = np.concatenate([*every["a"], *every["b"]])
    assert found["mismatch_kl/all/std"] == pytest.approx(everything.std(), rel=1e-4)
    assert not any(name.startswith("mismatch_kl/c/") or "square" in name for name in found)


def test_members_of_a_component_are_the_tokens_with_a_weight():
    row = random_row(np.random.default_rng(0), [9, 12])
    row.rl_weights[:] = [1, 0]
    batch = make_batch([row], CPU)
    for name in ("rl", "ce", "ref_kl"):
        assert batch.members[name].tolist() == getattr(batch, f"{name}_weights").nonzero()[:, 0].tolist()
    assert 0 < len(batch.members["rl"]) < len(batch.targets)


def test_more_rows_share_a_forward_on_a_gpu_than_on_a_cpu():
    rows = [random_row(np.random.default_rng(0), [10])] * 64
    sizes = {kind: len(stack_rows(rows, 1024, torch.device(kind))[0]) for kind in FORWARD_TOKENS}
    assert sizes == {"cpu": 4, "cuda": 16}
    assert FORWARD_TOKENS["cuda"] == layouts.FORWARD_TOKENS  # the planner's
    assert len(stack_rows(rows, 100_000, torch.device("cuda"))) == 64


def test_a_token_without_an_embedding_is_named_before_a_kernel_reads_it():
    row = random_row(np.random.default_rng(0), [3, 4], num_envs=1)
    row.input_ids[:] = 5
    check_token_ids([row], 6)
    for wrong in (6, -1):
        row.input_ids[4] = wrong
        with pytest.raises(DataError, match=rf"token id {wrong} of a batch .* 6 embeddings \(token 1 of"):
            check_token_ids([row], 6)
