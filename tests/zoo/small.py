"""Small models of our own: a multilayer perceptron and a residual network with BatchNorm."""

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Perceptron", "ResNet"]


class Perceptron(nn.Module):
    """Mean squared error inside forward."""

    def __init__(self, width: int, hidden: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(num_blocks))
        )

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        y = self.blocks(x)
        return {"loss": functional.mse_loss(y, target), "prediction": y}


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride=stride, bias=False) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Returns (loss, logits); cross entropy."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(2)
        self.stages = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pool(functional.relu(self.norm(self.stem(images))))
        x = functional.adaptive_avg_pool2d(self.stages(x), 1).flatten(1)
        logits = self.head(x)
        return functional.cross_entropy(logits, labels), logits
