"""Daily records of weather stations from NOAA's Global Historical Climatology Network."""

import csv
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp.datasets._dataset import Dataset
from pyro_lvgp.datasets._fetch import _FOLDER_VARIABLE, _cache_folder, _own_folder
from pyro_lvgp.datasets._limits import download as download_file
from pyro_lvgp.datasets._limits import gunzip

_HOST = "https://www.ncei.noaa.gov/pub/data/ghcn/daily"
_STATIONS = "ghcnd-stations.txt"
_IDENTIFIER = re.compile("[A-Za-z0-9_-]{11}")
_MISSING = "-9999"  # in files of the archive that have an entry for every day
_T = TypeVar("_T")
# Unit of a count in the files, as a number and in words.
_VARIABLES = {
    "TMAX": (0.1, "maximum temperature [°C]"),
    "TMIN": (0.1, "minimum temperature [°C]"),
    "TAVG": (0.1, "average temperature [°C]"),
    "PRCP": (0.1, "precipitation [mm]"),
    "SNOW": (1.0, "snowfall [mm]"),
    "SNWD": (1.0, "snow depth [mm]"),
    "AWND": (0.1, "average wind speed [m/s]"),
}
_UNITS = {
    "dates": "day of local time",
    "lat": "latitude [degrees north]",
    "lon": "longitude [degrees east]",
    "elev": "elevation [m], NaN if unknown",
    "station": "identifier",
    "station_name": "name of the station",
    "columns": "variables of Y",
}
_CITATION = (
    "Menne, Durre, Vose, Gleason, Houston, An overview of the Global Historical Climatology Network-Daily database, "
    "J. Atmos. Oceanic Technol. 29 (2012); the data: doi:10.7289/V5D21VHZ"
)


class _Station(NamedTuple):
    lat: float
    lon: float
    elev: float
    name: str


@checks_types
def ghcn_daily(
    stations: str | Iterable[str],
    years: Iterable[int | np.integer],
    variables: Iterable[str] = ("TMAX", "TMIN", "TAVG", "PRCP", "SNWD"),
    *,
    download: bool = True,
) -> Dataset:
    """Load daily weather at stations of the GHCN-Daily network, which has some 100,000 stations worldwide.

    The file of a station is read from the subfolder ``ghcn_daily`` of the folder that the environment variable
    ``PYRO_LVGP_DATA`` names, or from the cache, or downloaded.  NOAA updates the files daily, so that there is no checksum:
    keep the files to reproduce results.  A download that cannot be read is not stored.  Values that failed a quality check,
    and counts of -9999, are missing.

    :param stations: identifiers, such as "JA000047662" (Tokyo), or the common prefix of identifiers, such as "JA" for Japan.
    :param years: years of the record, in any order.
    :param variables: of "TMAX", "TMIN", "TAVG" [°C], "PRCP", "SNOW", "SNWD" [mm], "AWND" [m/s].
    :param download: whether to download files that are neither in the folder nor in the cache.
    :returns: ``Y`` [days, stations, variables], NaN where missing; ``dates``, ``lat``, ``lon``, ``elev``, ``station``,
        ``station_name`` and ``columns``.
    :raises ValueError: for an unknown station or variable, a variable named twice, no year, or a file in another format.
    :raises TypeError: for one year or variable where a list of them is expected, or years that are not numbers.
    :raises FileNotFoundError: if a file is not on this machine and may not be downloaded, or ``PYRO_LVGP_DATA`` names no
        folder.
    :raises OSError: if a download fails.

    ``ghcn_daily("JA", [1980, 1981])`` is the record from which the GP-VAE thesis, section 5.6, took its 156 stations.

    >>> ghcn_daily("JA", [1980], ["RAIN"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: expected variables of TMAX, TMIN, TAVG, PRCP, SNOW, SNWD, AWND, got RAIN

    Source: Menne et al. (2012), "An overview of the Global Historical Climatology Network-Daily database".
    """
    variables = _check_variables(variables, years)
    dates = _days(years)
    known = _load(_STATIONS, download, _read_stations)
    chosen = _choose_stations(stations, known)
    Y = np.full((len(dates), len(chosen), len(variables)), np.nan, np.float32)
    for column, name in enumerate(tqdm(chosen, desc="ghcn_daily", unit="station", disable=len(chosen) == 1)):
        read = partial(_read_records, name, dates, variables, Y[:, column])
        _load(f"by_station/{name}.csv.gz", download, read)
    places = [known[name] for name in chosen]
    arrays = {
        "Y": Y,
        "dates": dates,
        "lat": np.array([place.lat for place in places]),
        "lon": np.array([place.lon for place in places]),
        "elev": np.array([place.elev for place in places]),
        "station": np.array(chosen),
        "station_name": np.array([place.name for place in places]),
        "columns": np.array(variables),
    }
    return Dataset(
        "ghcn_daily",
        arrays,
        f"Daily weather at {len(chosen)} stations of GHCN-Daily.",
        {"Y": ", ".join(_VARIABLES[name][1] for name in variables), **_UNITS},
        _CITATION,
        "free for use (WMO Resolution 40 may restrict commercial use of some countries' data)",
        _HOST,
    )


