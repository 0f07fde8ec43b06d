"""Every loss against its formula in float64 NumPy, and its gradient against finite differences."""

import dataclasses
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from primerl_hpc.common.errors import ConfigError, ExitCode  # noqa: E402
from primerl_hpc.recipe.schema.layout import TrainerLayout  # noqa: E402
from primerl_hpc.recipe.schema.training import (  # noqa: E402
    CISPOLoss,
    CustomLoss,
    DPPOLoss,
    GRPOLoss,
    GSPOLoss,
    IPOLoss,
)
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.batch import make_batch  # noqa: E402
from primerl_hpc.trainer.losses import (  # noqa: E402
    LossInputs,
    TokenLoss,
    component_counts,
    rl_loss,
    step_loss,
    try_loss,
)
from primerl_hpc.trainer.losses.custom import CustomLossError  # noqa: E402
from primerl_hpc.trainer.losses.policy_losses import ref_kl  # noqa: E402
from primerl_hpc.trainer.losses.step_loss import metric_sums, mismatch_kl  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import make_world  # noqa: E402
from primerl_hpc.trainer.train_step import build_trainer  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from tests.support.helpers import random_row, small_sft  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402

SEQUENCES = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3])
MEAN_LENGTH = 3.5  # with sequences that are elsewhere


