"""Downloads and files that are too large, or take too long."""

import gzip
import io
import tarfile

import numpy as np
import pytest

from pyro_lvgp.datasets import _fetch, _limits, load_dataset
from pyro_lvgp.datasets._registry import REGISTRY
from tests.helpers import upstream_files


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    monkeypatch.delenv("PYRO_LVGP_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(_fetch, "_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(_limits, "_MOST_BYTES", 10_000)
    with upstream_files.Upstream() as upstream:
        monkeypatch.setattr(_fetch, "_FILE_HOST", upstream.url)
        yield upstream


def tar_of_zeros():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        member = tarfile.TarInfo("DataTrn.txt")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(bytes(100_000)))
    return file.getvalue()


def test_downloads_that_are_too_large(upstream, tmp_path):
    upstream.serve("wine_red", [bytes(20_000)])
    with pytest.raises(OSError, match=r"expected at most 1\.0e\+04 bytes in 3600 s, got more.*Check the network"):
        load_dataset("wine_red")
    assert not list((tmp_path / "cache").iterdir())


def test_downloads_that_take_too_long(upstream, tmp_path, monkeypatch):
    monkeypatch.setattr(_limits, "_MOST_SECONDS", 0.0)
    upstream.serve("wine_red", [bytes(5000)])
    with pytest.raises(OSError, match=r"expected at most .* in 0 s"):
        load_dataset("wine_red")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(("name", "content"), [("eeg", gzip.compress(bytes(100_000))), ("oilflow", tar_of_zeros())])
def test_files_that_are_too_large_after_decompression(upstream, tmp_path, name, content):
    assert len(content) < 10_000
    upstream.serve(name, [content])
    with pytest.raises(ValueError, match=r"expected at most 1\.0e\+04 bytes after decompression"):
        load_dataset(name)
    assert not list((tmp_path / "cache").iterdir())


def test_arrays_that_are_too_large(upstream, tmp_path):
    (tmp_path / "cache").mkdir()
    np.savez_compressed(tmp_path / "cache" / "eeg.npz", Y=np.zeros(100_000))
    with pytest.raises(ValueError, match=rf"expected sha256 {REGISTRY['eeg'].sha256}.*not a readable npz"):
        load_dataset("eeg")
