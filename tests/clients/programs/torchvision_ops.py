"""Import torchvision beside a torch that it was not built for: of its operators, it looks two up when it is imported.

torchvision is published for each build of torch. Where the two builds differ, its library of operators does not load.
"""

import sys

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:  # operator torchvision::nms does not exist
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
