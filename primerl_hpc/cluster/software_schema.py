"""Block ``software`` of the cluster profile: modules, setup lines, interpreters and containers."""

from __future__ import annotations

import sys
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from primerl_hpc.cluster.value_types import Mount, OneLine, Program, Short, Word
from primerl_hpc.common.block import Block, Bool, Variables
from primerl_hpc.common.names import Role

PREFIX_KINDS = ("apptainer", "shifter", "podman-hpc")
"""Kinds of containers that are a command in front of the process."""
STEP_KINDS = ("pyxis", "container-engine", "uenv")
"""Kinds of containers that are options of srun."""


class Container(Block):
    """A container image and its mounts."""

    kind: Literal["none", "pyxis", "apptainer", "shifter", "podman-hpc", "container-engine", "uenv"] = "none"
    """Container runtime.
    ``pyxis``: an option of srun (``--container-image``).
    ``apptainer``: a command in front of the process, also for Singularity (``command: singularity``).
    ``shifter``: a command in front of the process, at NERSC.
    ``podman-hpc``: a command in front of the process, at NERSC and Isambard-AI.
    ``container-engine``: an option of srun (``--environment``), at CSCS; ``image`` names an EDF file, which must mount
    the run directory.
    ``uenv``: a software environment of CSCS (``--uenv``, ``--view``), mounted for the step."""
    image: Program | None = None
    """Image file or registry address; the name or file of an EDF environment, or of a uenv."""
    command: Program | None = None
    """Command of the runtime, if it is not the kind's own: ``singularity``, or a full path."""
    args: tuple[OneLine, ...] = ()
    """More arguments of that command, or of srun for kinds that are options of srun: ``--writable-tmpfs``,
    ``--module=gpu,nccl-plugin``."""
    gpu: Literal["auto", "nv", "rocm", "none"] = "auto"
    """Option that gives an apptainer container the driver: ``--nv``, ``--rocm``, or none where a module of the site
    binds it. ``auto``: by the vendor of ``node``."""
    view: Word | None = None
    """View of a uenv (``--view``)."""
    mounts: tuple[Mount, ...] = ()
    """``host:container[:flags]``"""

    @property
    def is_step_option(self) -> bool:
        """True if srun starts the complete step in the container, with the process's guard."""
        return self.kind in STEP_KINDS

    @model_validator(mode="after")
    def _kind_and_image_go_together(self) -> Self:
        if (self.kind == "none") != (self.image is None):
            raise ValueError("kind and image must be given together")
        return self

    @model_validator(mode="after")
    def _keys_belong_to_the_kind(self) -> Self:
        if self.command is not None and self.kind not in PREFIX_KINDS:
            raise ValueError(f"command is a key of the kinds {', '.join(PREFIX_KINDS)}, not of {self.kind}")
        if self.gpu != "auto" and self.kind != "apptainer":
            raise ValueError(f"gpu is a key of kind apptainer, not of {self.kind}")
        if self.view is not None and self.kind != "uenv":
            raise ValueError(f"view is a key of kind uenv, not of {self.kind}")
        if self.mounts and self.kind in ("container-engine", "uenv"):
            where = (
                "write mounts into the EDF file" if self.kind == "container-engine" else "it mounts itself"
            )
            raise ValueError(f"kind {self.kind} has no mounts: {where}")
        if bad := [text for text in self.args if not text.startswith("-")]:
            raise ValueError(f"args: {bad[0]!r} is not an option; write it as --key=value")
        return self


class RoleSoftware(Block):
    """Software of one role: an interpreter, optionally in a container."""

    python: Program | None = None
    """Python interpreter, in the container if there is one; null: the one that submits the run. The supervisor is
    outside of containers, so with a container in ``default`` it uses the interpreter that submits the run."""
    container: Container = Container()
    """Container of the processes; kind ``none``: no container."""
    env: Variables = Field(default_factory=dict)
    """Environment variables of the processes; they override ``env`` of the profile."""


class Module(Block):
    """An environment module; the name alone is short for a required one."""

    name: OneLine
    """Argument of ``module load``."""
    optional: Bool = False
    """Continue the job if the module cannot be loaded."""


class SetupLine(Block):
    """A shell line; the text alone is short for a required one."""

    run: OneLine
    """The shell line."""
    optional: Bool = False
    """Continue the job if the line fails."""


