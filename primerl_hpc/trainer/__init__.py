"""The trainer: one training step under two loops. Started by torchrun as ``primerl_hpc.trainer.main``.

Reading order: torchrun → main → setup → rl_loop, sft_loop → train_step → batch → metrics, perf → control → watchdog →
bench. Memory: host_slabs → forked_ranks (ranks on CPUs share what they import) → host_copy → device_turns (accelerators
that engines use too). Subfolders: model, fp8, parallel, losses, optim, checkpoint, weights, sft.
"""
