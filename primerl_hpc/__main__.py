"""``python -m primerl_hpc``: the command line where the script is not in PATH."""

from primerl_hpc.cli.main import main

main()
