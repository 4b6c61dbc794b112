"""A server on this machine and writers of the data sets' upstream formats, for the tests of the downloads.

Each writer takes the arrays of a data set and returns the contents of its upstream files, in the registry's order.
"""

import csv
import gzip
import io
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import scipy.io
from PIL import Image

from pyro_lvgp.datasets import _ghcn
from pyro_lvgp.datasets._registry import REGISTRY
from tests.helpers.upstream_archives import count_newsgroups, newsgroups, newsgroups_archive, tar_gz


class Upstream:
    """A server on loopback: ``files`` by path, ``requests`` made; a body is cut short where ``cut`` is set."""

    def __init__(self):
        self.files, self.requests, self.cut = {}, [], False
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                upstream.requests.append(self.path)
                body = upstream.files.get(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write((body or b"")[: -10 if upstream.cut else None])

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def serve(self, name, contents):
        for file, content in zip(REGISTRY[name].files, contents, strict=True):
            folder = file.path.endswith("/")
            path = f"tar.gz/{file.commit}" if folder else f"{file.commit}/{file.path}"
            self.files[f"/{file.repository}/{path}"] = content


@contextmanager
def ghcn(monkeypatch, cache):
    """A server in the place of GHCN-Daily's, and no data but what it serves and the folder keeps."""
    monkeypatch.delenv("PYRO_LVGP_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(_ghcn, "_cache_folder", lambda: cache)
    with Upstream() as upstream:
        monkeypatch.setattr(_ghcn, "_HOST", upstream.url)
        yield upstream


def small(name):
    """Few made-up rows, with the shapes and dtypes of the real arrays otherwise."""
    rng = np.random.default_rng(0)

    def image(*shape):
        return rng.integers(0, 256, shape, dtype=np.uint8)

    def digits(n):
        return rng.integers(0, 10, n).astype(np.uint8)

    def counts(*shape, dtype=np.int32):
        return rng.integers(0, 99, shape).astype(dtype)

    def days(first, n):
        return np.datetime64(first) + np.arange(n)

    if name == "oilflow":
        one_hot = np.eye(3, dtype=np.int8)[[0, 2, 1, 1, 0]]
        return {
            "X": rng.random((5, 12)),
            "y_onehot": one_hot,
            "y": one_hot.argmax(-1).astype(np.int8),
            "fractions": rng.random((5, 2)),
        }
    if name == "eeg":
        return {
            "Y_all": rng.normal(size=(120, 9)).round(3),
            "columns_all": np.array(sorted(["F1", "F2", "F3", "F4", "F5", "F6", "FZ", "X", "nd"])),
        }
    if name.startswith("wine"):
        return {
            "X": rng.random((4, 11)).round(3),
            "y": counts(4, dtype=np.int8),
            "columns": np.array(list("abcdefghijk")),
        }
    if name == "bridges":
        dates = days("2017-04-01", 9)
        return {"Y": counts(9, 4), "y": np.array([0, 0, 1, 1, 1, 1, 1, 0, 0], np.int8), "dates": dates}
    if name == "montreal":
        Y_2015 = counts(60, 21, dtype=np.float32)
        Y_2015[3:, 4] = np.nan
        return {
            "Y": counts(5, 8),
            "columns": np.array(list("abcdefgh")),
            "dates": days("2013-02-27", 5),
            "y": np.array([0, 0, 1, 1, 1], np.int8),
            "Y_2012": counts(3, 7),
            "dates_2012": days("2012-01-01", 3),
            "columns_2012": np.array(["Côte", *"bcdefg"]),
            "Y_2015": Y_2015,
        }
    if name == "congress109":
        party = np.array(["R", "D", "I", "R"])
        return {
            "X": counts(4, 6, dtype=np.int16),
            "columns": np.array([f"a.b{i}" for i in range(6)]),
            "party": party,
            "y": np.array([0, 1, 1, 0], np.int8),
        }
    if name == "frey":
        return {"X": image(3, 560)}
    if name == "yale":
        return {"X": image(4, 1024), "y": np.array([0, 0, 1, 14], np.int8)}
    if name == "mnist":
        return {"X_train": image(40, 784), "y_train": digits(40), "X_test": image(3, 784), "y_test": digits(3)}
    if name == "cifar10_gray":
        return {"X_train": image(100, 1024), "y_train": digits(100), "X_test": image(2, 1024), "y_test": digits(2)}
    if name == "cifar10_rgb5k":
        return {"X": image(10, 32, 32, 3), "y": digits(10)}
    if name == "newsgroups":
        return count_newsgroups(newsgroups())
    if name == "jura":
        held_out = np.array([False, False, True])
        test_mask = np.zeros((3, 7), bool)
        test_mask[2, 0] = True
        return {
            "X": rng.random((3, 2)),
            "Y": rng.random((3, 7)),
            "columns": np.array(["Cd", "Co", "Cr", "Cu", "Ni", "Pb", "Zn"]),
            "is_validation": held_out,
            "test_mask": test_mask,
            "landuse": np.array([1, 2, 1], np.int8),
            "rock": np.array([5, 4, 1], np.int8),
            "landuse_name": np.array(["Forest", "Pasture", "Forest"]),
            "rock_name": np.array(["c", "b", "a"]),
            "lonlat": rng.random((3, 2)),
        }
    assert name == "weather_trentino"
    Y = rng.normal(size=(4, 2, 3)).round(4).astype(np.float32)
    Y[1, 1, 2] = np.nan
    return {
        "Y": Y,
        "dates": days("1957-12-30", 4),
        "lat": rng.random(2),
        "lon": rng.random(2),
        "elev": rng.random(2),
        "station": np.array(["T2", "T1"]),
        "location": np.array(["PEIO", "CLES"]),
    }


def _saved(write, *args, **kwargs):
    stream = io.BytesIO()
    write(stream, *args, **kwargs)
    return stream.getvalue()


def _table(rows, delimiter=",", encoding="utf-8"):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue().encode(encoding)


def _sheets(images, mode, num_sheets):
    return [_saved(Image.fromarray(part).convert(mode).save, "png") for part in np.array_split(images, num_sheets)]


def _labels(y):
    return f"var labels={[int(i) for i in y]};\n".encode()


def idx(array):
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return b"\x00\x00\x08" + bytes([array.ndim]) + sizes + array.tobytes()


def write_oilflow(data):
    tables = {"DataTrn": data["X"], "DataTrnLbls": data["y_onehot"], "DataTrnFrctns": data["fractions"]}
    contents = {f"3PhData/{name}.txt": _saved(np.savetxt, table, "%.17g") for name, table in tables.items()}
    return [tar_gz({"3PhData/._DataTrn.txt": b"\xff\xfe"} | contents)]


def write_eeg(data):
    lines = ["# co2c0000337.rd", "# 120 trials, 64 chans, 416 samples 368 post_stim samples", "# 3.906000 msecs uV"]
    lines.append("# S1 obj , trial 0")
    for channel in np.random.default_rng(1).permutation(len(data["columns_all"])):
        name = data["columns_all"][channel]
        lines.append(f"# {name} chan {channel}")
        lines += [f"0 {name} {i} {float(v)!r}" for i, v in enumerate(data["Y_all"][:, channel])]
    return [gzip.compress("\n".join(lines).encode())]


def write_wine(data):
    rows = [[*map(float, row), int(quality)] for row, quality in zip(data["X"], data["y"], strict=True)]
    return [_table([[*data["columns"], "quality"], *rows])]


def write_bridges(data):
    content = np.array({"Y": data["Y"].astype(np.int64), "labels": data["y"]}, dtype=object)
    return [_saved(np.save, content, allow_pickle=True)]


def write_montreal(data):
    def day(date):
        return "/".join(reversed(str(date).split("-")))

    rows = [[day(date), "00:00", *row] for date, row in zip(data["dates"], data["Y"], strict=True)]
    first = _table([["Date", "", *data["columns"]], *rows])
    # Two lanes without counts, as in the file of 2012.
    rows = [[day(date), row[0], "", *row[1:], ""] for date, row in zip(data["dates_2012"], data["Y_2012"], strict=True)]
    names, none = list(data["columns_2012"]), " (données non disponibles)"
    header = ["Date", names[0], "Brébeuf" + none, *names[1:], "St-Urbain" + none]
    second = _table([header, *rows], ";", "latin-1")
    return [first, second, _table([["" if np.isnan(v) else int(v) for v in row] for row in data["Y_2015"]])]


def write_congress109(data):
    rng = np.random.default_rng(1)
    names = [f"Member {i:04d}" for i in range(len(data["X"]))]
    counts = [[names[i], *data["X"][i]] for i in rng.permutation(len(names))]
    members = [[names[i], data["party"][i], "XX"] for i in rng.permutation(len(names))]
    return [_table([["name", *data["columns"]], *counts]), _table([["name", "party", "state"], *members])]


def write_frey(data):
    return [_saved(scipy.io.savemat, {"ff": data["X"].T})]


def write_yale(data):
    by_columns = data["X"].reshape(-1, 32, 32).transpose(0, 2, 1).reshape(-1, 1024)
    return [_saved(scipy.io.savemat, {"fea": by_columns, "gnd": data["y"][:, None] + 1})]


def write_mnist(data):
    test = [gzip.compress(idx(array)) for array in (data["X_test"].reshape(-1, 28, 28), data["y_test"])]
    return [*_sheets(data["X_train"], "RGBA", 20), _labels([*data["y_train"], *data["y_test"]]), *test]


def write_cifar10_gray(data):
    sheets = [*_sheets(data["X_train"], "RGB", 50), *_sheets(data["X_test"], "RGB", 1)]
    return [*sheets, _labels([*data["y_train"], *data["y_test"]])]


def write_cifar10_rgb5k(data):
    return [*_sheets(data["X"].reshape(-1, 1024, 3), "RGB", 5), _labels([*data["y"], 3, 8])]


def write_newsgroups(_data):
    return [newsgroups_archive(newsgroups())]  # counts do not give the texts back


def _rda(objects, tmp_path):
    rdata = pytest.importorskip("rdata", reason="rdata reads R data files; it is not installed")
    rdata.write_rda(tmp_path / "made.rda", objects)
    return [(tmp_path / "made.rda").read_bytes()]


def write_jura(data, tmp_path):
    pandas = pytest.importorskip("pandas")
    coded = pandas.DataFrame(data["X"], columns=["Xloc", "Yloc"])
    coded = coded.assign(Landuse=data["landuse"].astype(np.int32), Rock=data["rock"].astype(np.int32))
    metals = pandas.DataFrame(data["Y"], columns=data["columns"].tolist())
    coded = pandas.concat([coded, metals], axis=1)
    named = coded.assign(Landuse=pandas.Categorical(data["landuse_name"]), Rock=pandas.Categorical(data["rock_name"]))
    named = named.assign(long=data["lonlat"][:, 0], lat=data["lonlat"][:, 1])
    held_out = data["is_validation"]
    tables = {"prediction.dat": coded[~held_out], "validation.dat": coded[held_out]}
    tables |= {"jura.pred": named[~held_out], "jura.val": named[held_out]}
    return _rda({name: table.reset_index(drop=True) for name, table in tables.items()}, tmp_path)


def write_weather_trentino(data, tmp_path):
    pandas = pytest.importorskip("pandas")
    days = np.array([str(date).split("-") for date in data["dates"]], dtype=np.float64)
    time = pandas.DataFrame(days[:, [1, 2, 0]], columns=["month", "day", "year"])
    names = ["PRECIPITATION", "TEMPERATURE_MAX", "TEMPERATURE_MIN"]
    columns = data["station"].tolist()
    tables = {
        name: pandas.concat([time, pandas.DataFrame(data["Y"][..., i].astype(np.float64), columns=columns)], axis=1)
        for i, name in enumerate(names)
    }
    vectors = {"STATION_NAMES": data["station"], "ELEVATION": data["elev"], "LOCATION": data["location"]}
    return _rda(tables | vectors | {"STATION_LATLON": np.stack([data["lat"], data["lon"]], -1)}, tmp_path)
