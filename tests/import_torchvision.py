"""torchvision, also where its operators cannot be loaded, as those made for GPUs beside a torch for CPUs: they are not needed here."""

import importlib
import sys

__all__ = ["torchvision"]

_DECLARED = []  # an operator is there for as long as its library is held


def torchvision():
    """Import torchvision and return it. Raises ImportError where it is not installed."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # what registers "nms" and "qnms" found none
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)
        for name in [each for each in sys.modules if each.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module("torchvision")
