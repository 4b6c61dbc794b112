"""Parsers of upstream R data files, which need the optional package ``rdata``."""

from pathlib import Path
from typing import Any

import numpy as np

_JURA_METALS = ["Cd", "Co", "Cr", "Cu", "Ni", "Pb", "Zn"]
_WEATHER = {"PRCP_mm": "PRECIPITATION", "TMAX_C": "TEMPERATURE_MAX", "TMIN_C": "TEMPERATURE_MIN"}


def parse_jura(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse tables with codes (prediction.dat, validation.dat) and with names and coordinates (jura.pred, jura.val)."""
    objects = _read_rda(paths[0])
    coded = [objects["prediction.dat"], objects["validation.dat"]]
    named = [objects["jura.pred"], objects["jura.val"]]
    is_validation = np.repeat([False, True], [len(table) for table in coded])
    Y = _stack(coded, _JURA_METALS)
    test_mask = np.zeros(Y.shape, bool)
    test_mask[is_validation, 0] = True
    return {
        "X": _stack(coded, ["Xloc", "Yloc"]),
        "Y": Y,
        "columns": np.array(_JURA_METALS),
        "X_columns": np.array(["x_km", "y_km"]),
        "is_validation": is_validation,
        "test_mask": test_mask,
        "landuse": _stack(coded, ["Landuse"])[:, 0].astype(np.int8),
        "rock": _stack(coded, ["Rock"])[:, 0].astype(np.int8),
        "landuse_name": np.concatenate([_strings(table["Landuse"]) for table in named]),
        "rock_name": np.concatenate([_strings(table["Rock"]) for table in named]),
        "lonlat": _stack(named, ["long", "lat"]),
    }


def parse_weather_trentino(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse a table for each variable (month, day, year, then a column for each station), and vectors with station data."""
    objects = _read_rda(paths[0])
    station = _strings(objects["STATION_NAMES"])
    table = objects["PRECIPITATION"]
    dates = [f"{y:04.0f}-{m:02.0f}-{d:02.0f}" for y, m, d in _stack([table], ["year", "month", "day"])]
    Y = np.stack([_stack([objects[name]], station.tolist()) for name in _WEATHER.values()], -1)
    lat_lon = np.asarray(objects["STATION_LATLON"], dtype=np.float64)
    return {
        "Y": Y.round(4).astype(np.float32),
        "columns": np.array(list(_WEATHER)),
        "dates": np.array(dates, dtype="datetime64[D]"),
        "lat": lat_lon[:, 0],
        "lon": lat_lon[:, 1],
        "elev": np.asarray(objects["ELEVATION"], dtype=np.float64),
        "station": station,
        "location": _strings(objects["LOCATION"]),
    }


def _read_rda(path: Path) -> dict[str, Any]:
    """Read the objects of an R data file by name."""
    try:
        import rdata
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path.name} is an R data file: expected the package rdata to read it, got none installed. "
            "Run `pip install rdata`."
        ) from error
    return rdata.read_rda(path, default_encoding="latin-1")


def _stack(tables: list[Any], columns: list[str]) -> np.ndarray:
    """Concatenate the rows of columns of several data frames, as float64 [rows, columns]."""
    return np.concatenate([table[columns].to_numpy(dtype=np.float64) for table in tables])


def _strings(values: Any) -> np.ndarray:
    """Convert values, such as those of an R factor, to strings."""
    return np.array([str(value) for value in np.asarray(values)])
