"""The limits of a site (``limits`` of the profile): which job they admit, and the walltime by number of nodes. Pure.

check_limits(profile, profile.scheduler, num_nodes=64)       # raises ConfigError with the limit and what would fit
walltime(profile, profile.scheduler, num_nodes=64)           # '06:00:00', if scheduler.time is null
max_elastic_engines(profile)                                 # 0 where one job of a user runs at a time
"""

from __future__ import annotations

from collections.abc import Iterable

from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.site_schema import JobLimit
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.slurm.jobs import minutes


def applicable(profile: Profile, scheduler: Scheduler) -> tuple[JobLimit, ...]:
    """Return the limits for the partition and QOS of ``scheduler``."""
    partitions = (scheduler.partition or "").split(",")
    return tuple(
        limit
        for limit in profile.limits
        if limit.partition in (None, *partitions) and limit.qos in (None, scheduler.qos)
    )


def walltime(
    profile: Profile, scheduler: Scheduler, num_nodes: int, gpus_per_node: int | None = None
) -> str | None:
    """Return the walltime of a job: ``scheduler.time``, or the longest one that the limits admit for its size.

    ``gpus_per_node``: default, those of the profile's ``node``.
    """
    if scheduler.time is not None:
        return scheduler.time
    num_gpus = num_nodes * (profile.node.gpus if gpus_per_node is None else gpus_per_node)
    return _longest_time(profile, scheduler, num_nodes, num_gpus)


def shortest_time(times: Iterable[str]) -> str | None:
    """Return the shortest walltime; None without any."""
    return min(times, key=_duration, default=None)


def check_limits(
    profile: Profile,
    scheduler: Scheduler,
    num_nodes: int,
    gpus_per_node: int | None = None,
    *,
    key: str = "",
) -> None:
    """Raise ConfigError if no limit of the job's partition and QOS admits it; the hint names one that would.

    ``gpus_per_node``: default, those of the profile's ``node``. ``key``: the block of the profile that defines these
    nodes, if it is not ``node``: they are a component of a heterogeneous job.
    """
    own = applicable(profile, scheduler)
    num_gpus = num_nodes * (profile.node.gpus if gpus_per_node is None else gpus_per_node)
    time = walltime(profile, scheduler, num_nodes, gpus_per_node)
    if not own or any(_admits(limit, num_nodes, num_gpus, time) for limit in own):
        return
    where = _where(scheduler.partition, scheduler.qos)
    wanted = (
        f"{num_nodes} node{'s' * (num_nodes != 1)}"
        + (f" of {key}" if key else "")
        + (f" for {time}" if time else "")
    )
    raise ConfigError(
        f"{wanted} exceed the limits of {where}: {'; '.join(map(_describe, own))}",
        location=f"limits of profile '{profile.name}'",
        hint=_fitting_limit(profile, scheduler, num_nodes, num_gpus, key)
        or _smaller_request(profile, scheduler, num_nodes, num_gpus),
    )


def max_elastic_engines(profile: Profile) -> int | None:
    """Return how many engines in jobs of their own may run next to the run's job; None without a limit."""
    given = profile.elastic.model_dump(include={"partition", "qos"}, exclude_none=True)
    elastic = profile.scheduler.model_copy(update=given)
    own = applicable(profile, profile.scheduler)
    counts = [profile.elastic.max_engines]
    if profile.scheduler.max_jobs is not None:
        counts.append(profile.scheduler.max_jobs - 1)
    counts += [
        limit.max_running - (limit in own)
        for limit in applicable(profile, elastic)
        if limit.max_running is not None and _admits_size(limit, 1, profile.node.gpus)
    ]
    known = [count for count in counts if count is not None]
    return max(0, min(known)) if known else None


def check_elastic(profile: Profile, num_engines: int) -> None:
    """Raise ConfigError if the site does not let so many elastic engines run."""
    most = max_elastic_engines(profile)
    if most is not None and num_engines > most:
        raise ConfigError(
            f"layout.inference.elastic: {num_engines} engines in jobs of their own are more than the {most} that "
            f"profile '{profile.name}' admits next to the run's job",
            location="limits, scheduler.max_jobs and elastic.max_engines of the profile",
            hint="reduce layout.inference.replicas, set elastic.partition or elastic.qos to one that admits more, "
            "or set elastic: false",
        )


def _longest_time(profile: Profile, scheduler: Scheduler, num_nodes: int, num_gpus: int) -> str | None:
    """Return the longest walltime of the limits that admit the job's size, within their ``node_minutes``."""
    times = []
    for limit in applicable(profile, scheduler):
        if limit.time is None or not _admits_size(limit, num_nodes, num_gpus):
            continue
        times.append(limit.time)
        if limit.node_minutes is not None and limit.node_minutes < _duration(limit.time) * num_nodes:
            times[-1] = str(limit.node_minutes // num_nodes)
    return max((time for time in times if time != "0"), key=_duration, default=None)


def _duration(time: str) -> float:
    """Return the minutes of a walltime; infinity without a limit."""
    return minutes(time) or float("inf")


def _admits(limit: JobLimit, num_nodes: int, num_gpus: int, time: str | None) -> bool:
    requested, longest = minutes(time), minutes(limit.time)
    if not _admits_size(limit, num_nodes, num_gpus):
        return False
    if requested is None:
        return True
    if longest is not None and requested > longest:
        return False
    return limit.node_minutes is None or requested * num_nodes <= limit.node_minutes


def _admits_size(limit: JobLimit, num_nodes: int, num_gpus: int) -> bool:
    is_small_enough = limit.max_nodes is None or num_nodes <= limit.max_nodes
    return (
        limit.min_nodes <= num_nodes
        and is_small_enough
        and (limit.max_gpus is None or num_gpus <= limit.max_gpus)
    )


def _fitting_limit(
    profile: Profile, scheduler: Scheduler, num_nodes: int, num_gpus: int, key: str
) -> str | None:
    """Return which partition or QOS admits the request, and how to choose it; None if the profile names none."""
    for limit in profile.limits:
        if _admits(limit, num_nodes, num_gpus, scheduler.time):
            changes = {"partition": limit.partition, "qos": limit.qos}
            words = [
                f"{key}.{name}: {value}" if key else f"--{name} {value}"
                for name, value in changes.items()
                if value is not None and value != getattr(scheduler, name)
            ]
            what = "these nodes" if key else "this job"
            return f"{_where(limit.partition, limit.qos)} admits {what}: {' '.join(words)}"
    return None


def _smaller_request(profile: Profile, scheduler: Scheduler, num_nodes: int, num_gpus: int) -> str:
    longest = _longest_time(profile, scheduler, num_nodes, num_gpus)
    if longest is not None:
        return f"lower scheduler.time to {longest} (--time), and continue with --chain or requeue"
    return "use fewer nodes, or choose another --partition or --qos"


def _where(partition: str | None, qos: str | None) -> str:
    words = [f"partition {partition}" if partition else "", f"QOS {qos}" if qos else ""]
    return " with ".join(filter(None, words)) or "the site"


def _describe(limit: JobLimit) -> str:
    least, most = limit.min_nodes, limit.max_nodes
    nodes = f"{least} nodes and more" if most is None else f"{least} to {most} nodes"
    words = [nodes] if most is not None or least > 1 else []
    words += [f"at most {limit.max_gpus} GPUs"] if limit.max_gpus is not None else []
    words += [f"at most {limit.time}"] if limit.time is not None else []
    words += [f"at most {limit.node_minutes} node-minutes"] if limit.node_minutes is not None else []
    return ", ".join(words)