def case(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    size = len(SEQUENCES)
    mu = -rng.uniform(0.05, 2.5, size)
    return {
        "logprobs": np.minimum(mu + 0.7 * rng.normal(size=size), -0.01),
        "inference_logprobs": mu,
        "advantages": rng.normal(size=4)[SEQUENCES],
        "ref_logprobs": -rng.uniform(0.05, 2.5, size),
    }


def inputs(values: dict[str, np.ndarray]) -> LossInputs:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    tensors["logprobs"].requires_grad_()
    ids = torch.tensor(SEQUENCES)
    return LossInputs(**tensors, sequence_ids=ids, num_sequences=5, mean_length=MEAN_LENGTH)


def numpy_loss(config, x: dict[str, np.ndarray], still: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """Compute the loss. ``still``: its inputs where the gradient is stopped; only log-probabilities differ."""
    lp, mu, adv = x["logprobs"], x["inference_logprobs"], x["advantages"]
    old = (still or x)["logprobs"]
    log_ratio, delta = lp - mu, np.exp(old) - np.exp(mu)
    ratio, old_ratio = np.exp(log_ratio), np.exp(old - mu)
    if config == "ref_kl":
        policy = -np.where(delta < -0.2, 0, (x["ref_logprobs"] - old) * ratio)
        return policy + 1e-3 * log_ratio**2
    if config.type == "custom":
        return -config.kwargs["scale"] * adv * lp
    kl = config.kl_tau * log_ratio**2
    if config.type == "dppo":
        drop = ((adv > 0) & (delta > config.mask_high)) | ((adv <= 0) & (delta < -config.mask_low))
        return -np.where(drop, 0, config.adv_tau * adv * ratio) + kl
    if config.type == "ipo":
        return -np.where(np.abs(delta) > config.threshold, 0, config.adv_tau * adv * ratio) + kl
    if config.type == "cispo":
        return -np.clip(old_ratio, 1 - config.clip_low, 1 + config.clip_high) * adv * lp + kl
    if config.type == "gspo":
        sequence = np.exp([(old - mu)[which == SEQUENCES].mean() for which in SEQUENCES])
        ratio = sequence * np.exp(lp - old)
    clipped = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss = -np.minimum(ratio * adv, clipped * adv) + kl
    return loss * MEAN_LENGTH / np.bincount(SEQUENCES)[SEQUENCES] if config.type == "gspo" else loss


def reinforce(x: LossInputs, scale: float) -> TokenLoss:
    return TokenLoss(-scale * x.advantages * x.logprobs, {"longing": x.advantages.abs()})


CONFIGS = [
    DPPOLoss(mask_low=0.1, mask_high=0.15, adv_tau=0.7, kl_tau=0.02),
    IPOLoss(threshold=0.1, adv_tau=1.3, kl_tau=0.02),
    GRPOLoss(clip_low=0.2, clip_high=0.3, kl_tau=0.02),
    GSPOLoss(clip_low=0.1, clip_high=0.2, kl_tau=0.02),
    CISPOLoss(clip_low=0.5, clip_high=0.6, kl_tau=0.02),
    CustomLoss(import_path=f"{__name__}:reinforce", kwargs={"scale": 0.5}),
    "ref_kl",
]
NAMES = ["dppo", "ipo", "grpo", "gspo", "cispo", "custom", "ref_kl"]


def torch_loss(x: LossInputs, config) -> torch.Tensor:
    return (ref_kl(x) if config == "ref_kl" else rl_loss(x, config)).loss


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_is_its_formula(config, seed):
    values = case(seed)
    np.testing.assert_allclose(
        torch_loss(inputs(values), config).detach(), numpy_loss(config, values), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_gradient_is_the_finite_difference_of_the_formula(config, seed):
    """Masks, gspo's sequence ratio, cispo's weight and the reverse KL's advantage have no gradient."""
    values, step = case(seed), 1e-6
    x = inputs(values)
    torch_loss(x, config).sum().backward()
    for token in range(len(SEQUENCES)):
        sides = []
        for sign in (1, -1):
            moved = values | {"logprobs": values["logprobs"].copy()}
            moved["logprobs"][token] += sign * step
            sides.append(numpy_loss(config, moved, values).sum())
        assert x.logprobs.grad[token].item() == pytest.approx(
            (sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8
        )


@pytest.mark.parametrize(
    "config",
    [config for config in CONFIGS if not isinstance(config, CustomLoss)],
    ids=[name for name in NAMES if name != "custom"],
)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_beyond_float32_leaves_loss_gradients_and_metrics_finite(config, advantage):
    """A token that is nearly impossible for the engine (log μ = -1000) and likely for the trainer: π/μ = e^999.9."""
    expected, found = ({name: value.astype(np.float32) for name, value in case(1).items()} for _ in range(2))
    expected["advantages"][:] = found["advantages"][:] = advantage
    token = 4  # of the second sequence
    found["inference_logprobs"][token], found["logprobs"][token] = -1e3, -0.1
    gradients = []
    for values in (expected, found):
        x = inputs(values)
        x = dataclasses.replace(x, **{name: getattr(x, name).detach().float() for name in values})
        x.logprobs.requires_grad_()
        result = ref_kl(x) if config == "ref_kl" else rl_loss(x, config)
        result.loss.sum().backward()
        assert result.loss.isfinite().all()
        gradients.append(x.logprobs.grad)
        assert x.logprobs.grad.isfinite().all()
        assert all(total.isfinite().all() for total, _ in metric_sums(x, result).values())
    is_other = torch.tensor(SEQUENCES) != SEQUENCES[token]
    assert torch.equal(gradients[0][is_other], gradients[1][is_other])


def test_dppo_drops_tokens_beyond_its_thresholds_and_none_at_them():
    values = case(0)
    x = inputs(values)
    delta = (x.logprobs.exp() - x.inference_logprobs.exp()).detach()
    up, down = int(delta.argmax()), int(delta.argmin())
    for name, token, advantage, limit in (
        ("mask_high", up, 1.0, delta[up].item()),
        ("mask_low", down, -1.0, -delta[down].item()),
        ("mask_low", down, 0.0, -delta[down].item()),
    ):
        x.advantages[:] = advantage
        for factor, is_dropped in ((1.0, False), (0.999, True)):
            config = DPPOLoss(**{"mask_high": 10.0, "mask_low": 10.0, name: factor * limit})
            metrics = rl_loss(x, config).metrics
            assert metrics["is_masked"].bool().tolist() == [
                is_dropped and index == token for index in range(len(delta))
            ]


def test_cispo_gives_every_token_a_gradient():
    x = inputs(case(2))
    rl_loss(x, CISPOLoss(clip_low=0.1, clip_high=0.1)).loss.sum().backward()
    assert (x.logprobs.grad != 0).all()


def per_sample(x: LossInputs) -> torch.Tensor:
    return x.sequence_mean(x.logprobs)[:2]


def detached(x: LossInputs) -> torch.Tensor:
    return x.logprobs.detach()


def silly(x: LossInputs) -> TokenLoss:
    return TokenLoss(-x.logprobs, {"name": 1.0})


def failing(x: LossInputs) -> torch.Tensor:
    return x.no_such_thing


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("nowhere:loss", ConfigError, "importing 'nowhere' failed"),
        ("tests.unit.trainer.test_losses:absent", ConfigError, "has no 'absent'"),
        (
            "tests.unit.trainer.test_losses:per_sample",
            CustomLossError,
            r"returned \(2,\), expected one number for each of the 4",
        ),
        ("tests.unit.trainer.test_losses:silly", CustomLossError, "returned float as metric name"),
        ("tests.unit.trainer.test_losses:failing", CustomLossError, "raised AttributeError: .*no_such_thing"),
        (
            "tests.unit.trainer.test_losses:detached",
            CustomLossError,
            "does not depend on x.logprobs \\(no gradient\\)",
        ),
    ],
)
def test_a_custom_loss_that_cannot_be_used_is_refused_before_the_first_step(path, kind, message):
    with pytest.raises(kind, match=message) as caught:
        try_loss(CustomLoss(import_path=path))
    assert kind is ConfigError or caught.value.exit_code == ExitCode.NO_CONTINUE


def test_every_metric_of_a_step_is_among_those_that_the_trial_named():
    row = random_row(np.random.default_rng(0), [9, 12])
    batch, counts = make_batch([row], torch.device("cpu")), torch.ones(4)
    for config in CONFIGS[:-1]:
        _, found = step_loss(batch, batch.inference_logprobs + 0.3, counts, config)
        assert set(found) == {"loss/rl", *try_loss(config)}
    assert found["longing/mean"][0] == batch.advantages.abs().sum()


def test_masked_and_unmasked_tokens_have_metrics_of_their_own():
    rng = np.random.default_rng(1)
    row = random_row(rng, [4] * 10)
    row.advantages[:] = np.where(rng.random(10) < 0.5, -1, 1)
    batch = make_batch([row], torch.device("cpu"))
    logprobs = batch.inference_logprobs + torch.from_numpy(rng.normal(size=len(batch.targets)))
    _, found = step_loss(batch, logprobs, torch.ones(4), IPOLoss(threshold=0.01))
    masked = ((logprobs.exp() - batch.inference_logprobs.exp()).abs() > 0.01).numpy()
    kl = mismatch_kl(logprobs, batch.inference_logprobs).numpy()
    assert 0 < masked.sum() < len(masked)
    for name, values, members in (
        ("masked_mismatch_kl", kl, masked),
        ("unmasked_mismatch_kl", kl, ~masked),
        ("masked_advantage_positive", batch.advantages.numpy() > 0, masked),
        ("masked_advantage_negative", batch.advantages.numpy() < 0, masked),
    ):
        total, count = found[f"{name}/mean"]
        assert (total.item(), count.item()) == pytest.approx((values[members].sum(), members.sum()), rel=1e-5)


def test_step_loss_adds_components_each_over_its_own_token_count():
    rng = np.random.default_rng(0)
    rows = [random_row(rng, [6, 9]), random_row(rng, [12])]
    for row in rows:
        row.ce_weights = (rng.random(row.num_tokens) < 0.5).astype(np.float32)
        row.ref_kl_weights = rng.random(len(row.sample_lengths)).astype(np.float32)
    counts = torch.tensor(component_counts(rows), dtype=torch.float32)
    batch = make_batch(rows, torch.device("cpu"))
    logprobs = (batch.inference_logprobs - 0.1).requires_grad_()
    whole, _ = step_loss(batch, logprobs, counts, DPPOLoss())
    parts = []
    for row in rows:
        one = make_batch([row], torch.device("cpu"))
        parts.append(step_loss(one, one.inference_logprobs - 0.1, counts, DPPOLoss())[0].item())
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-5)
    ce = (-(logprobs.detach()) * batch.ce_weights).sum() / counts[1]
    never = torch.tensor(float("inf"))
    only_ce = torch.stack([never, counts[1], never, counts[3]])
    assert step_loss(batch, logprobs, only_ce, DPPOLoss())[0].item() == pytest.approx(ce.item(), rel=1e-5)


def test_the_reported_cross_entropy_does_not_depend_on_its_weight():
    """Echo trains its tokens with weight 0.1: the loss is a tenth, the metric is the negative log-likelihood."""
    row = random_row(np.random.default_rng(0), [9])
    row.rl_weights[:] = 0
    row.ce_weights = np.where(row.loss_mask, 0.1, 0).astype(np.float32)
    batch = make_batch([row], torch.device("cpu"))
    counts = torch.tensor(component_counts([row]), dtype=torch.float32)
    loss, found = step_loss(batch, torch.full((len(batch.targets),), -2.0), counts, DPPOLoss())
    total, count = found["loss/ce"]
    assert count == counts[1] > 0
    assert (total / count).item() == pytest.approx(2.0)
    assert loss.item() == pytest.approx(0.2)


@pytest.mark.parametrize("num_forwards", [1, 3])
def test_sequences_count_alike_in_gspo_however_long_they_are(num_forwards):
    """At π = μ and A = 1 the gradients of a sequence's log-probabilities sum to −1/S."""
    rows = [random_row(np.random.default_rng(0), lengths) for lengths in ([40, 4], [9], [5, 21])]
    rows[1].rl_weights[:] = 1
    for row in rows:
        row.advantages[:] = 1
    counts = torch.tensor(component_counts(rows), dtype=torch.float32)
    assert counts[3] == 5
    found = []
    for group in [rows] if num_forwards == 1 else [[row] for row in rows]:
        batch = make_batch(group, torch.device("cpu"))
        logprobs = batch.inference_logprobs.clone().requires_grad_()
        step_loss(batch, logprobs, counts, GSPOLoss())[0].backward()
        found += torch.zeros(batch.num_sequences).index_add(0, batch.sequence_ids, logprobs.grad).tolist()
    assert found == pytest.approx([-1 / 5] * 5)


def moody(x: LossInputs) -> TokenLoss:
    return TokenLoss(-x.logprobs, {"length": x.sequence_lengths} if len(x.logprobs) > 4 else {})


def test_a_custom_loss_with_a_metric_for_some_inputs_only_ends_by_its_name(tmp_path):
    block = CustomLoss(import_path="tests.unit.trainer.test_losses:moody")
    recipe = small_sft(make_family("llama", tmp_path / "model")).model_copy(update={"loss": block})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watchdog = Watchdog(RunDir(tmp_path), "sft-0", rank=0, size=1, timeout_s=600)
    try:
        world = make_world(TrainerLayout(), torch.device("cpu"), local_rank=0, local_size=1)
        trainer = build_trainer(recipe, recipe.model.name, world, watchdog)
        row = random_row(np.random.default_rng(0), [20])
        with pytest.raises(CustomLossError, match="the metric length, which it did not return in its trial"):
            trainer.train_step(1, [row], [])
    finally:
        watchdog.pause()
        dist.destroy_process_group()
        gc.enable()
        gc.unfreeze()


def test_a_forward_without_trained_tokens_has_a_graph_with_zero_gradients():
    row = random_row(np.random.default_rng(0), [5])
    row.rl_weights[:] = 0
    batch = make_batch([row], torch.device("cpu"))
    batch = dataclasses.replace(batch, rl_weights=torch.zeros(3), inference_logprobs=torch.zeros(3))
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, metrics = step_loss(batch, logprobs, torch.zeros(4), DPPOLoss())
    loss.backward()
    assert loss.item() == 0 and metrics == {}
    assert logprobs.grad.tolist() == [0, 0, 0]


def test_tokens_are_counted_by_component_and_samples_by_their_rl_tokens():
    row = random_row(np.random.default_rng(0), [3, 4, 5])
    row.loss_mask[:] = True
    row.rl_weights[:], row.ref_kl_weights[:] = [1, 0, -0.5], [0, 2, 0]
    row.ce_weights = np.zeros(12, np.float32)
    row.ce_weights[[0, 1, 2]] = [5, 1, -1]
    # the first token of a sample is never predicted
    assert component_counts([row]) == [2 + 4, 2, 3, 2]
    assert component_counts([row, row]) == [12, 4, 6, 4]
    assert component_counts([]) == [0, 0, 0, 0]


def one_token_batch(**weights: float):
    row = random_row(np.random.default_rng(0), [2])
    row.loss_mask[:], row.rl_weights[:], row.advantages[:] = [False, True], weights.get("rl", 0), 2.0
    row.ref_kl_weights[:] = weights.get("ref_kl", 0)
    if "ce" in weights:
        row.ce_weights = np.array([0, weights["ce"]], np.float32)
    batch = make_batch([row], torch.device("cpu"))
    return batch, torch.tensor(component_counts([row]), dtype=torch.float32)


def test_a_single_token_is_divided_by_one():
    for weights, expected in (({"ce": 0.5}, 0.5 * 3.0), ({"rl": 0.5}, -0.5 * 2.0)):
        batch, counts = one_token_batch(**weights)
        batch.inference_logprobs[:] = -3.0
        loss, metrics = step_loss(batch, torch.tensor([-3.0]), counts, GSPOLoss(kl_tau=0.0))
        assert loss.item() == pytest.approx(expected)
        (name,) = weights
        total, number = metrics[f"loss/{name}"]
        assert number == 1 and total.item() == pytest.approx(3.0 if name == "ce" else expected)


def test_figures_of_masked_tokens_leave_out_advantages_of_zero():
    x = inputs(case(0))
    x.advantages[:] = torch.tensor([1.0, 0.0, -1.0] * 4)
    masked = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0] * 2, dtype=torch.float64)
    sums = metric_sums(x, TokenLoss(x.logprobs, {"is_masked": masked}))
    assert [float(value) for value in sums["masked_advantage_positive/mean"]] == [2, 6]
    assert [float(value) for value in sums["masked_advantage_negative/mean"]] == [2, 6]
    assert [float(value) for value in sums["is_masked/mean"]] == [6, 12]
    kl = mismatch_kl(x.logprobs, x.inference_logprobs)
    for name, members in (("masked", masked), ("unmasked", 1 - masked)):
        total, number = sums[f"{name}_mismatch_kl/mean"]
        assert (total.item(), number.item()) == (pytest.approx((kl * members).sum().item()), 6)