def _long_lines(lines: tuple[str | SetupLine, ...]) -> tuple[SetupLine, ...]:
    return tuple(entry if isinstance(entry, SetupLine) else SetupLine(run=entry) for entry in lines)


class Software(Block):
    """Modules, setup, interpreters and containers."""

    before_modules: tuple[Short[SetupLine], ...] = ()
    """Shell lines that the batch script runs before the modules, in the form of ``setup``."""
    module_purge: Literal["purge", "force-purge", "reset"] | None = None
    """Discard the modules of the submitting shell before the site's are loaded: ``module purge``, ``module --force
    purge`` (Lmod: also sticky modules) or ``module reset``. Null: keep them."""
    module_paths: tuple[OneLine, ...] = ()
    """Folders of modules (``module use``), added before ``modules`` are loaded."""
    modules: tuple[Short[Module], ...] = ()
    """Environment modules that the batch script loads, in this order: names, or ``{name: nccl, optional: true}``. If a
    required module cannot be loaded, the job exits with code 78."""
    setup: tuple[Short[SetupLine], ...] = ()
    """Shell lines that the batch script runs once after the modules: text, or ``{run: ulimit -l unlimited, optional:
    true}``. If the last command of a required line fails, the job exits with code 78; a condition (``[ -d X ] && source
    X/env``) may be false."""
    bundle: OneLine | None = None
    """Python environment as one file that `primerl-hpc bundle` wrote. Every node unpacks it once into ``scratch``, and
    all roles without an interpreter of their own run from there. ``~`` and ``$VARIABLES`` are expanded when the profile
    is loaded."""
    default: RoleSoftware = RoleSoftware()
    """Software of all roles without an entry in ``roles``."""
    roles: dict[Role, RoleSoftware] = Field(default_factory=dict)
    """Software of single roles, e.g. if vLLM and the trainer need different versions of a package."""

    @property
    def module_names(self) -> tuple[Module, ...]:
        """``modules`` in the long form."""
        return tuple(entry if isinstance(entry, Module) else Module(name=entry) for entry in self.modules)

    @property
    def host_python(self) -> str | None:
        """Interpreter of the supervisor and of roles outside of containers; None: the one that submits the run.

        That of ``default``, unless it is in an image: the batch script runs outside. A uenv is mounted for it, too.
        """
        return self.default.python if self.default.container.kind in ("none", "uenv") else None

    @property
    def python_here(self) -> str:
        """Interpreter on this machine that has the packages of the run: of a bundle, the one that submits."""
        return self.host_python or sys.executable

    @property
    def setup_lines(self) -> tuple[SetupLine, ...]:
        """``setup`` in the long form."""
        return _long_lines(self.setup)

    @property
    def early_lines(self) -> tuple[SetupLine, ...]:
        """``before_modules`` in the long form."""
        return _long_lines(self.before_modules)

    @property
    def has_setup(self) -> bool:
        """The batch script runs lines of this block."""
        return bool(self.early_lines or self.uses_modules or self.setup_lines)

    @property
    def uses_modules(self) -> bool:
        """True if the batch script calls ``module``."""
        return bool(self.modules or self.module_paths or self.module_purge)

    @field_validator("module_paths")
    @classmethod
    def _paths_are_no_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [path for path in value if path.startswith("-")]:
            raise ValueError(
                f"{bad[0]!r} starts with '-', because of which module would parse it as an option"
            )
        return value

    @model_validator(mode="after")
    def _bundle_is_the_only_default(self) -> Self:
        if self.bundle is None:
            return self
        if self.default.python is not None or self.default.container.kind != "none":
            raise ValueError(
                "bundle is the software of all roles without an entry in roles; move default.python or "
                "default.container to the roles that need them"
            )
        for role, software in self.roles.items():
            if software.container.kind != "none" and software.python is None:
                raise ValueError(
                    f"roles.{role.value} has a container, in which the interpreter of the bundle does not exist; set "
                    f"roles.{role.value}.python"
                )
        return self

    def of_role(self, role: Role) -> RoleSoftware:
        """Return the software of a role. Engines of all kinds use that of role inference unless they have their own."""
        if role in (Role.PREFILL, Role.TEACHER, Role.JUDGE) and role not in self.roles:
            role = Role.INFERENCE
        return self.roles.get(role, self.default)
