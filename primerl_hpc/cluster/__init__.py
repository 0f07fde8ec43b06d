"""The cluster profile: one YAML file per site.

Reading order: schema → scheduler_schema, node_types, network_schema, site_schema, software_schema, value_types (its
blocks) → load → limits (the jobs that the site admits) → directives (profile keys as sbatch options).
"""
