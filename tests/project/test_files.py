"""What may not stand in any file of the repository, and the shell scripts' own behaviour."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Written so that this file does not name them itself.
FOLDERS = ("tmp", "work", "root", "farm", "Users", "mnt", "scratch")
MACHINE_PATHS = re.compile("|".join(f"/{name}/" for name in FOLDERS) + "|bash" + "_jobs")
BINARY = {".png", ".model", ".safetensors", ".gguf"}


def repository_files():
    """Tracked files, and new ones that are not ignored."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_path_of_one_machine():
    found = []
    for path in repository_files():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATHS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_no_large_file_is_committed():
    for path in repository_files():
        assert path.stat().st_size < 1 << 20, path


def environment(*args, **variables):
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "environment.sh"), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables},
    )


def fake_python(path, version):
    """An executable that answers as an interpreter of that version does (None: a dead shim)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = "exit 127" if version is None else f"echo {version}"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def find(tmp_path, *versions):
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    return environment("--find", *versions, PATH=path, PYENV_ROOT=str(tmp_path / "pyenv"))


def test_a_shim_that_does_not_run_is_passed_over_for_one_under_pyenv(tmp_path):
    fake_python(tmp_path / "bin" / "python3.98", None)
    wanted = fake_python(tmp_path / "pyenv" / "versions" / "3.98.10" / "bin" / "python", "3.98")
    fake_python(tmp_path / "pyenv" / "versions" / "3.98.9" / "bin" / "python", "3.98")
    assert find(tmp_path, "3.98", "3.97").stdout.strip() == str(wanted)


def test_versions_are_tried_in_the_order_given(tmp_path):
    fake_python(tmp_path / "bin" / "python3.97", "3.97")
    newest = fake_python(tmp_path / "bin" / "python3.98", "3.98")
    assert find(tmp_path, "3.99", "3.98", "3.97").stdout.strip() == str(newest)


def test_a_name_that_lies_about_its_version_is_passed_over(tmp_path):
    fake_python(tmp_path / "bin" / "python3.98", "3.97")
    assert find(tmp_path, "3.98").returncode != 0


def test_an_interpreter_that_was_asked_for_and_does_not_run_is_named(tmp_path):
    result = environment(str(tmp_path / "venv"), "dev", PYTHON=str(tmp_path / "no-python"))
    assert result.returncode == 1
    assert f"PYTHON={tmp_path / 'no-python'} does not run" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path):
    """Neither made again nor installed into: a second `make` is instant."""
    venv = tmp_path / "venv"
    log = tmp_path / "log"
    python = fake_python(venv / "bin" / "python", "3.98")
    python.write_text(
        f'#!/bin/sh\ncase "$*" in "-m pip"*) echo "$*" >>{log};; *) echo 3.98;; esac\n'
    )
    for _ in range(2):
        assert environment(str(venv), "server", CUDA="0").returncode == 0
    assert log.read_text().count("pip install") == 1
    assert ".[server]" in log.read_text()
    assert environment(str(venv), "dev", CUDA="0").returncode == 0
    assert ".[dev]" in log.read_text()
    # dev holds server: going back to it installs nothing.
    (venv / ".installed").write_text((venv / ".installed").read_text().splitlines()[-1] + "\n")
    before = log.read_text()
    assert environment(str(venv), "server", CUDA="0").returncode == 0
    assert log.read_text() == before
