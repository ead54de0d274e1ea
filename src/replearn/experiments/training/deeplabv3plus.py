"""DeepLabV3+ of segmentation-models-pytorch, with the auxiliary head that torchvision's DeepLabV3 has."""

from segmentation_models_pytorch import DeepLabV3Plus
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.models.segmentation.fcn import FCNHead


class AuxiliaryDeepLabV3Plus(DeepLabV3Plus):  # type: ignore[misc]
    """In training it says the classes twice, as torchvision's: `aux` is said by the third stage alone.

    In eval mode, and in names of tensors beside `auxiliary_head`, it is the library's own model.
    """

    def __init__(self, backbone: str, num_classes: int) -> None:
        super().__init__(encoder_name=backbone, encoder_weights=None, classes=num_classes)
        self.auxiliary_head = FCNHead(self.encoder.out_channels[-2], num_classes)

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        if not self.training:
            said: Tensor = super().forward(images)
            return said
        features = self.encoder(images)
        aux = self.auxiliary_head(features[-2])
        aux = interpolate(aux, size=images.shape[-2:], mode="bilinear", align_corners=False)
        return {"out": self.segmentation_head(self.decoder(features)), "aux": aux}
