"""Import, compress, save, load, replace and deploy with the core's dependencies alone."""

import importlib.util

import torch

import replearn

for optional in ("numpy", "typer", "rich", "matplotlib", "sklearn", "timm", "transformers"):
    assert importlib.util.find_spec(optional) is None, f"{optional} is installed: this is not a bare environment"
images = [torch.randn(8, 3, 32, 32) for _ in range(3)]

small = replearn.compress(replearn.models.resnet32().eval(), images, budget="blocks=2")
print(small)
torch.save(small.model, "small.pt")
again = torch.load("small.pt", weights_only=False)
assert torch.equal(again(images[0]), small.model(images[0]))

model = replearn.models.resnet32()
replearn.replace_(model, replearn.plan(model, interval=2))
replearn.save(model, "model.safetensors")
loaded = replearn.load(replearn.models.resnet32(), "model.safetensors").eval()
assert torch.equal(loaded(images[0]), model.eval()(images[0]))
plain = replearn.deploy(loaded, example=images[0])
torch.testing.assert_close(plain(images[0]), loaded(images[0]), rtol=1e-4, atol=1e-4)
print(f"replearn {replearn.__version__} works with torch {torch.__version__} and safetensors alone")
