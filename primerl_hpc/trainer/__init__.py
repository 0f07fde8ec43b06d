"""The trainer: one core under two loops. Started by torchrun as ``primerl_hpc.trainer.main``.

Reading order: main → setup → rl, sft (the loops) → core (one step) → batch, head, losses → model (build, load, FSDP2), memory
→ optim, muon, schedules → checkpoint, shards, saver, export → metrics, routing, perf → control (what rank 0 decides for all),
watchdog (hangs) → bench (the loops on made-up data).
"""
