"""How the trainer's ranks share one model and one sequence.

Reading order: mesh (groups of ranks) → fsdp (sharded weights) → tensor (matrices divided among ranks) → fused_experts,
expert, dispatch, deepep, lora_experts (experts distributed over ranks) → context, attention, indexed, flash, ring,
ring_flash (one sequence split over ranks). The last two parts attach to transformers' experts and attention interfaces.
"""
