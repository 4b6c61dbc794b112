"""Parsers of upstream image files, which take the files in the order of the registry."""

import re
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

from pyro_lvgp.datasets._limits import gunzip

_CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_GREY_WEIGHTS = np.array([0.299, 0.587, 0.114])  # of red, green and blue


def parse_frey(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse a Matlab file with an image in each column of ``ff``."""
    images = np.ascontiguousarray(scipy.io.loadmat(paths[0])["ff"].T)
    return {"X": images.astype(np.uint8), "image_shape": np.array([28, 20])}


def parse_yale(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse a Matlab file with column-major images in the rows of ``fea`` and subjects 1 to 15 in ``gnd``."""
    content = scipy.io.loadmat(paths[0])
    images = content["fea"].reshape(-1, 32, 32).swapaxes(1, 2)
    return {
        "X": images.reshape(len(images), -1).astype(np.uint8),
        "y": (content["gnd"].ravel().astype(np.int64) - 1).astype(np.int8),
        "image_shape": np.array([32, 32]),
    }


def parse_mnist(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse PNG sheets with an image in each row, their labels in Javascript, and the test set in gzipped idx files."""
    *sheets, labels, test_images, test_labels = paths
    X_train = np.concatenate([_read_sheet(path, "L") for path in sheets])
    return {
        "X_train": X_train,
        "y_train": _read_labels(labels)[: len(X_train)],
        "X_test": _read_idx(test_images).reshape(-1, 28 * 28),
        "y_test": _read_idx(test_labels),
        "image_shape": np.array([28, 28]),
    }


def parse_cifar10_gray(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse PNG sheets with an image in each row, the last sheet that of the test set, and their labels in Javascript."""
    *sheets, test_sheet, labels = paths
    X_train = np.concatenate([_grey(_read_sheet(path, "RGB")) for path in sheets])
    X_test = _grey(_read_sheet(test_sheet, "RGB"))
    y = _read_labels(labels)
    return {
        "X_train": X_train,
        "y_train": y[: len(X_train)],
        "X_test": X_test,
        "y_test": y[len(X_train) : len(X_train) + len(X_test)],
        "class_names": np.array(_CIFAR_CLASSES),
        "image_shape": np.array([32, 32]),
    }


def parse_cifar10_rgb5k(paths: list[Path]) -> dict[str, np.ndarray]:
    """Parse PNG sheets with an image in each row, and their labels in Javascript."""
    *sheets, labels = paths
    X = np.concatenate([_read_sheet(path, "RGB") for path in sheets]).reshape(-1, 32, 32, 3)
    return {"X": X, "y": _read_labels(labels)[: len(X)], "class_names": np.array(_CIFAR_CLASSES)}


def _read_sheet(path: Path, mode: str) -> np.ndarray:
    """Read a sheet with an image in each row, in a mode of PIL: ``"L"`` for grey levels, ``"RGB"`` for colours."""
    with Image.open(path) as image:
        return np.array(image.convert(mode))


def _grey(rgb: np.ndarray) -> np.ndarray:
    """Convert colours in the last dimension to rounded grey levels."""
    return np.rint(rgb @ _GREY_WEIGHTS).astype(np.uint8)


def _read_labels(path: Path) -> np.ndarray:
    """Read the numbers of ``var labels=[5, 0, ...];``."""
    return np.array([int(n) for n in re.findall(r"\d+", path.read_text().partition("=")[2])], dtype=np.uint8)


def _read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes: two zeros, type 8, number of dimensions, big-endian sizes, then the entries."""
    content = gunzip(path)
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path.name}: expected an idx file of unsigned bytes, got one that starts with {content[:4]!r}.")
    num_dims = content[3]
    shape = np.frombuffer(content, ">u4", num_dims, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape).copy()
