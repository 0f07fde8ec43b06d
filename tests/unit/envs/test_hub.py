"""Packages of the Environments Hub on a local index: install, pin, check, refuse; with the real pip in a real venv."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ConfigError, DataError, ExitCode, NotFoundError
from primerl_hpc.common.interpreters import Interpreters
from primerl_hpc.envs.hub import (
    MAX_SOURCE_BYTES,
    check_interface,
    choose_wheel,
    find_pin,
    installed_package,
    links_of,
)
from primerl_hpc.recipe.hub import HubPackage, parse_package
from tests.support.environments_index import V0_SOURCE, V1_SOURCE, Index, make_wheel, serve_index
from tests.support.helpers import ROOT, make_tiny_model

OLD, NEW = (make_wheel("hub-sums", version, {"hub_sums.py": V1_SOURCE}) for version in ("0.1.9", "0.1.10"))
PRE = make_wheel("hub-sums", "0.2.0rc1", {"hub_sums.py": V1_SOURCE})
V0 = make_wheel("older", "1.0", {"older/__init__.py": V0_SOURCE})
RECIPE = """\
kind: eval
name: hub
model: {name: model}
seq_len: 256
rollouts: {sampling: {max_tokens: 64}}
environments: {eval: [{id: hub-sums, package: owner/hub-sums@VERSION}]}
"""


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with serve_index({"owner": [OLD, NEW, PRE, V0]}) as found:
        yield found


@pytest.fixture(scope="module")
def own_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of its own, into which packages may be installed; it also has those of this one.

    Its pip is that of this one as well, which is compiled and installs into the interpreter that runs it.
    """
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "others.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return folder / "bin" / "python"


def primerl(
    python: Path, *words: str, cwd: Path, index: Index | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1", "NO_PROXY": "127.0.0.1"}
    environ |= {} if index is None else {"PRIMERL_ENV_INDEX": index.url}
    command = [str(python), "-m", "primerl_hpc", *words]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", HubPackage("owner", "name")),
        ("owner/my_name@0.1.3", HubPackage("owner", "my_name", "0.1.3")),
        ("owner/name@latest", HubPackage("owner", "name")),
        ("./name", None),
        ("name", None),
        ("a/b/c", None),
        ("owner/..@1", None),
        ("git+https://host/a/b", None),
    ],
)
def test_owner_name_and_version_are_a_package_of_the_hub(text: str, expected: HubPackage | None) -> None:
    assert parse_package(text) == expected


def test_the_newest_version_is_chosen_by_its_number_and_pre_releases_only_on_request(index: Index) -> None:
    assert find_pin(HubPackage("owner", "hub-sums"), index.url).package.version == "0.1.10"
    pin = find_pin(HubPackage("owner", "hub_sums", "0.2.0rc1"), index.url)
    assert (pin.sha256, pin.url) == (PRE.sha256, f"{index.url}/owner/hub-sums/@0.2.0rc1/{PRE.file}")
    assert pin.requirement == f"hub_sums @ {pin.url}#sha256={PRE.sha256}"


def test_yanked_files_other_formats_and_other_pythons_are_ignored() -> None:
    page = """<a href="a-1.0-py3-none-any.whl">x</a> <a href="a-4.0-py3-none-any.whl" data-yanked="">x</a>
    <a href="a-3.0.tar.gz">x</a> <a href="a-2.0-cp27-cp27m-win32.whl">x</a> <a href="b-9.0-py3-none-any.whl">x</a>
    <a href="a-5.0-py3-none-any.whl" data-requires-python="&lt;3">x</a>"""
    links = links_of(page, "https://host/owner/simple/a/")
    assert choose_wheel(HubPackage("owner", "a"), links, "https://host") == (
        "1.0",
        "https://host/owner/simple/a/a-1.0-py3-none-any.whl",
    )


def test_what_the_index_lacks_is_named_with_what_it_has(index: Index) -> None:
    with pytest.raises(NotFoundError, match=r"has no package owner/absent, or it is private \(HTTP 404\)"):
        find_pin(HubPackage("owner", "absent"), index.url)
    with pytest.raises(NotFoundError, match=r"has no version 3\.0 of owner/hub-sums") as error:
        find_pin(HubPackage("owner", "hub-sums", "3.0"), index.url)
    assert error.value.hint == "versions with a wheel: 0.1.9, 0.1.10, 0.2.0rc1"
    with pytest.raises(NotFoundError, match="does not respond: ConnectError"):
        find_pin(HubPackage("owner", "hub-sums"), "http://127.0.0.1:9")


