"""Shipped verifiers plugins: each folder is imported by its plain name (see ``primerl_hpc/envs/__init__.py``)."""
