"""A virtual environment with the few packages that a supervisor imports, so that its bundle is small."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    *("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions", "submitit"),
    *("cloudpickle", "click", "jinja2", "markupsafe", "yaml", "tenacity", "isal", "cryptography", "cffi"),
    *"_cffi_backend pycparser rich httpx httpcore h11 anyio sniffio idna certifi".split(),
)


def make_environment(folder: Path) -> Path:
    """Create the environment with links to the packages of this one; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin)
        source = source.parent if source.name == "__init__.py" else source
        (packages / source.name).symlink_to(source)
    script = folder / "bin" / "say-prefix"
    script.write_text(f"#!{python}\nimport sys\nprint(sys.prefix, *sys.argv[1:])\n")
    script.chmod(0o755)
    os.utime(script, (1_700_000_000, 1_700_000_000))
    return python
