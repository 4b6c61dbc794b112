"""Parsers of upstream text and table files, which take the files in the order of the registry."""

import csv
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

from pyro_lvgp.datasets._limits import gunzip, members

_EEG_CHANNELS = ["FZ", "F1", "F2", "F3", "F4", "F5", "F6"]
_EEG_RATE = 256  # samples per second
_EEG_HELD_OUT = 100  # number of the last samples, of the first three channels

_SEASONS = ["winter_DJF", "spring_MAM", "summer_JJA", "autumn_SON"]
# The file of 2015 has no header.  These are the columns of the public table of Montreal, in the same order.
_MONTREAL_2015 = [
    *("Berri1", "Boyer", "Brebeuf", "CSC", "Maisonneuve_1", "Maisonneuve_2", "Maisonneuve_3", "Notre-Dame", "Parc"),
    *("Parc U-Zelt Test", "PierDup", "Pont_Jacques_Cartier", "Rachel / Hotel de Ville", "Rachel / Papineau"),
    *("Rene-Levesque", "Saint-Antoine", "Saint-Laurent U-Zelt Test", "Saint-Urbain", "Totem_Laurier", "University"),
    "Viger",
]

_NEWSGROUPS = ["alt.atheism", "comp.sys.mac.hardware", "sci.med"]
# The repository has merged both parts of the collection into "train".
_MESSAGE = re.compile(r"[^/]+/20news-bydate/20news-bydate-train/([^/]+)/([0-9]+)")


