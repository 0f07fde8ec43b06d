"""docs/models.md has one row for each family that a test compares with transformers, and the package refuses others."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from primerl_hpc.checks.recipe.model_config import load_config, refuse_untrainable
from primerl_hpc.common import model_families
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.architectures.families import ARCHITECTURES
from primerl_hpc.transport.base_models.engine_options import BIASED_CHOICE, check_engine
from tests.e2e.test_parallel import LAYOUTS, REFUSED
from tests.support.helpers import ROOT, small_rl, small_sft
from tests.support.served_updates import MEASURED, SERVED
from tests.support.tiny_models import COMPOSITES, FAMILIES, MORE_FAMILIES, VISION_FAMILIES
from tests.unit.trainer.test_comparison import UNCOMPARED
from tests.unit.trainer.test_family_features import ADAPTED, IN_FP8

PAGE = ROOT / "docs" / "models.md"
BEGIN = "| `model_type` | samples |"
BEGIN_POPULAR = "| architecture |"
SERVED_ROWS = ROOT / "docs" / "measurements" / "served_families.json"
COMPARED = {name for name, family in model_families.FAMILIES.items() if family.is_compared}
ROWS = {name.partition("/")[0] for name in FAMILIES | MORE_FAMILIES | COMPOSITES}
POPULAR = """
    ApertusForCausalLM ArceeForCausalLM BloomForCausalLM CohereForCausalLM Cohere2ForCausalLM
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    Exaone4ForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GemmaForCausalLM Gemma2ForCausalLM
    Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma4ForConditionalGeneration GlmForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM GlmMoeDsaForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM
    GPTNeoXForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeHybridForCausalLM HunYuanDenseV1ForCausalLM
    JambaForCausalLM Kimi_K25ForConditionalGeneration KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
    LlamaForCausalLM Llama4ForConditionalGeneration MambaForCausalLM MiniMaxM2ForCausalLM MistralForCausalLM
    Mistral3ForConditionalGeneration MixtralForCausalLM NemotronHForCausalLM OlmoForCausalLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoeForCausalLM OPTForCausalLM PhiForCausalLM Phi3ForCausalLM PhimoeForCausalLM
    Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3NextForCausalLM Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration SeedOssForCausalLM SmolLM3ForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM
"""
AXES = ("tensor_parallel", "context_parallel", "expert_parallel")


def layouts_of(family: str) -> str:
    """Return the axes over which tests divide the family, as in "shard, tensor, ulysses"."""
    found: list[str] = []
    for name, case in LAYOUTS.items():
        if case["model"] != family or name in REFUSED or case["ranks"] == 1:
            continue
        layout: dict[str, Any] = case.get("layout", {})
        axes = [axis.removesuffix("_parallel") for axis in AXES if layout.get(axis, 1) > 1]
        if "context" in axes:
            axes[axes.index("context")] = layout.get("context_style", "ulysses")
        found += axes or ["shard"]
    return ", ".join(sorted(set(found))) or "–"


def served_of(family: str) -> str:
    """Return "yes" if a test compares updates of the family in vLLM, "measured" if a recorded benchmark has."""
    if family in SERVED:
        return "yes"
    rows = json.loads(SERVED_ROWS.read_text())["rows"]
    return "measured" if any(row["family"] == family and row["is_met"] for row in rows) else "–"


def table() -> str:
    rows = [f"{BEGIN} layouts | LoRA | FP8 | served updates |", "|---|---|---|---|---|---|"]
    for family in sorted(ROWS | VISION_FAMILIES.keys() | SERVED.keys()):
        samples = "text and images" if family in VISION_FAMILIES else "text"
        features = [("–", "yes")[family in families] for families in (ADAPTED, IN_FP8)]
        cells = [f"`{family}`", samples, layouts_of(family), *features, served_of(family)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def families_of_architectures() -> dict[str, str]:
    """Return the ``model_type`` of each class that transformers builds for text."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {name: family for mapping in mappings for family, name in mapping.items() if isinstance(name, str)}


