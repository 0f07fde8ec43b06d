"""Send metrics and samples of a run to experiment trackers.

A target is one destination, such as a W&B run. It reads the files of the run directory like any other reader, so a
target that is slow, offline or down does not affect the run. The role ``tracker`` sends from the job, and
``primerl-hpc sync`` from a login node.

Reading order: base (rows, tables, the protocol of targets), stream (numbers the rows of a run, each exactly once),
samples (tables of rollouts), targets (name → sources and class), relay (the loop), sync (the same from a login node);
then the targets: wandb, prime, mlflow, trackio, tensorboard; bench_result (the result of a benchmark).
"""
