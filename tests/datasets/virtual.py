"""Write an HDF5 file with virtual datasets and links to another file."""

import h5py
import numpy as np


def write(path):
    """Write a file with virtual datasets `x` (over another file), `y` (over `x`) and `own` (over `z`), and two links."""
    with h5py.File(path.with_name("part.h5"), "w") as file:
        file["x"] = np.arange(5)
    with h5py.File(path, "w") as file:
        file["z"] = np.arange(5) * 2
        for name, source, of in (("x", "part.h5", "x"), ("y", ".", "x"), ("own", ".", "z")):
            layout = h5py.VirtualLayout((5,), "i8")
            layout[:] = h5py.VirtualSource(source, of, (5,))
            file.create_virtual_dataset(name, layout)
        file["link"] = h5py.ExternalLink("part.h5", "x")
        file["group"] = h5py.ExternalLink("part.h5", "/")