def popular_table() -> str:
    known = families_of_architectures()
    rows = [f"{BEGIN_POPULAR} `model_type` | trained |", "|---|---|---|"]
    for name in POPULAR.split():
        family = known[name]
        _, refusal = UNCOMPARED.get(family, ({}, ""))
        trained = f"no: {refusal}" if refusal else "after a comparison at the start"
        rows.append(f"| `{name}` | `{family}` | {'yes' if family in COMPARED else trained} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_models_lists_what_tests_compare(request: pytest.FixtureRequest) -> None:
    for begin, expected in ((BEGIN_POPULAR, popular_table()), (BEGIN, table())):
        text = PAGE.read_text()
        start = text.index(begin)
        end = text.find("\n\n", start) + 1 or len(text)
        if request.config.getoption("--update-golden"):
            PAGE.write_text(text[:start] + expected + text[end:])
        else:
            assert text[start:end] == expected


def test_the_package_accepts_the_families_that_tests_compare() -> None:
    assert ROWS | VISION_FAMILIES.keys() == COMPARED
    assert SERVED.keys() | MEASURED.keys() <= COMPARED and not SERVED.keys() & MEASURED.keys()


def test_auto_divides_only_families_whose_division_is_tested() -> None:
    divided = {family for family in COMPARED if "tensor" in layouts_of(family)}
    may_be_divided = {name for name, family in model_families.FAMILIES.items() if family.may_be_divided}
    assert may_be_divided == divided & ARCHITECTURES.keys()


def test_the_planner_knows_the_layers_of_families_of_the_table_only() -> None:
    assert ARCHITECTURES.keys() <= model_families.FAMILIES.keys()
    assert model_families.FAMILIES.keys() - COMPARED <= ARCHITECTURES.keys()


def test_facts_of_families_are_in_one_table() -> None:
    """Elsewhere, a module names a family only where its code for this family is."""
    own_code = {"plan/predict/architectures/families.py", "transport/base_models/engine_options.py"}
    names, package = model_families.FAMILIES.keys(), ROOT / "primerl_hpc"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }
    assert found == own_code | {"common/model_families.py"}


@pytest.mark.parametrize(("family", "is_warned"), [("qwen3", False), ("kimi_k2", False), ("phimoe", True)])
def test_a_submission_warns_of_a_family_that_the_trainer_will_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, is_warned: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    refuse_untrainable(small_sft(tmp_path), load_config(str(tmp_path)))
    assert ("no test compares family phimoe" in capsys.readouterr().err) == is_warned


@pytest.mark.parametrize(
    ("family", "degree", "says"),
    [("qwen3_vl", 2, "ranks cannot share rows with images"), ("gemma3", 1, "does not train model")],
)
def test_a_submission_refuses_a_tower_that_cannot_be_trained(
    tmp_path: Path, family: str, degree: int, says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    changes = {"trainer": {"vision": "frozen"}, "layout": {"trainer": {"tensor_parallel": degree}}}
    with pytest.raises(ConfigError, match=says):
        refuse_untrainable(small_rl(tmp_path, **changes), load_config(str(tmp_path)))


def test_a_configuration_without_a_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json of model .* names no family"):
        refuse_untrainable(small_sft(tmp_path), load_config(str(tmp_path)))


def test_families_that_engines_on_cpus_compute_differently_are_refused_there(tmp_path: Path) -> None:
    rows = {row["family"]: row for row in json.loads(SERVED_ROWS.read_text())["rows"]}
    assert all(not rows[family]["is_met"] for family in BIASED_CHOICE)
    wrong = {family for family, row in rows.items() if "start" in row and not row["is_met"]}
    assert wrong <= BIASED_CHOICE.keys()
    check_engine("ernie4_5_moe", "org/it", "gpu", is_accepted=False)
    check_engine("ernie4_5_moe", "org/it", "cpu", is_accepted=True)
    check_engine("ernie4_5", "org/it", "cpu", is_accepted=False)
    folder = tmp_path / "ernie"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "ernie4_5_moe"}')
    refuse_untrainable(small_rl(folder), load_config(str(folder)))
    with pytest.raises(ConfigError, match=r"vLLM on CPUs ignores the bias .* engines on GPUs"):
        refuse_untrainable(small_rl(folder), load_config(str(folder)), accelerator="cpu")
    refuse_untrainable(small_sft(folder), load_config(str(folder)), accelerator="cpu")
