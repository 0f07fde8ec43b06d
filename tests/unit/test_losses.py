"""Every loss against its formula in float64 NumPy, and its gradient against finite differences."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.recipe.training_schema import CISPOLoss, DPPOLoss, GRPOLoss, GSPOLoss, IPOLoss  # noqa: E402
from primerl_hpc.trainer.batch import make_batch  # noqa: E402
from primerl_hpc.trainer.losses import LossInputs, component_counts, rl_loss, step_loss  # noqa: E402
from primerl_hpc.trainer.losses.components import mismatch_kl  # noqa: E402
from primerl_hpc.trainer.losses.ref_kl import ref_kl  # noqa: E402
from tests.support import random_row  # noqa: E402

SEQUENCES = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3])


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
    return LossInputs(**tensors, sequence_ids=torch.tensor(SEQUENCES), num_sequences=5)


def numpy_loss(config, x: dict[str, np.ndarray]) -> np.ndarray:
    lp, mu, adv = x["logprobs"], x["inference_logprobs"], x["advantages"]
    log_ratio, delta = lp - mu, np.exp(lp) - np.exp(mu)
    ratio = np.exp(log_ratio)
    kl = config.kl_tau * log_ratio**2
    if config.type == "dppo":
        drop = ((adv > 0) & (delta > config.mask_high)) | ((adv <= 0) & (delta < -config.mask_low))
        return -np.where(drop, 0, config.adv_tau * adv * ratio) + kl
    if config.type == "ipo":
        return -np.where(np.abs(delta) > config.threshold, 0, config.adv_tau * adv * ratio) + kl
    if config.type == "cispo":
        return -np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * adv * lp + kl
    if config.type == "gspo":
        ratio = np.exp([log_ratio[which == SEQUENCES].mean() for which in SEQUENCES])
    clipped = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    return -np.minimum(ratio * adv, clipped * adv) + kl


CONFIGS = [
    DPPOLoss(mask_low=0.1, mask_high=0.15, adv_tau=0.7, kl_tau=0.02),
    IPOLoss(threshold=0.1, adv_tau=1.3, kl_tau=0.02),
    GRPOLoss(clip_low=0.2, clip_high=0.3, kl_tau=0.02),
    GSPOLoss(clip_low=0.1, clip_high=0.2, kl_tau=0.02),
    CISPOLoss(clip_low=0.5, clip_high=0.6, kl_tau=0.02),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
@pytest.mark.parametrize("seed", range(5))
def test_loss_is_its_formula(config, seed):
    values = case(seed)
    np.testing.assert_allclose(
        rl_loss(inputs(values), config).loss.detach(), numpy_loss(config, values), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda config: config.type)
@pytest.mark.parametrize("seed", range(5))
def test_gradient_is_the_finite_difference_of_the_formula(config, seed):
    """gspo and cispo stop part of their gradient on purpose: see the next two tests."""
    values, step = case(seed), 1e-6
    x = inputs(values)
    rl_loss(x, config).loss.sum().backward()
    for token in range(len(SEQUENCES)):
        sides = []
        for sign in (1, -1):
            moved = values | {"logprobs": values["logprobs"].copy()}
            moved["logprobs"][token] += sign * step
            sides.append(numpy_loss(config, moved).sum())
        assert x.logprobs.grad[token].item() == pytest.approx(
            (sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8
        )


def test_gspo_gradient_is_the_sequence_ratio_where_it_is_not_clipped():
    values, config = case(1), GSPOLoss(clip_low=0.1, clip_high=0.2)
    x = inputs(values)
    result = rl_loss(x, config)
    result.loss.sum().backward()
    log_ratio = values["logprobs"] - values["inference_logprobs"]
    ratio = np.exp([log_ratio[which == SEQUENCES].mean() for which in SEQUENCES])
    is_open = 1 - result.metrics["is_masked"].numpy()
    np.testing.assert_allclose(
        x.logprobs.grad, -is_open * ratio * values["advantages"], rtol=1e-9, atol=1e-12
    )


def test_cispo_gives_every_token_a_gradient():
    x = inputs(case(2))
    rl_loss(x, CISPOLoss(clip_low=0.1, clip_high=0.1)).loss.sum().backward()
    assert (x.logprobs.grad != 0).all()


def test_ref_kl_pulls_towards_the_reference_and_drops_tokens_that_fell():
    values = case(3)
    x = inputs(values)
    lp, mu, ref = values["logprobs"], values["inference_logprobs"], values["ref_logprobs"]
    keep = (np.exp(lp) - np.exp(mu) >= -0.2).astype(float)
    expected = -keep * (ref - lp) * np.exp(lp - mu) + 1e-3 * (lp - mu) ** 2
    result = ref_kl(x)
    np.testing.assert_allclose(result.loss.detach(), expected, rtol=1e-12)
    result.loss.sum().backward()
    np.testing.assert_allclose(
        x.logprobs.grad, -keep * (ref - lp) * np.exp(lp - mu) + 2e-3 * (lp - mu), rtol=1e-9
    )


def test_step_loss_adds_components_each_over_its_own_token_count():
    rng = np.random.default_rng(0)
    rows = [random_row(rng, [6, 9]), random_row(rng, [12])]
    for row in rows:
        row.ce_weights = (rng.random(row.num_tokens) < 0.5).astype(np.float32)
        row.ref_kl_weights = (rng.random(row.num_tokens) < 0.5).astype(np.float32) * row.loss_mask
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
    only_ce = torch.stack([torch.tensor(float("inf")), counts[1], torch.tensor(float("inf"))])
    assert step_loss(batch, logprobs, only_ce, DPPOLoss())[0].item() == pytest.approx(ce.item(), rel=1e-5)


def test_a_forward_without_trained_tokens_still_has_a_graph():
    row = random_row(np.random.default_rng(0), [5])
    row.loss_mask[:], row.rl_weights[:] = False, 0
    batch = make_batch([row], torch.device("cpu"))
    logprobs = torch.zeros(len(batch.targets), requires_grad=True)
    loss, _ = step_loss(batch, logprobs, torch.zeros(3), DPPOLoss())
    loss.backward()
    assert loss.item() == 0


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
