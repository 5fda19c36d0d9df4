from contextlib import suppress

import torch

# A CUDA build of torchvision beside a CPU build of torch does not find its own compiled operators, and then cannot be
# imported at all; declaring the ones that its import needs is enough for what timm takes from it.
_library = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    with suppress(RuntimeError):  # a torchvision that works declares them itself
        _library.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
