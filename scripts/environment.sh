#!/usr/bin/env bash
# Makes or updates a virtual environment of this project, and does nothing when it is up to date.
#
#   scripts/environment.sh VENV EXTRAS     EXTRAS: extras of pyproject.toml, such as "server" or "dev"
#   scripts/environment.sh --find [VERSION...]   prints the first Python of these versions that runs
#
# PYTHON=/path/to/python picks the interpreter; otherwise an existing VENV keeps its own, and a new
# one gets the newest of 3.13, 3.12 and 3.11 on PATH or under pyenv. CUDA=0 leaves the CUDA wheels
# out where there is an NVIDIA GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Read by name, never imported: see tests/conftest.py. Its dependencies are not needed.
SENTENCEPIECE_WHEEL='mistral-common==1.13.1'

say() { printf '%s\n' "$*" >&2; }

version_of() { # prints 3.12 for an interpreter that runs and can make environments, else fails
  "$1" -c 'import ensurepip, venv, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null
}

find_python() { # a shim on PATH may exist and not run, so every candidate is really executed
  local version candidate
  for version in "$@"; do
    while IFS= read -r candidate; do
      if [[ "$(version_of "$candidate")" == "$version" ]]; then
        printf '%s\n' "$candidate"
        return 0
      fi
    done < <(
      type -ap "python$version" || true
      compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version.*/bin/python" | sort -Vr || true
      type -ap python3 python || true
    )
  done
  return 1
}

make_venv() { # VENV; keeps one that runs and is of the wanted version
  local venv=$1 wanted='' have='' python
  if [[ -n "${PYTHON:-}" ]]; then
    wanted=$(version_of "$PYTHON") || { say "PYTHON=$PYTHON does not run, or lacks venv"; exit 1; }
  fi
  have=$(version_of "$venv/bin/python") || true
  if [[ -n "$have" && ( -z "$wanted" || "$wanted" == "$have" ) ]]; then return; fi
  python=${PYTHON:-$(find_python 3.13 3.12 3.11)} || {
    say 'No Python 3.11, 3.12 or 3.13 with venv was found on PATH or under pyenv.'
    say 'Install one, or name it: make PYTHON=/path/to/python3.12 ...'
    exit 1
  }
  say "Making $venv with $("$python" --version) ($python)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
}

install() { # VENV EXTRAS; once for each state of pyproject.toml
  local venv=$1 extras=$2 stamp="$1/.installed" suffix='' key
  if [[ "${CUDA:-1}" != 0 ]] && nvidia-smi -L >/dev/null 2>&1; then suffix=',cuda12'; fi
  extras+=$suffix
  key=$(sha256sum pyproject.toml scripts/environment.sh | sha256sum | cut -d ' ' -f 1)
  # The extra dev holds all others.
  if [[ -f "$stamp" ]] && grep -qxF -e "$extras $key" -e "dev$suffix $key" "$stamp"; then return; fi
  say "Installing pagedjax[$extras] into $venv (a minute or two the first time)"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --editable ".[$extras]"
  if [[ ",$extras," == *,dev,* ]]; then
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps \
      "$SENTENCEPIECE_WHEEL"
  fi
  printf '%s\n' "$extras $key" >>"$stamp"
}

if [[ "${1:-}" == --find ]]; then
  shift
  find_python "${@:-3.13}"
elif [[ $# == 2 ]]; then
  make_venv "$1"
  install "$1" "$2"
else
  say "usage: $0 VENV EXTRAS | --find [VERSION...]"
  exit 2
fi
