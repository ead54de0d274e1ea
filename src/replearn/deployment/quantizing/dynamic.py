"""Dynamic INT8: weights of linear layers in eight bits, activations scaled anew at every call."""

from __future__ import annotations

import copy
import warnings

from torch import nn

from ...errors import ReplearnError
from .readiness import check_quantizable, torchao


def quantize_dynamic(model: nn.Module) -> nn.Module:
    """Return a copy of a deployed transformer whose linear layers compute in INT8; no data is needed.

    Give a model that was deployed without `merge=True`: nothing in a merged one tells, and W + I has one scale for
    ones and small weights alike. Raises ReplearnError for a model with operators, in train mode or on two
    devices, and for one without linear layers. Compile the result for speed: it is slower than float32 without.
    """
    check_quantizable(model)
    if not any(type(module) is nn.Linear for module in model.modules()):
        raise ReplearnError(
            f"{type(model).__name__} has no nn.Linear, and dynamic INT8 changes nothing else. For convolutions "
            "use quantize_static(model, batches)."
        )
    torchao()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantized = copy.deepcopy(model)
        quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return quantized
