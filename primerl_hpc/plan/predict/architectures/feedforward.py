"""Feed-forward parts: gated and plain MLPs, and mixtures of experts with routers and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from primerl_hpc.plan.predict.architectures.attention import bias_of, linear
from primerl_hpc.plan.predict.architectures.config_reader import ConfigReader
from primerl_hpc.plan.predict.architectures.parts import Bias, Matrix, Mixer, Vectors, WeightKind

SHARED_NUMBERS = ("n_shared_experts", "num_shared_experts")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Mlp:
    """An MLP with a gate (three matrices) or without (two)."""

    has_gate: bool = True
    is_fused: bool = False
    """Gate and up projection are one matrix (Phi-3, GLM-4)."""
    bias: Bias = False
    module: str = "mlp"

    def __call__(
        self, reader: ConfigReader, width: int | None = None, kind: WeightKind = WeightKind.MLP, at: str = ""
    ) -> Mixer:
        hidden, bias = reader.hidden, bias_of(reader, self.bias)
        width = reader.size("intermediate_size") if width is None else width
        path = at or self.module
        outs = {"gate_proj": width, "up_proj": width} if self.has_gate else {"up_proj": width}
        if self.is_fused:
            outs = {"gate_up_proj": 2 * width}
        matrices = [linear(f"{path}.{name}", kind, hidden, out, bias) for name, out in outs.items()]
        return Mixer((*matrices, linear(f"{path}.down_proj", kind, width, hidden, bias)))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts and how families differ in it."""

    width_key: str = "moe_intermediate_size"
    has_gate: bool = True
    has_bias: bool = False
    """Experts and router have biases (gpt-oss)."""
    shared: str | None = None
    """Shared experts: one of `SHARED_NUMBERS` (multiples of the routed width) or the key of their width."""
    has_shared_gate: bool = False
    has_choice_bias: bool = False
    """The bias with which experts are chosen is a parameter (Trinity); elsewhere it is a buffer."""
    latent_key: str | None = None
    """Key of the width to which tokens are projected before the routed experts (Nemotron-H)."""
    mlp: Mlp = Mlp()
    module: str = "mlp"

    def __call__(self, reader: ConfigReader) -> Mixer:
        hidden, width = reader.hidden, reader.size(self.width_key)
        number = reader.size(*EXPERT_KEYS)
        active = reader.size("num_experts_per_tok", most=number)
        latent = reader.optional_size(self.latent_key) if self.latent_key else None
        ins = hidden if latent is None else latent
        up = ("gate_up_proj", 2 * width) if self.has_gate else ("up_proj", width)
        matrices = [
            self._expert(up[0], ins, up[1], number, active),
            self._expert("down_proj", width, ins, number, active),
            # routers are parameters of their own module, not linear layers: no adapters
            Matrix(f"{self.module}.gate", WeightKind.ROUTER, hidden, number, self.has_bias),
        ]
        if latent is not None:
            matrices += [
                linear(f"{self.module}.fc1_latent_proj", WeightKind.MLP, hidden, latent),
                linear(f"{self.module}.fc2_latent_proj", WeightKind.MLP, latent, hidden),
            ]
        if self.shared is not None:
            shared_width = reader.size(self.shared, least=0)
            if self.shared in SHARED_NUMBERS:
                shared_width *= width
            if shared_width:
                path = f"{self.module}.{'shared_expert' if self.has_shared_gate else 'shared_experts'}"
                matrices += self.mlp(reader, shared_width, WeightKind.SHARED_EXPERT, path).matrices
        if self.has_shared_gate:
            matrices.append(linear(f"{self.module}.shared_expert_gate", WeightKind.SHARED_EXPERT, hidden, 1))
        return Mixer(tuple(matrices), (Vectors(WeightKind.ROUTER, number),) if self.has_choice_bias else ())

    def _expert(self, name: str, ins: int, outs: int, number: int, active: int) -> Matrix:
        path = f"{self.module}.experts"
        return Matrix(
            f"{path}.{name}", WeightKind.EXPERT, ins, outs, self.has_bias, number, active, adapter=path
        )
