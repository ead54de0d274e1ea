"""Models of torchvision and timm, as they are: each is deployed with equal outputs, left alone, or refused.

    python -m torture.third_party

Untrained, with every fourth block from the second replaced by the default operator; deployed plain and as a flat
graph. A model without a stack of blocks is counted. Outputs that differ beyond rounding, and errors that
are not a ReplearnError, are faults.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

import replearn
from replearn import ReplearnError

from .ledger import open_ledger

TORCHVISION = (
    "densenet121 efficientnet_b0 efficientnet_v2_s googlenet mobilenet_v2 mobilenet_v3_small "
    "regnet_y_400mf resnet18 resnet50 shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11_bn"
)
TIMM = (
    "cait_xxs24_224 coat_tiny convit_tiny convnextv2_atto crossvit_tiny_240 deit_tiny_patch16_224 dla34 "
    "edgenext_xx_small efficientformer_l1 efficientnetv2_rw_t eva02_tiny_patch14_224 ghostnet_050 "
    "gmixer_12_224 gmlp_ti16_224 levit_128s mixer_s32_224 mobileone_s0 mobilevit_xxs pit_ti_224 "
    "poolformer_s12 pvt_v2_b0 regnetx_002 repvgg_a0 resmlp_12_224 resnest14d rexnet_100 skresnet18 "
    "tiny_vit_5m_224 vit_tiny_patch16_224 xcit_nano_12_p16_224"
)
NAMES = [f"torchvision:{name}" for name in TORCHVISION.split()] + [f"timm:{name}" for name in TIMM.split()]


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    library, _, key = name.partition(":")
    torch.manual_seed(0)
    if library == "timm":
        import timm

        model = timm.create_model(key, num_classes=10).eval()
        return model, torch.randn(1, *model.pretrained_cfg["input_size"])
    import torchvision

    more: dict[str, Any] = {"init_weights": False} if key == "googlenet" else {}
    return torchvision.models.get_model(key, weights=None, num_classes=10, **more).eval(), torch.randn(
        1, 3, 224, 224
    )


def trial(name: str) -> str:
    try:
        model, x = built(name)
    except Exception as error:  # the library's own
        return f"not built: {type(error).__name__}"
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    try:
        plan = replearn.plan(model, interval=4, first=2)
    except ReplearnError:
        return "no targets"
    if any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()):
        raise RuntimeError("planning has changed the model")
    replearn.replace_(model, plan).eval()
    with torch.no_grad():
        model(x)
    outcome = []
    for flatten in (False, True):
        try:
            replearn.deploy(model, x, flatten=flatten)  # which compares them
            outcome.append("equal")
        except ReplearnError as error:
            if "please report" in str(error):
                raise
            outcome.append("refused")
    return f"deployed {outcome[0]}, flat {outcome[1]}"


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ledger = open_ledger("third_party", total=len(NAMES), seconds=900)
    while ledger.open:
        name = NAMES[ledger.done]
        try:
            ledger.count("models", trial(name))
        except Exception as error:
            ledger.note("faults", f"{name}: {type(error).__name__}: {str(error)[:300]}")
        ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
