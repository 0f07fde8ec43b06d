"""`status` and `status --list`: the snapshot of a run and the views of it.

Reading order: snapshot → job_watcher, run_catalog → usage, forecast, bottleneck, predicted, follow_up_jobs → one_run,
all_runs → screen.
"""
