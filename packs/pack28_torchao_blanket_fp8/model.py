"""A byte-level hybrid model, small enough for a CPU: a state-space scan, attention, and experts behind a router."""

import torch
import torch.nn.functional as F

D, HEADS, EXPERTS = 64, 4, 4


class Part(torch.nn.Module):
    """A part of the model; what is no linear layer goes through ``self.fp8``."""

    cast, parts = None, frozenset()

    def fp8(self, x):
        class Through(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return Part.cast(x, torch.float8_e4m3fn)

            @staticmethod
            def backward(ctx, gradient):
                return Part.cast(gradient.contiguous(), torch.float8_e5m2)

        return Through.apply(x) if self.name in Part.parts else x

    def __init__(self, name, **linears):
        super().__init__()
        self.name = name
        for label, (inner, outer) in linears.items():
            setattr(self, label, torch.nn.Linear(inner, outer, bias=False))


class Norm(Part):
    def __init__(self):
        super().__init__("norms")
        self.weight = torch.nn.Parameter(torch.ones(D))

    def forward(self, x):
        return F.rms_norm(self.fp8(x), (D,), self.fp8(self.weight))


class Attention(Part):
    def forward(self, x):
        q, k, v = (self.fp8(t.unflatten(-1, (HEADS, -1)).transpose(1, 2)) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Scan(Part):
    """A diagonal state-space layer: h = a h + b x for each channel, its decay from the input; the state is kept in FP8, if at all."""

    def forward(self, x):
        decay, b, c = self.abc(x).chunk(3, -1)
        decay, b, h, out = torch.sigmoid(decay + 3), self.fp8(b * x), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.fp8(decay[:, t] * h + b[:, t])
            out.append(h)
        return self.out(torch.stack(out, 1) * c)


class Experts(Part):
    def __init__(self):
        super().__init__("experts", up=(D, EXPERTS * 2 * D), down=(EXPERTS * 2 * D, D))
        self.router = Part("router", gate=(D, EXPERTS))

    def forward(self, x):
        chosen = torch.softmax(self.router.fp8(self.router.gate(x)), -1)
        return self.down((F.silu(self.up(x)).unflatten(-1, (EXPERTS, -1)) * chosen[..., None]).flatten(-2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Part("embeddings")
        self.embeddings.weight = torch.nn.Parameter(torch.randn(256, D) * 0.1)
        self.attention = Attention("attention", qkv=(D, 3 * D), out=(D, D))
        self.scan = Scan("scan", abc=(D, 3 * D), out=(D, D))
        self.experts = Experts()
        self.norms = torch.nn.ModuleList(Norm() for _ in range(4))
        self.head = Part("head", out=(D, 256))

    def forward(self, tokens):
        x = self.embeddings.fp8(self.embeddings.weight)[tokens]
        for norm, layer in zip(self.norms[:3], (self.scan, self.attention, self.experts), strict=True):
            x = x + layer(norm(x))
        return self.head.out(self.norms[-1](x))
