"""PyTorch datasets over files, lines, HDF5 and Zarr arrays, and the `Loader` for their batches.

All of them also work in a plain `torch.utils.data.DataLoader`. They need torch: `pip install "cachedfs[torch]"`.
`pack`, which writes many samples into one sharded Zarr store, does not need torch: `pip install "cachedfs[pack]"`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachedfs.datasets.file_dataset import FileDataset
    from cachedfs.datasets.hdf5_dataset import HDF5Dataset
    from cachedfs.datasets.line_dataset import LineDataset
    from cachedfs.datasets.loader import Loader
    from cachedfs.datasets.samples import Samples
    from cachedfs.datasets.zarr_dataset import ZarrDataset
    from cachedfs.packing import Packed, pack

__all__ = ["FileDataset", "HDF5Dataset", "LineDataset", "Loader", "Packed", "Samples", "ZarrDataset", "pack"]

_MODULES = {
    "FileDataset": "datasets.file_dataset",
    "HDF5Dataset": "datasets.hdf5_dataset",
    "LineDataset": "datasets.line_dataset",
    "Loader": "datasets.loader",
    "Packed": "packing",
    "Samples": "datasets.samples",
    "ZarrDataset": "datasets.zarr_dataset",
    "pack": "packing",
}
_EXTRAS = {
    "torch": "torch",
    "numpy": "torch",
    "zarr": "zarr",
    "numcodecs": "zarr",
    "google_crc32c": "zarr",
    "h5py": "hdf5",
}


def __getattr__(name: str) -> Any:
    # Each dataset imports its own library: FileDataset needs neither zarr nor h5py.
    if name not in _MODULES:
        raise AttributeError(f"module 'cachedfs.datasets' has no attribute {name!r}")
    try:
        return getattr(import_module(f"cachedfs.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(error.name or "")
        if extra is not None and _MODULES[name] == "packing":
            extra = "pack"
        if extra is None:
            raise
        raise ImportError(
            f"cachedfs.datasets.{name} needs {error.name}: pip install 'cachedfs[{extra}]'"
        ) from error