def uses_all_inputs(x: LossInputs) -> TokenLoss:
    vectors = (x.logprobs, x.inference_logprobs, x.advantages, x.ref_logprobs, x.sequence_ids)
    assert [vector.shape for vector in vectors] == [(4,)] * 5
    assert x.num_sequences == 2 and x.mean_length == 2.0
    assert x.sequence_lengths.tolist() == [2, 2, 2, 2]
    assert set(x.advantages.tolist()) == {1.0, -1.0} and x.advantages.sum() == 0
    assert (x.logprobs < 0).all() and (x.inference_logprobs < 0).all() and (x.ref_logprobs < 0).all()
    return TokenLoss(-x.logprobs, {"is_masked": x.advantages})


def test_a_loss_is_tried_on_two_samples_of_two_tokens():
    found = try_loss(CustomLoss(import_path=f"{__name__}:uses_all_inputs"))
    assert found[0] == "is_masked/mean" and len(found) == 5


def test_the_first_token_of_a_sample_is_never_trained():
    row = random_row(np.random.default_rng(0), [4, 4])
    row.rl_weights[:] = 1
    row.loss_mask[:] = True
    assert component_counts([row])[0] == 6
    assert len(make_batch([row], torch.device("cpu")).targets) == 6


def test_mismatch_kl_is_k3_and_never_negative():
    a, b = torch.randn(1000, dtype=torch.float64), torch.randn(1000, dtype=torch.float64)
    kl = mismatch_kl(a, b)
    torch.testing.assert_close(kl, (a - b).exp() - (a - b) - 1)
    assert (kl >= 0).all()
    assert mismatch_kl(a, a).abs().max() == 0
