"""Each folder is a verifiers plugin of its own, imported by its plain name (see ``primerl_hpc/envs/__init__.py``)."""