def parse_oilflow(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse a tar archive of three tables separated by white space: readings, one-hot labels, fractions."""
    tables = {}
    with tarfile.open(paths[0]) as archive:
        for member in members(archive):
            stream = archive.extractfile(member)
            if stream is not None:
                tables[Path(member.name).stem] = stream.read()
    X, labels, fractions = (
        np.loadtxt(tables[stem].decode().splitlines(), ndmin=2) for stem in ("DataTrn", "DataTrnLbls", "DataTrnFrctns")
    )
    one_hot = labels.astype(np.int8)
    return {
        "X": X,
        "y": one_hot.argmax(-1).astype(np.int8),
        "y_onehot": one_hot,
        "fractions": fractions,
        "columns": np.array([f"density_{i + 1:02d}" for i in range(X.shape[-1])]),
    }


def parse_eeg(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse one gzipped trial: header lines that start with #, then lines "trial channel sample microvolt"."""
    lines = gunzip(paths[0]).decode("ascii").splitlines()
    header = [line[1:].strip() for line in lines if line.startswith("#")]
    trial = next(match for line in header if (match := re.fullmatch(r"(.*?)\s*, trial (\d+)", line)))
    series: dict[str, list[float]] = {}
    for line in lines:
        if not line.startswith("#"):
            _, channel, _, value = line.split()
            series.setdefault(channel, []).append(float(value))
    columns_all = sorted(series)
    Y = np.stack([series[channel] for channel in _EEG_CHANNELS], -1)
    test_mask = np.zeros(Y.shape, bool)
    test_mask[-_EEG_HELD_OUT:, :3] = True
    return {
        "t": np.arange(len(Y)) / _EEG_RATE,
        "Y": Y,
        "columns": np.array(_EEG_CHANNELS),
        "test_mask": test_mask,
        "Y_all": np.stack([series[channel] for channel in columns_all], -1),
        "columns_all": np.array(columns_all),
        "subject": np.array([header[0].removesuffix(".rd")]),
        "trial": np.array([int(trial[2])]),
        "condition": np.array([trial[1]]),
    }


def parse_wine(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse a comma-separated table whose last column is the quality."""
    rows = _read_rows(paths[0])
    table = np.array(rows[1:], dtype=np.float64)
    return {"X": table[:, :-1], "y": table[:, -1].astype(np.int8), "columns": np.array(rows[0][:-1])}


def parse_bridges(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse a pickled dictionary in an npy file, which lacks dates and columns (see the registry)."""
    with paths[0].open("rb") as stream:
        Y = np.asarray(_load_object(stream)["Y"]).astype(np.int32)
    dates = np.datetime64("2017-04-01") + np.arange(len(Y))
    return {
        "Y": Y,
        "y": np.is_busday(dates).astype(np.int8),  # equal to the file's labels on every row
        "columns": np.array(["Brooklyn", "Manhattan", "Williamsburg", "Queensboro"]),
        "dates": dates,
    }


def parse_montreal(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse the tables of 2013 (comma), 2012 (semicolon, Latin-1) and 2015 (no header, no dates)."""
    Y, columns, dates = _dated_counts(_read_rows(paths[0]), first=2)
    Y_2012, columns_2012, dates_2012 = _dated_counts(_read_rows(paths[1], ";", "latin-1"), first=1)
    Y_2015 = np.genfromtxt(paths[2], delimiter=",", dtype=np.float32)
    dates_2015 = np.datetime64("2015-01-01") + np.arange(len(Y_2015))
    return {
        "Y": Y,
        "y": _season(dates),
        "columns": columns,
        "dates": dates,
        "season_names": np.array(_SEASONS),
        "Y_2012": Y_2012,
        "y_2012": _season(dates_2012),
        "columns_2012": columns_2012,
        "dates_2012": dates_2012,
        "Y_2015": Y_2015,
        "y_2015": _season(dates_2015),
        "columns_2015": np.array(_MONTREAL_2015),
        "dates_2015": dates_2015,
    }


def parse_congress109(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse counts (name, then a column for each phrase) and members (name, party, ...), and sort both by name."""
    header, *counts = _read_rows(paths[0])
    _, *members = _read_rows(paths[1])
    counts.sort(key=lambda row: row[0])
    members.sort(key=lambda row: row[0])
    if [row[0] for row in counts] != [row[0] for row in members]:
        raise ValueError("expected the same names in both tables, got different ones: an upstream file has changed.")
    party = np.array([row[1] for row in members])
    return {
        "X": np.array([row[1:] for row in counts], dtype=np.float64).astype(np.int16),
        "columns": np.array(header[1:]),
        "y": (party != "R").astype(np.int8),
        "party": party,
    }


def parse_newsgroups(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse the archive of a repository with a numbered file for each message, in the folder of its class."""
    messages = _read_messages(paths[0])
    keys = sorted(messages)
    texts = [messages[key] for key in keys]
    words = CountVectorizer(token_pattern=r"\b\w\w+\b", min_df=0.1, max_df=0.9)
    body_words = CountVectorizer(token_pattern=r"\b[a-z]{2,20}\b", min_df=20, max_df=0.9)
    counts = words.fit_transform(texts).toarray()
    body = body_words.fit_transform([text.partition("\n\n")[2] for text in texts])
    body.sort_indices()
    return {
        "X": counts.astype(np.int16),
        "vocabulary": words.get_feature_names_out().astype(str),
        "y": np.array([label for label, _ in keys], dtype=np.int8),
        "class_names": np.array(_NEWSGROUPS),
        "doc_id": np.array([str(number) for _, number in keys]),
        "body_csr_data": body.data.astype(np.int16),
        "body_csr_indices": body.indices.astype(np.int32),
        "body_csr_indptr": body.indptr.astype(np.int64),
        "body_vocabulary": body_words.get_feature_names_out().astype(str),
    }


def _read_messages(path: Path) -> dict[tuple[int, int], str]:
    """Read messages by class and file number, without extracting them to disk; skip members of other names or types."""
    messages = {}
    with tarfile.open(path, "r|gz") as archive:
        for member in members(archive):
            match = _MESSAGE.fullmatch(member.name)
            if match and match[1] in _NEWSGROUPS and member.isreg() and (stream := archive.extractfile(member)):
                # The messages declare no encoding.  In Latin-1 every byte is a character.
                messages[_NEWSGROUPS.index(match[1]), int(match[2])] = stream.read().decode("latin-1")
    return messages


def _read_rows(path: Path, delimiter: str = ",", encoding: str = "utf-8") -> list[list[str]]:
    """Read the rows of a table that are not empty."""
    with path.open(newline="", encoding=encoding) as stream:
        return [row for row in csv.reader(stream, delimiter=delimiter) if row]


def _dated_counts(rows: list[list[str]], first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return counts from column ``first`` on and their names, without empty columns, and dates (dd/mm/yyyy in column 0)."""
    header, *body = rows
    nonempty = [i for i in range(first, len(header)) if any(row[i] for row in body)]
    Y = np.array([[int(row[i]) for i in nonempty] for row in body], dtype=np.int32)
    dates = np.array(["-".join(reversed(row[0].split("/"))) for row in body], dtype="datetime64[D]")
    return Y, np.array([header[i] for i in nonempty]), dates


def _season(dates: np.ndarray) -> np.ndarray:
    """Return the meteorological season of each date; December, January and February are 0."""
    month = dates.astype("datetime64[M]").astype(np.int64) % 12 + 1
    return (month % 12 // 3).astype(np.int8)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of arrays and plain containers, which refuses all other classes, since a pickle can run any code."""

    _ALLOWED = frozenset({"_reconstruct", "_frombuffer", "ndarray", "dtype", "scalar"})

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0] == "numpy" and name in self._ALLOWED) or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"expected a pickle of numpy arrays only, got {module}.{name} in it.")


def _load_object(stream: BinaryIO) -> dict[str, Any]:
    """Read the dictionary in an npy file written with ``allow_pickle``."""
    np.lib.format.read_magic(stream)
    np.lib.format.read_array_header_1_0(stream)
    return _ArrayUnpickler(stream).load().item()
