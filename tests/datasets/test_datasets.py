"""Data sets: look-up, checks, downloads from a server on this machine, and real data where they are."""

import hashlib
import io
import os
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest

from pyro_lvgp.datasets import Dataset, _fetch, list_datasets, load_dataset
from pyro_lvgp.datasets._parse_text import parse_bridges
from pyro_lvgp.datasets._registry import REGISTRY
from tests.helpers import ROOT, upstream_archives, upstream_files

needs_data = pytest.mark.skipif(not os.environ.get("PYRO_LVGP_DATA"), reason="PYRO_LVGP_DATA names no folder")
R_FILES = ["jura", "weather_trentino"]
LARGE = {"mnist", "cifar10_gray", "cifar10_rgb5k", "weather_trentino"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("PYRO_LVGP_DATA", raising=False)
    monkeypatch.setattr(_fetch, "_cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def upstream(cache, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with upstream_files.Upstream() as upstream:
        monkeypatch.setattr(_fetch, "_FILE_HOST", upstream.url)
        monkeypatch.setattr(_fetch, "_ARCHIVE_HOST", upstream.url)
        yield upstream


def expect(monkeypatch, name, arrays):
    """Make the registry expect ``arrays`` of a data set."""
    monkeypatch.setitem(REGISTRY, name, replace(REGISTRY[name], sha256="0" * 64, digest=_fetch.digest(arrays)))


def files_of(name, arrays, tmp_path):
    write = getattr(upstream_files, f"write_{name.split('_')[0] if name.startswith('wine') else name}")
    return write(arrays, tmp_path) if name in R_FILES else write(arrays)


@pytest.mark.parametrize("name", list_datasets())
def test_download_parses_the_upstream_format(name, upstream, cache, tmp_path, monkeypatch):
    wanted = upstream_files.small(name)
    upstream.serve(name, files_of(name, wanted, tmp_path))
    parsed = {}
    monkeypatch.setattr(_fetch, "digest", lambda arrays: parsed.update(arrays) or REGISTRY[name].digest)
    data = load_dataset(name)
    assert set(data) == set(data.units)
    for key, array in wanted.items():
        np.testing.assert_array_equal(data[key], array, err_msg=key)
        assert data[key].dtype == array.dtype, key
    assert [file.name for file in cache.iterdir()] == [f"{name}.npz"]
    num_requests = len(upstream.requests)
    assert num_requests == len(REGISTRY[name].files)
    again = load_dataset(name)
    assert len(upstream.requests) == num_requests
    for key in data:
        np.testing.assert_array_equal(again[key], data[key])


@needs_data
@pytest.mark.parametrize("name", sorted(set(REGISTRY) - LARGE - {"newsgroups"}))  # its counts do not give the texts back
def test_upstream_format_of_the_real_data_has_the_recorded_digest(name, tmp_path, request):
    data = load_dataset(name)
    contents = files_of(name, data, tmp_path)
    upstream = request.getfixturevalue("upstream")  # from here on no folder is set
    upstream.serve(name, contents)
    downloaded = load_dataset(name)
    assert len(upstream.requests) == len(contents)
    for key in data:
        np.testing.assert_array_equal(downloaded[key], data[key], err_msg=key)
        assert downloaded[key].dtype == data[key].dtype, key


def test_download_of_other_content_is_refused(upstream, cache):
    upstream.serve("wine_red", upstream_files.write_wine(upstream_files.small("wine_red")))
    with pytest.raises(ValueError, match=rf"digest {REGISTRY['wine_red'].digest}, got \w+.* Try again. Check the network"):
        load_dataset("wine_red")
    assert list(cache.iterdir()) == []


def test_newsgroups_pass_only_with_the_digest_of_plain_counts(upstream, cache, monkeypatch):
    messages = upstream_archives.newsgroups()
    expect(monkeypatch, "newsgroups", upstream_archives.count_newsgroups(messages))
    key = next(iter(messages))
    for other in (messages | {key: messages[key] + b" twenty"}, {k: v for k, v in messages.items() if k != key}):
        upstream.serve("newsgroups", [upstream_archives.newsgroups_archive(other)])
        with pytest.raises(ValueError, match=r"expected arrays of digest \w+, got \w+.*dataMining20NewsGroup.*Try again"):
            load_dataset("newsgroups")
        assert list(cache.iterdir()) == []
    upstream.serve("newsgroups", [upstream_archives.newsgroups_archive(messages)])
    assert load_dataset("newsgroups").X.shape[0] == len(messages)
    assert upstream.requests == ["/bahbbc/dataMining20NewsGroup/tar.gz/1f791d180896b6be5b8529be0f9d135f5110dcca"] * 3


def test_newsgroups_of_the_tests_reach_the_bounds_and_odd_characters():
    arrays = upstream_files.small("newsgroups")
    words, body_words = ({str(word) for word in arrays[key]} for key in ("vocabulary", "body_vocabulary"))
    both = {"twenty", "many", "host", "ve", "then", "again", "b" * 20}
    assert words == both | {"five", "nineteen", "often", "_not_", "snake_case", "abc123", "c" * 21, "donõt", "naïve"}
    assert body_words == both
    assert 0 in np.diff(arrays["body_csr_indptr"])
    assert list(arrays["doc_id"]).index("9999") < list(arrays["doc_id"]).index("51000")


def test_files_and_archives_come_from_their_hosts():
    assert _fetch._url(REGISTRY["bridges"].files[0]) == (
        "https://raw.githubusercontent.com/gwgundersen/rflvm/5ac15101f2/datasets/bridges.npy"
    )
    assert _fetch._url(REGISTRY["newsgroups"].files[0]) == (
        "https://codeload.github.com/bahbbc/dataMining20NewsGroup/tar.gz/1f791d180896b6be5b8529be0f9d135f5110dcca"
    )


def test_download_in_another_format_is_refused(upstream, cache):
    upstream.serve("oilflow", [b"<html>moved</html>"])
    with pytest.raises(ValueError, match="expected files of known form, got ReadError"):
        load_dataset("oilflow")
    assert list(cache.iterdir()) == []


def test_missing_file_names_the_url_and_the_mend(upstream, cache):
    with pytest.raises(OSError, match=r"download http.*/winequality-red.csv, got: 404.*environment variable PYRO_LVGP_DATA"):
        load_dataset("wine_red")
    assert list(cache.iterdir()) == []


def test_interrupted_download_leaves_nothing_and_can_be_repeated(upstream, cache, monkeypatch):
    wanted = upstream_files.small("wine_red")
    expect(monkeypatch, "wine_red", wanted)
    upstream.serve("wine_red", upstream_files.write_wine(wanted))
    upstream.cut = True
    with pytest.raises(OSError, match="expected to download"):
        load_dataset("wine_red")
    assert list(cache.iterdir()) == []
    upstream.cut = False
    np.testing.assert_array_equal(load_dataset("wine_red").X, wanted["X"])


def test_interrupted_write_leaves_no_file(cache, monkeypatch):
    cache.mkdir()

    def interrupt(file, **arrays):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _fetch._write_npz(cache / "demo.npz", {"X": np.zeros(2)})
    assert list(cache.iterdir()) == []


def test_without_download_the_error_says_where_it_looked(cache, upstream):
    with pytest.raises(FileNotFoundError, match=r"expected eeg.npz in PYRO_LVGP_DATA \(not set\).*download=True"):
        load_dataset("eeg", download=False)
    assert upstream.requests == []


def test_r_data_without_rdata_says_how_to_install_it(upstream, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdata", None)
    upstream.serve("jura", [b"RDX3"])
    with pytest.raises(ModuleNotFoundError, match="pip install rdata"):
        load_dataset("jura")


def test_unknown_name_lists_near_matches_and_all_names():
    with pytest.raises(ValueError, match=r"bridges, .*yale, got 'oil_flow'. Did you mean 'oilflow'\?"):
        load_dataset("oil_flow")


def test_folder_goes_before_the_cache_and_is_checked(cache, tmp_path, monkeypatch):
    arrays = {"X": np.arange(3.0)}
    monkeypatch.setenv("PYRO_LVGP_DATA", str(tmp_path))
    np.savez(tmp_path / "eeg.npz", **arrays)
    with pytest.raises(ValueError, match=rf"eeg.npz: expected sha256 {REGISTRY['eeg'].sha256}.*got.*Replace the file"):
        load_dataset("eeg")
    expect(monkeypatch, "eeg", arrays)
    cache.mkdir()
    (cache / "eeg.npz").write_bytes(b"not read")
    np.testing.assert_array_equal(load_dataset("eeg", download=False).X, arrays["X"])
    (tmp_path / "eeg.npz").unlink()
    with pytest.raises(ValueError, match=r"not a readable npz\. Delete the file"):
        load_dataset("eeg", download=False)
    monkeypatch.setenv("PYRO_LVGP_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"expected PYRO_LVGP_DATA to name a folder, got .*nowhere"):
        load_dataset("eeg")


def test_a_damaged_file_is_refused_wherever_the_damage_is(tmp_path, monkeypatch):
    arrays = {"X": np.arange(20.0)}
    monkeypatch.setenv("PYRO_LVGP_DATA", str(tmp_path))
    expect(monkeypatch, "eeg", arrays)
    path = tmp_path / "eeg.npz"
    np.savez_compressed(path, **arrays)
    whole, refusals = path.read_bytes(), []
    for position in range(len(whole)):
        for damaged in (whole[:position], whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :]):
            path.write_bytes(damaged)
            try:
                data = load_dataset("eeg")
            except ValueError as error:
                refusals.append(str(error))
            else:  # such as the time of an entry, which does not matter
                np.testing.assert_array_equal(data.X, arrays["X"])
    assert len(refusals) > 1.5 * len(whole)
    assert all(text.startswith(f"{path}: expected sha256") and text.endswith("downloaded.") for text in refusals)


def test_digest_sees_names_dtypes_shapes_and_values_only():
    x = np.array([[1.0, np.nan], [0.0, 2.0]])
    same = _fetch.digest({"x": x})
    assert _fetch.digest({"x": np.asfortranarray(x)}) == same
    assert _fetch.digest({"x": np.where(np.isnan(x), -np.nan, x)}) == same
    assert _fetch.digest({"x": x.astype(">f8")}) == same
    others = [{"y": x}, {"x": x.astype(np.float32)}, {"x": x.ravel()}, {"x": x + 1e-15}, {"x": x, "y": x}]
    assert same not in [_fetch.digest(other) for other in others]


def test_pickles_with_anything_but_arrays_are_refused(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.array({"Y": io.BytesIO}, dtype=object), allow_pickle=True)
    (tmp_path / "bad.npy").write_bytes(stream.getvalue())
    with pytest.raises(pickle.UnpicklingError, match=r"numpy arrays only, got _io\.BytesIO"):
        parse_bridges([tmp_path / "bad.npy"])


def test_dataset_reads_as_mapping_and_attributes():
    data = Dataset("demo", {"X": np.array([1.0, np.nan])}, "Two numbers.", {"X": "length [m]"}, "A (2000)", "free", "here")
    assert data.X is data["X"]
    assert (list(data), len(data), "X" in data, "Y" in data, list(dict(data))) == (["X"], 1, True, False, ["X"])
    assert "X" in dir(data)
    for part in ("demo", "(2,) float64", "length [m]", "1 of 2 missing", "A (2000)", "free", "here"):
        assert part in repr(data)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(data)).X, data.X)
    with pytest.raises(AttributeError, match=r"one of the arrays \['X'\], got 'Z'"):
        _ = data.Z
    with pytest.raises(KeyError, match="got 'Z'"):
        data["Z"]
    with pytest.raises(AttributeError):
        data.name = "other"


FACTS = {  # first array, its shape, and the missing cells of all arrays
    "oilflow": ("X", (1000, 12), 0),
    "eeg": ("Y", (256, 7), 0),
    "jura": ("Y", (359, 7), 0),
    "weather_trentino": ("Y", (18262, 59, 3), 281_091 + 431_168 + 431_229),
    "frey": ("X", (1965, 560), 0),
    "mnist": ("X_train", (60000, 784), 0),
    "wine_red": ("X", (1599, 11), 0),
    "wine_white": ("X", (4898, 11), 0),
    "bridges": ("Y", (214, 4), 0),
    "montreal": ("Y", (261, 8), 903),
    "newsgroups": ("X", (2752, 183), 0),
    "yale": ("X", (165, 1024), 0),
    "cifar10_gray": ("X_train", (50000, 1024), 0),
    "cifar10_rgb5k": ("X", (5000, 32, 32, 3), 0),
    "congress109": ("X", (529, 1000), 0),
}


@needs_data
@pytest.mark.parametrize("name", FACTS)
def test_real_data_have_the_stated_shapes_and_missing_cells(name):
    data = load_dataset(name, download=False)
    key, shape, missing = FACTS[name]
    assert data[key].shape == shape
    assert sum(int(np.isnan(a).sum()) for a in dict(data).values() if a.dtype.kind == "f") == missing
    assert list(data.units) == list(data)
    assert _fetch.digest(data.arrays) == REGISTRY[name].digest


def test_every_data_set_is_known_and_in_the_documentation():
    page = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
    assert sorted(FACTS) == list_datasets()
    assert [name for name in FACTS if f"| `{name}` |" not in page] == []


@needs_data
def test_real_mnist_is_the_original_distribution():
    data = load_dataset("mnist", download=False)
    sha = hashlib.sha256(upstream_files.idx(data.X_train.reshape(-1, 28, 28))).hexdigest()
    assert sha == "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    assert np.isin(data.y_test, [1, 7]).sum() == 2163
