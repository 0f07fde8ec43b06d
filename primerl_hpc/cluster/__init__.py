"""Where to train: the YAML of a site. Reading order: schema → load → directives (profile keys as options of sbatch)."""