def test_a_wheel_that_differs_from_the_index_is_refused() -> None:
    with (
        serve_index({"owner": [OLD]}, sha256={OLD.file: "0" * 64}) as index,
        pytest.raises(DataError, match="differs from the checksum in the index"),
    ):
        find_pin(HubPackage("owner", "hub-sums"), index.url)


def test_an_environment_of_the_older_interface_is_refused_before_it_is_installed(index: Index) -> None:
    with pytest.raises(
        ConfigError, match=r"owner/older does not use verifiers\.v1, which runs need: it defines load_"
    ):
        find_pin(HubPackage("owner", "older"), index.url)
    with pytest.raises(DataError, match="cannot be read"):
        check_interface("owner/x", b"no archive")


def test_a_wheel_whose_code_is_huge_after_decompression_is_refused() -> None:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.bin", b"verifiers.v1")
        archive.writestr("x/__init__.py", bytes(MAX_SOURCE_BYTES + 1))
    assert len(wheel.getvalue()) < 1 << 20
    with pytest.raises(DataError, match="has more than 64 MiB"):
        check_interface("owner/x", wheel.getvalue())


def test_a_package_of_another_index_is_not_taken_for_that_of_the_hub() -> None:
    """PyPI accepts a package of the same name and version from any user; pip records no URL for it."""
    version = importlib.metadata.version("click")
    assert installed_package(f"owner/click@{version}")["state"] == "other"


def test_an_installed_package_is_pinned_and_other_versions_and_owners_are_recognized(
    own_python: Path, index: Index, tmp_path: Path
) -> None:
    words = ("env", "install", "owner/hub-sums@0.1.9", "--index", index.url)
    done = primerl(own_python, *words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "name": "hub-sums",
        "added": [],
        "target": None,
        "package": "owner/hub-sums@0.1.9",
        "url": f"{index.url}/owner/hub-sums/@0.1.9/{OLD.file}",
        "sha256": OLD.sha256,
    }
    packages = ["owner/hub-sums@0.1.9", "owner/hub-sums@0.1.10", "stranger/hub-sums@0.1.9", "owner/nothing@1"]
    with Interpreters() as interpreters:
        function = "primerl_hpc.envs.hub:installed_package"
        answers = [interpreters.ask(str(own_python), {}, function, package) for package in packages]
    assert [item["state"] for item in answers] == ["present", "other", "other", "missing"]
    assert answers[0]["sha256"] == OLD.sha256 and answers[0]["version"] == "0.1.9"
    checked = primerl(own_python, "env", "check", "hub-sums", cwd=tmp_path)
    assert checked.returncode == 0 and "hub-sums: 1 tasks" in checked.stdout, checked.stderr


