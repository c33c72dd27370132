"""Import torchvision even if its operators cannot be loaded, such as those for GPUs with torch for CPUs."""

import importlib
import sys

_DECLARED = []  # an operator is registered as long as its library is referenced


def torchvision():
    """Import torchvision and return it. Raises ImportError if it is not installed."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # the registrations of "nms" and "qnms" found no operator
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
        for name in [each for each in sys.modules if each.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module("torchvision")