def _check_variables(variables: Iterable[str], years: Any) -> list[str]:
    """Return the list of variables, or raise an error if a variable is unknown or an argument is no list."""
    if isinstance(years, int | np.integer | str) or isinstance(variables, str):
        raise TypeError(
            f"expected lists of years and of variables, got {years!r} and {variables!r}; write [1980] and ['TMAX']"
        )
    variables = list(variables)
    unknown = [name for name in variables if name not in _VARIABLES]
    if unknown or not variables:
        raise ValueError(f"expected variables of {', '.join(_VARIABLES)}, got {', '.join(unknown) or 'none'}")
    if len(set(variables)) < len(variables):
        raise ValueError(f"expected each variable once, got {', '.join(variables)}; leave out what is named again")
    return variables


def _choose_stations(stations: str | Iterable[str], known: Mapping[str, _Station]) -> list[str]:
    """Return the identifiers with a prefix, or the given identifiers, all of which must be known."""
    stations = stations if isinstance(stations, str) else [str(name) for name in stations]
    if not stations:
        raise ValueError(f"expected stations, got {stations!r}; 'JA' stands for all of Japan")
    chosen = [name for name in known if name.startswith(stations)] if isinstance(stations, str) else stations
    for name in chosen or [str(stations)]:
        if name not in known:
            raise ValueError(f"expected stations of {_STATIONS}, got {name!r}; identifiers have 11 characters")
    return chosen


def _days(years: Iterable[int | np.integer]) -> np.ndarray:
    """Return all days of the years."""
    chosen = sorted(set(years))
    if not chosen:
        raise ValueError("expected a year or more, got none")
    if not all(isinstance(year, int | np.integer) for year in chosen):
        raise TypeError(f"expected years as whole numbers, got {chosen}")
    return np.concatenate([np.arange(f"{year:04d}-01-01", f"{year + 1:04d}-01-01", dtype="datetime64[D]") for year in chosen])


def _load(name: str, download: bool, read: Callable[[Path], _T]) -> _T:
    """Read a file of the archive, which is downloaded unless it exists; one that cannot be read is not stored."""
    own, cache = _own_folder(), _cache_folder() / "ghcn_daily"
    for folder in [*([own / "ghcn_daily"] if own else []), cache]:
        if (folder / name).is_file():
            return _read(folder / name, folder / name, read, "Delete the file.")
    advice = f"put it into the folder ghcn_daily of one that the environment variable {_FOLDER_VARIABLE} names"
    if not download:
        raise FileNotFoundError(f"expected {name} in {cache}, got none. Allow the download (download=True), or {advice}.")
    path, url = cache / name, f"{_HOST}/{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        part = Path(temporary) / "part"
        try:
            download_file(url, part)
        except OSError as error:
            raise OSError(f"expected to download {url}, got: {error}. Check the network, or {advice}.") from error
        content = _read(part, url, read, f"Nothing was kept. Check the network and try again, or {advice}.")
        part.replace(path)
    return content


def _read(path: Path, place: Path | str, read: Callable[[Path], _T], advice: str) -> _T:
    """Read a file that came from a place, which errors name."""
    try:
        return read(path)
    except ValueError as error:
        raise ValueError(f"{place}: {error}. {advice}") from error


def _read_stations(path: Path) -> dict[str, _Station]:
    """Read the list of stations, whose columns have fixed widths."""
    stations = {}
    try:
        for line in path.read_text("utf-8").splitlines():
            elevation = float(line[31:37])
            stations[line[:11]] = _Station(
                float(line[12:20]), float(line[21:30]), np.nan if elevation == -999.9 else elevation, line[41:71].strip()
            )
    except ValueError as error:
        raise ValueError(f"expected stations in columns of fixed width, got {error!r}") from error
    bad = [name for name in stations if not _IDENTIFIER.fullmatch(name)]  # names of files, so that no other is read
    if bad or not stations:
        raise ValueError(f"expected stations with identifiers of 11 letters and digits, got {bad[:1] or 'none'}")
    return stations


def _read_records(name: str, dates: np.ndarray, variables: Sequence[str], Y: np.ndarray, path: Path) -> None:
    """Write the values of a station into Y; each line of its file has station, date, variable, count and flags."""
    rows = {str(date).replace("-", ""): row for row, date in enumerate(dates)}
    columns = {variable: column for column, variable in enumerate(variables)}
    try:
        for station, date, variable, count, _, failed, *_ in csv.reader(gunzip(path).decode().splitlines()):
            if station != name:
                raise ValueError(f"a record of {station!r}")
            if date in rows and variable in columns and not failed.strip() and count != _MISSING:
                Y[rows[date], columns[variable]] = int(count) * _VARIABLES[variable][0]
    except Exception as error:  # a damaged file can raise any exception
        raise ValueError(f"expected records of a station, got {error!r}") from error
