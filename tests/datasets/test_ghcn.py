"""GHCN-Daily: small files in the published format, from a server on this machine."""

import gzip

import numpy as np
import pytest

from pyro_lvgp.datasets import ghcn_daily
from tests.helpers import upstream_files

STATIONS = """\
JA000047401  45.4167  141.6831   12.0    WAKKANAI                       GSN     47401
JA000047662  35.6831  139.7670   36.0    TOKYO                                  47662
USW00094728  40.7789  -73.9692 -999.9 NY NEW YORK CNTRL PK TWR              HCN 72506
"""
TOKYO = """\
JA000047662,19791231,TMAX,999,,,S,
JA000047662,19800101,TMAX,112,,,S,
JA000047662,19800101,TMIN,-15,,,S,
JA000047662,19800101,PRCP,7,,,S,0900
JA000047662,19800101,WT01,1,,,S,
JA000047662,19800101,SNWD,-9999,,,,
JA000047662,19800229,TMAX,700,,X,S,
JA000047662,19800229,SNWD,30,,,S,
JA000047662,19811231,TMAX,88,H,,S,
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    with upstream_files.ghcn(monkeypatch, tmp_path / "cache") as upstream:
        upstream.files = {
            "/ghcnd-stations.txt": STATIONS.encode(),
            "/by_station/JA000047662.csv.gz": gzip.compress(TOKYO.encode()),
            "/by_station/JA000047401.csv.gz": gzip.compress(b"JA000047401,19800102,TMAX,5,,,S,\n"),
        }
        yield upstream


def test_records_become_arrays(upstream):
    data = ghcn_daily(["JA000047662"], [1981, 1980], ["TMAX", "TMIN", "PRCP", "SNWD"])
    assert data.Y.shape == (366 + 365, 1, 4)
    assert (data.dates[0], data.dates[-1]) == (np.datetime64("1980-01-01"), np.datetime64("1981-12-31"))
    expected = np.full_like(data.Y, np.nan)
    expected[0, 0] = [11.2, -1.5, 0.7, np.nan]
    expected[59, 0, 3] = 30.0  # whose temperature failed a check
    expected[-1, 0, 0] = 8.8
    np.testing.assert_allclose(data.Y, expected, rtol=1e-6)
    assert (data.lat[0], data.lon[0], data.elev[0], data.name) == (35.6831, 139.767, 36.0, "ghcn_daily")
    assert data.station_name.tolist() == ["TOKYO"]
    assert data.columns.tolist() == ["TMAX", "TMIN", "PRCP", "SNWD"]
    assert data.units["Y"] == "maximum temperature [°C], minimum temperature [°C], precipitation [mm], snow depth [mm]"
    assert set(data) == set(data.units)
    assert "Menne" in data.citation


def test_all_stations_of_a_country_in_the_order_of_the_list(upstream):
    data = ghcn_daily("JA", [1980], ["TMAX"])
    assert data.station.tolist() == ["JA000047401", "JA000047662"]
    np.testing.assert_allclose(data.Y[:2, :, 0], [[np.nan, 11.2], [0.5, np.nan]], rtol=1e-6)


def test_names_may_be_arrays(upstream):
    names = ["JA000047662", "JA000047401"], [1980], ["TMIN", "TMAX"]
    data, expected = ghcn_daily(*map(np.array, names)), ghcn_daily(*names)
    for key in expected:
        np.testing.assert_array_equal(data[key], expected[key])


def test_unknown_elevation_is_nan(upstream):
    upstream.files["/by_station/USW00094728.csv.gz"] = gzip.compress(b"")
    data = ghcn_daily(["USW00094728"], range(2000, 2001))
    assert np.isnan(data.elev).all()
    assert np.isnan(data.Y).all()


def test_files_are_downloaded_once(upstream, tmp_path, monkeypatch):
    first = ghcn_daily("JA", [1980])
    num_requests = len(upstream.requests)
    assert num_requests == 3
    np.testing.assert_array_equal(ghcn_daily("JA", [1980], download=False).Y, first.Y)
    (tmp_path / "cache").rename(tmp_path / "own")
    with pytest.raises(FileNotFoundError, match=r"expected ghcnd-stations.txt in .*cache.ghcn_daily, got none. Allow the"):
        ghcn_daily("JA", [1980], download=False)
    monkeypatch.setenv("PYRO_LVGP_DATA", str(tmp_path / "own"))
    np.testing.assert_array_equal(ghcn_daily("JA", [1980]).Y, first.Y)
    assert len(upstream.requests) == num_requests


def test_interrupted_download_leaves_nothing(upstream, tmp_path):
    upstream.cut = True
    with pytest.raises(OSError, match=r"expected to download http.*ghcnd-stations.txt.*PYRO_LVGP_DATA"):
        ghcn_daily("JA", [1980])
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((["JA000000000"], [1980]), "expected stations of ghcnd-stations.txt, got 'JA000000000'"),
        (("XX", [1980]), "expected stations of ghcnd-stations.txt, got 'XX'"),
        (("", [1980]), "expected stations, got ''"),
        (("JA", []), "expected a year or more, got none"),
        (("JA", [1980], []), "expected variables of TMAX, .*, got none"),
        ((np.array([]), [1980]), r"expected stations, got \[\]"),
        (("JA", [1980], ["TMAX", "TMIN", "TMAX"]), "expected each variable once, got TMAX, TMIN, TMAX; leave out"),
    ],
)
def test_what_is_unknown_is_refused(upstream, args, message):
    with pytest.raises(ValueError, match=message):
        ghcn_daily(*args)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "args", [("JA", 1980), ("JA", np.int64(1980)), ("JA", "1980"), ("JA", ["1980"]), ("JA", [1980], "TMAX")]
)
def test_kinds_of_arguments_are_checked(upstream, args):
    with pytest.raises(TypeError, match="expected"):
        ghcn_daily(*args)


def test_a_folder_that_is_not_there_is_refused(upstream, monkeypatch):
    monkeypatch.setenv("PYRO_LVGP_DATA", "/nowhere")
    with pytest.raises(FileNotFoundError, match="expected PYRO_LVGP_DATA to name a folder, got '/nowhere'"):
        ghcn_daily("JA", [1980])


def test_station_without_a_file_names_the_url(upstream):
    with pytest.raises(OSError, match=r"download http.*/by_station/USW00094728.csv.gz, got: 404"):
        ghcn_daily(["USW00094728"], [1980])


@pytest.mark.parametrize(
    "content",
    [
        b"<html>moved</html>",
        gzip.compress(b"moved\n", mtime=0),
        gzip.compress(b"JA000047401,19800102,TMAX,5,,,S,\n", mtime=0),
        gzip.compress(TOKYO.encode())[:-12],
        gzip.compress(TOKYO.encode(), mtime=0)[:10] + b"\xff" * 20,  # no deflate stream
        gzip.compress(b"JA000047662,19800101,TMAX," + b"9" * 400 + b",,,S,\n"),
        gzip.compress(b"9" * 200_000),  # longer than the csv module reads
    ],
    ids=["html", "line", "station", "cut", "bits", "number", "field"],
)
def test_records_in_another_format_are_refused(upstream, tmp_path, content):
    upstream.files["/by_station/JA000047662.csv.gz"] = content
    with pytest.raises(ValueError, match=r"JA000047662.csv.gz: expected records of a station, got .*Nothing was kept"):
        ghcn_daily(["JA000047662"], [1980])
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["ghcnd-stations.txt"]
    (tmp_path / "cache" / "ghcn_daily" / "by_station" / "JA000047662.csv.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"JA000047662.csv.gz: expected records of a station, got .*Delete the file"):
        ghcn_daily(["JA000047662"], [1980])


@pytest.mark.parametrize("content", [b"<html>moved</html>", b"\xff" + STATIONS.encode()])
def test_list_in_another_format_is_refused(upstream, tmp_path, content):
    upstream.files["/ghcnd-stations.txt"] = content
    with pytest.raises(
        ValueError, match=r"ghcnd-stations.txt: expected stations in columns of fixed width, got .*Nothing was kept"
    ):
        ghcn_daily(["JA000047662"], [1980])
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("content", ["", STATIONS.replace("JA000047662", "../../../..")], ids=["empty", "path"])
def test_lists_without_identifiers_are_refused(upstream, tmp_path, content):
    upstream.files["/ghcnd-stations.txt"] = content.encode()
    with pytest.raises(
        ValueError, match=r"expected stations with identifiers of 11 letters and digits, got .*Nothing was kept"
    ):
        ghcn_daily("JA", [1980])
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
