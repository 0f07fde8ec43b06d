"""Submits. Reading order: submit (new, resumed, prepared only) → prepare (the frozen run directory) → fork → evaluate →
executor → sbatch (exactly one job, by common/sbatch) → refusals (SLURM's words); estimate, hub_cache and doctor look beforehand; bench measures a trainer
here, bench_job over several nodes."""
