"""torchvision's RetinaNet with losses in eval mode, and with boxes in float32 under autocast."""

from typing import Any

import torch
from torch import Tensor
from torchvision.models import get_model
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from .recipe import Detection


class Detector(RetinaNet):  # type: ignore[misc]
    """torchvision's RetinaNet, whose state dict it shares.

    Three things differ. In eval mode it returns the losses as well, if it gets targets. Boxes are computed in
    float32 under autocast: torchvision's anchors have the features' dtype, and bfloat16 does not represent
    integers above 256. For one tensor of pictures it returns the outputs of its head, which can be exported.
    """

    channels_last = False

    def forward(self, images: list[Tensor] | Tensor, targets: list[dict[str, Tensor]] | None = None) -> Any:
        """In train mode the losses; in eval mode the detections, or losses and detections if there are targets.

        For one tensor of pictures (n, 3, height, width) from 0 to 1, the logits and box offsets of every anchor:
        nothing is resized, so sides are multiples of 32, and boxes are not decoded.
        """
        if isinstance(images, Tensor):
            return self.head(list(self.backbone(self.transform.normalize(images)).values()))
        sizes = [(int(image.shape[-2]), int(image.shape[-1])) for image in images]
        batch, targets = self.transform(images, targets)
        tensors = batch.tensors
        if self.channels_last:
            tensors = tensors.contiguous(memory_format=torch.channels_last)
        features = list(self.backbone(tensors).values())
        outputs = {name: value.float() for name, value in self.head(features).items()}
        # only shape, dtype and device of these are read
        shapes = [feature.new_zeros((), dtype=torch.float32).expand(feature.shape) for feature in features]
        anchors = self.anchor_generator(batch, shapes)
        with torch.autocast(tensors.device.type, enabled=False):
            losses = self.compute_loss(targets, outputs, anchors) if targets is not None else {}
            if self.training:
                return losses
            places = [feature.shape[-2] * feature.shape[-1] for feature in features]
            anchors_each = outputs["cls_logits"].shape[1] // sum(places)
            parts = [count * anchors_each for count in places]
            split = {name: list(value.split(parts, dim=1)) for name, value in outputs.items()}
            found = self.postprocess_detections(
                split, [list(each.split(parts)) for each in anchors], batch.image_sizes
            )
            found = self.transform.postprocess(found, batch.image_sizes, sizes)
        return (losses, found) if targets is not None else found


def retinanet(backbone: str, num_classes: int, settings: Detection) -> Detector:
    """RetinaNet with a ResNet and a feature pyramid, for training from scratch: no layer is frozen."""
    body = get_model(backbone, weights=None)
    above = LastLevelP6P7(256, 256)
    return Detector(
        _resnet_fpn_extractor(body, 5, returned_layers=[2, 3, 4], extra_blocks=above),
        num_classes,
        min_size=settings.min_size,
        max_size=settings.max_size,
        score_thresh=settings.score_threshold,
        detections_per_img=settings.max_detections,
    )