def test_bad_packages_are_one_sentence_and_an_exit_code(
    own_python: Path, index: Index, tmp_path: Path
) -> None:
    for package, code, sentence in (
        ("owner/absent", ExitCode.NOT_FOUND, "has no package owner/absent"),
        ("owner/older", ExitCode.CONFIG, "does not use verifiers.v1"),
    ):
        done = primerl(own_python, "env", "install", package, cwd=tmp_path, index=index)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ") and sentence in line
    done = primerl(own_python, "env", "install", "./x", "--index", index.url, cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE and "--index is for packages" in done.stderr


@pytest.mark.slow
def test_prefetch_installs_the_package_that_doctor_misses(
    own_python: Path, index: Index, tmp_path: Path
) -> None:
    (tmp_path / "hub.yaml").write_text(RECIPE.replace("VERSION", "0.1.10"))
    place = ("-p", "local", "--profile-set", f"software.default.python={own_python}")
    place += ("--profile-set", f"cache={tmp_path}/cache")

    def doctor() -> tuple[int, dict]:
        done = primerl(own_python, "doctor", *place, "--recipe", "hub.yaml", "--json", cwd=tmp_path)
        (found,) = [item for item in json.loads(done.stdout) if item["what"] == "environment package"]
        return done.returncode, found

    code, found = doctor()
    assert code == ExitCode.CONFIG and not found["is_ok"] and "owner/hub-sums@0.1.10" in found["said"]
    assert found["hint"].startswith("install it: primerl-hpc prefetch hub.yaml")
    done = primerl(own_python, "prefetch", "hub.yaml", *place, "--json", cwd=tmp_path, index=index)
    items = {item["kind"]: item for item in json.loads(done.stdout)["items"]}
    assert items["package"]["state"] == "complete", done.stdout + done.stderr
    assert items["environment"]["detail"] == "1 tasks were loaded"
    assert doctor()[1]["is_ok"]
    asked = len(index.asked)
    primerl(own_python, "prefetch", "hub.yaml", *place, "--json", cwd=tmp_path, index=index)
    assert len(index.asked) == asked  # nothing is fetched twice
    (tmp_path / "hub.yaml").write_text(RECIPE.replace("VERSION", "7.0"))
    done = primerl(own_python, "prefetch", "hub.yaml", *place, "--json", cwd=tmp_path, index=index)
    (item,) = [item for item in json.loads(done.stdout)["items"] if item["kind"] == "package"]
    assert done.returncode == ExitCode.NOT_FOUND and "has no version 7.0 of owner/hub-sums" in item["detail"]
    assert item["hint"] == "versions with a wheel: 0.1.9, 0.1.10, 0.2.0rc1"


def test_a_recipe_names_an_exact_version(tmp_path: Path) -> None:
    (tmp_path / "hub.yaml").write_text(RECIPE.replace("@VERSION", ""))
    done = primerl(Path(sys.executable), "plan", "hub.yaml", "-p", "local", cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG and "environments.eval.0.package" in done.stderr


def test_bundle_installs_the_packages_of_a_recipe_and_refuses_without(
    own_python: Path, index: Index, tmp_path: Path
) -> None:
    (tmp_path / "hub.yaml").write_text(RECIPE.replace("VERSION", "9.9"))
    words = ("bundle", "env.tar.gz", "--python", str(own_python), "--recipe", "hub.yaml", "--no-try")
    done = primerl(own_python, *words, cwd=tmp_path, index=index)
    assert done.returncode == ExitCode.NOT_FOUND and not (tmp_path / "env.tar.gz").exists()
    assert "package owner/hub-sums@9.9 is not in the bundle: " in done.stderr
    (tmp_path / "hub.yaml").write_text(RECIPE.replace("VERSION", "0.1.9"))
    done = primerl(own_python, *words, "--json", cwd=tmp_path, index=index)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)["environment_packages"]
    assert (record["version"], record["sha256"]) == ("0.1.9", OLD.sha256)
    assert json.loads(done.stdout)["packages"]["hub-sums"] == "0.1.9"


def test_submit_refuses_another_version_and_records_the_installed_one(
    own_python: Path, index: Index, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "tiny", rows=1)
    (tmp_path / "hub.yaml").write_text(RECIPE.replace("VERSION", "0.1.10"))
    python = f"software.default.python={own_python}"
    words = ("submit", "hub.yaml", "-p", "local", "--profile-set", python, "--set", "model.name=tiny/model")
    words += ("--set", "model.renderer.name=chatml", "--dry-run", "--run-dir", "run")
    done = primerl(own_python, "env", "install", "owner/hub-sums@0.1.9", cwd=tmp_path, index=index)
    assert done.returncode == 0, done.stderr
    done = primerl(own_python, *words, cwd=tmp_path)
    assert done.returncode == ExitCode.NOT_FOUND and not (tmp_path / "run").exists()
    assert "package owner/hub-sums@0.1.10 of an environment is not installed" in done.stderr
    assert "has version 0.1.9; install it: primerl-hpc prefetch hub.yaml -p local" in done.stderr
    done = primerl(own_python, "env", "install", "owner/hub-sums@0.1.10", cwd=tmp_path, index=index)
    assert done.returncode == 0 and "package: owner/hub-sums@0.1.10" in done.stdout, done.stderr
    done = primerl(own_python, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads((tmp_path / "run" / "provenance.json").read_text())["environment_packages"]
    assert record == {
        "python": str(own_python),
        "package": "owner/hub-sums@0.1.10",
        "version": "0.1.10",
        "url": f"{index.url}/owner/hub-sums/@0.1.10/{NEW.file}",
        "sha256": NEW.sha256,
    }
