"""The interface to SLURM: command lines, execution with retries, parsers of the output.

Only this folder and `runtime.steps.srun` write command lines.

Reading order: command_lines → commands → jobs → question_floor → sbatch → partitions → refusals → reasons →
estimate → budget → topology.
"""
