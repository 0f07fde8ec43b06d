"""The trainer: one training step under two loops. Started by torchrun as ``primerl_hpc.trainer.main``.

Reading order: torchrun → main → setup → rl_loop, sft_loop → train_step → batch → metrics, perf → control → watchdog →
bench. Subfolders: model, fp8, parallel, losses, host, optim, checkpoint, weights, colocation, sft.
"""
