"""The same three models in plain torch modules, as one would write them there for speed."""

import torch
from torch import nn
from torch.nn import functional as F

from gpu.cases import Case


def build(case: Case) -> nn.Module:
    """Returns the model of `case`; it returns logits."""
    model = ResNet(case) if case.family == "resnet" else Transformer(case)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    return model


class ConvNorm(nn.Module):
    """A convolution without bias, and its normalization."""

    def __init__(self, channels: int, filters: int, kernel_size: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel_size, stride, kernel_size // 2, bias=False)
        self.norm = nn.BatchNorm2d(filters)

    def forward(self, x):
        return self.norm(self.conv(x))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, is_first: bool):
        super().__init__()
        self.conv1 = ConvNorm(channels, width, 1)
        self.conv2 = ConvNorm(width, width, 3, stride)
        self.conv3 = ConvNorm(width, 4 * width, 1)
        self.shortcut = ConvNorm(channels, 4 * width, 1, stride) if is_first else nn.Identity()

    def forward(self, x):
        y = F.relu(self.conv1(x), inplace=True)
        y = F.relu(self.conv2(y), inplace=True)
        return F.relu(self.conv3(y) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        sizes = case.sizes
        self.stem = ConvNorm(3, sizes.width, 7, 2)
        channels, names = sizes.width, []
        for stage, blocks in enumerate(sizes.stages):
            width = sizes.width * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                names.append(f"stage{stage}_{block}")
                self.add_module(names[-1], Bottleneck(channels, width, stride, block == 0))
                channels = 4 * width
        self.names = names
        self.head = nn.Linear(channels, sizes.classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x), inplace=True), 3, 2, padding=1)
        for name in self.names:
            x = getattr(self, name)(x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, is_causal: bool):
        super().__init__()
        # One product for queries, keys and values instead of three.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.is_causal = heads, is_causal

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Normalization first in a decoder, as in GPT-2; last in an encoder, as in BERT."""

    def __init__(self, width: int, heads: int, is_decoder: bool):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads, is_causal=is_decoder), MLP(width)
        self.is_decoder = is_decoder

    def forward(self, x):
        if self.is_decoder:
            x = x + self.attention(self.attention_norm(x))
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class Transformer(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        sizes, self.is_decoder = case.sizes, case.family == "decoder"
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads, self.is_decoder) for _ in range(sizes.blocks))
        if self.is_decoder:
            self.last_norm = nn.LayerNorm(sizes.width)
        else:
            self.first_norm = nn.LayerNorm(sizes.width)
            self.pooler = nn.Linear(sizes.width, sizes.width)
            self.head = nn.Linear(sizes.width, sizes.classes)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        x = x if self.is_decoder else self.first_norm(x)
        for block in self.blocks:
            x = block(x)
        if self.is_decoder:
            return F.linear(self.last_norm(x), self.tokens.weight)
        return self.head(torch.tanh(self.pooler(x[:, 0])))
