"""The torchrun group of supervised fine-tuning: ``python -m primerl_hpc.roles.sft RUN_DIR PHASE NAME``."""

import sys

from primerl_hpc.trainer.torchrun import run_torchrun

if __name__ == "__main__":
    run_torchrun(sys.argv[1:])
