"""What every other folder may use: errors, files, the run directory, names, time, assets. Imports nothing heavy.

Reading order: errors → names → env → files → leases → rundir → restart_requests → events → metrics → scores → assets → log.
"""
