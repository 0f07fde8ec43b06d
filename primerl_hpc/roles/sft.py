"""``python -m primerl_hpc.roles.sft RUN_DIR PHASE NAME``: the torchrun group of supervised fine-tuning, see `torchrun`."""

import sys

from primerl_hpc.roles.torchrun import run_torchrun

if __name__ == "__main__":
    run_torchrun(sys.argv[1:])
